"""A name for the content of a layout: equal content, equal digest, on every machine.

Plans point to rows of a layout's tables, so the order of the tables and of the
pieces is content.  What means nothing is not: step and stride of a dimension of
extent 1, and how wide the columns are beyond the widest tensor.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.boxes import pieces_of, tidy
from weightd.core.layout.packing import packed

if TYPE_CHECKING:
    from weightd.core.layout.columns import Layout

DIGEST_BYTES = 16
"""Length before hex: 128 bits, no two of a run's layouts meet by chance."""

_DOMAIN = b"weightd-layout"  # a layout's digest equals the digest of nothing else


def layout_digest(layout: Layout) -> str:
    """Return 32 hex characters that name the content of a valid layout.

    >>> from weightd.core.layout.build import LayoutBuilder
    >>> layout_digest(LayoutBuilder().build()) == layout_digest(LayoutBuilder().build())
    True
    """
    state = blake2b(digest_size=DIGEST_BYTES, person=_DOMAIN)
    tables = [
        [[t.name, t.shape, t.dtype] for t in layout.tensors],
        [[b.name, b.nbytes, b.dtype, b.kind, b.region, b.base] for b in layout.buffers],
        layout.aliases,
        [[u.name, None if u.rows is None else [u.rows.start, u.rows.end], u.why] for u in layout.unused],
        layout.kept,
        [layout.pieces, layout.ndim],
    ]
    state.update(packed(tables))
    pieces = tidy(pieces_of(layout))
    for column in (
        pieces.tensor,
        pieces.start,
        pieces.extent,
        pieces.step,
        pieces.buffer,
        pieces.offset,
        pieces.stride,
    ):
        state.update(np.ascontiguousarray(column, "<i8").tobytes())
    return state.hexdigest()
