"""A layout with the name of its rank on it: what ``export_layout`` writes and ``weightd plan`` reads.

The file is one line of text, so that a person sees what it is, and a msgpack
map of the header with the wire's layout message inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from weightd.core.layout.faults import MalformedLayout
from weightd.core.layout.message import DEFAULT_LIMITS, decode_layout, encode_layout, unpacked
from weightd.core.layout.packing import packed
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName, TrainerRank

if TYPE_CHECKING:
    from weightd.core.layout.columns import Layout
    from weightd.core.layout.message import LayoutLimits

MAGIC = b"weightd layout 1\n"
"""First line of a file; the number is the header's format."""

NO_NODE = NodeId("")
NO_SLOT = SlotName("")

SUFFIX = ".layout"
"""End of a file's name."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutFile:
    """One rank's layout and whose it is.

    Attributes:
        who: The trainer rank or rollout rank.
        size: The world, or the size of the engine.
        layout: What the rank holds or needs.
        node: Where it was, or empty.
        slot: The device it was on, or empty.
    """

    who: TrainerRank | RolloutRank
    size: int
    layout: Layout
    node: NodeId = NO_NODE
    slot: SlotName = NO_SLOT

    @property
    def name(self) -> str:
        """Name of the file: ``trainer-<r>.layout`` or ``<engine>-<k>.layout``."""
        return layout_file_name(self.who)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["trainer", "rollout"]
    engine: str
    rank: int
    size: int
    node: str
    slot: str
    layout: bytes


def layout_file_name(who: TrainerRank | RolloutRank) -> str:
    """Return the file name of a rank's layout.

    Engine names may hold anything; what is no letter, digit, dot, dash or
    underscore is written as ``%`` and two hex digits per byte.

    >>> layout_file_name(TrainerRank(3)), layout_file_name(RolloutRank(EngineId("a/b"), EngineRank(0)))
    ('trainer-3.layout', 'a%2Fb-0.layout')
    """
    if not isinstance(who, RolloutRank):
        return f"trainer-{who}{SUFFIX}"
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"
    safe = "".join(chr(b) if b in plain else f"%{b:02X}" for b in who.engine.encode())
    return f"{safe}-{who.k}{SUFFIX}"


def encode_file(file: LayoutFile) -> bytes:
    """Return the bytes of a layout file."""
    who = file.who
    rollout = isinstance(who, RolloutRank)
    header = {
        "role": "rollout" if rollout else "trainer",
        "engine": who.engine if isinstance(who, RolloutRank) else "",
        "rank": who.k if isinstance(who, RolloutRank) else who,
        "size": file.size,
        "node": file.node,
        "slot": file.slot,
        "layout": encode_layout(file.layout),
    }
    return MAGIC + packed(header)


def decode_file(data: bytes, limits: LayoutLimits = DEFAULT_LIMITS) -> LayoutFile:
    """Return the rank and layout that a file holds.

    Args:
        data: All bytes of the file, from anywhere.
        limits: What to accept.

    Raises:
        MalformedLayout: The bytes are no layout file.
        Refused: The layout breaks a rule.
    """
    if not data.startswith(MAGIC):
        raise MalformedLayout(f"the file does not begin with {MAGIC.decode().strip()!r}")
    try:
        header = msgspec.convert(unpacked(data[len(MAGIC) :], limits), _Header, strict=True)
    except msgspec.ValidationError as e:
        raise MalformedLayout(str(e)) from e
    if not 0 <= header.rank < header.size:
        raise MalformedLayout(f"rank {header.rank} of {header.size}")
    if (header.role == "trainer") != (header.engine == ""):
        raise MalformedLayout(f"role {header.role} with engine {header.engine!r}")
    who: TrainerRank | RolloutRank = TrainerRank(header.rank)
    whose = f"layout of trainer rank {header.rank}"
    if header.role == "rollout":
        who = RolloutRank(EngineId(header.engine), EngineRank(header.rank))
        whose = f"layout of rollout rank {who}"
    layout = decode_layout(header.layout, limits, whose)
    return LayoutFile(who, header.size, layout, NodeId(header.node), SlotName(header.slot))
