"""The payload of a slot, read by the layout's numbers: what checks see of it is what its readers will see."""

from __future__ import annotations

from weightd.core.dtypes import dtype_named
from weightd.core.layout.columns import Layout
from weightd.core.layout.local import Elements
from weightd.link.copies import Bytes


def buffer_elements(layout: Layout, payload: Bytes) -> list[Elements]:
    """Return the elements of every buffer of a layout, as views, in the carriers of their types.

    Args:
        layout: What the payload holds.
        payload: All bytes of it, shape (nbytes,).
    """
    return [payload[b.base : b.base + b.nbytes].view(dtype_named(b.dtype).carrier) for b in layout.buffers]
