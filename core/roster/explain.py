"""A topology as text: who sits where, and the sums that show that nobody is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightd.core.errors import ranges
from weightd.core.roster.counts import CoverageCounts, coverage_counts, groups, identities, pairs, placement
from weightd.core.roster.roster_error import plural, slots_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightd.core.roster.topology import NodeShard, SlotLabel, Topology
    from weightd.core.units import SlotName

COLUMNS = ("engine", "ranks", "placement", "node", "head", "k", "slots", "trainer ranks")


def explain_topology(topology: Topology, labels: Mapping[SlotName, SlotLabel] | None = None) -> str:
    """Return a table of node shards, one line each, and the sums under it.

    Args:
        topology: What to explain.
        labels: Slots as their declaration writes them, so that numbers show as ranges.

    Returns:
        Lines without a newline at the end.  ``head`` is the smallest k of a node
        shard; ``trainer ranks`` are those on its slots, in the order of k.
    """
    rows: list[tuple[str, ...]] = [COLUMNS]
    shares = pairs(topology)
    placed = placement(topology)
    for engine, shards in groups(topology).items():
        trainer_of = {pair.k: int(pair.trainer_rank) for pair in shares[engine]}
        for shard in shards:
            first = shard is shards[0]
            rows.append(
                (
                    engine if first else "",
                    str(len(topology.engines[engine])) if first else "",
                    placed[engine] if first else "",
                    shard.node,
                    str(shard.ranks[0]),
                    ranges(shard.ranks),
                    slots_text(_shown(shard, labels or {})),
                    _in_order([trainer_of[k] for k in shard.ranks if k in trainer_of]),
                )
            )
    shard_count = len(rows) - 1
    head = (
        f"{plural(len(topology.trainers), 'trainer rank')}, {plural(len(topology.engines), 'engine')}, "
        f"{plural(shard_count, 'node shard')}, {plural(len(topology.nodes), 'node')}, mode {topology.mode}"
    )
    return "\n".join([head, "", *_table(rows), "", *_sums(topology)])


def explain_counts(counts: CoverageCounts) -> str:
    """Return identity I1 as one line, both of its sides.

    >>> explain_counts(CoverageCounts(8, 6, 2, 0, 0, 7, 0, 1, 0))
    '8 trainer ranks = 6 covered + 2 reserved; 7 engine slots = 6 covered + 1 without a trainer rank'
    """
    ranks = {
        "covered": counts.covered,
        "reserved": counts.reserved,
        "uncovered": counts.uncovered,
        "source only": counts.source_only,
    }
    slots = {
        "covered": counts.covered,
        "claimed again": counts.excess,
        "without a trainer rank": counts.without_trainer,
        "on no node": counts.on_no_node,
    }
    return (
        f"{plural(counts.world, 'trainer rank')} = {_sum(ranks)}; "
        f"{plural(counts.memberships, 'engine slot')} = {_sum(slots)}"
    )


def _sums(topology: Topology) -> list[str]:
    """Return the lines under the table."""
    lines = [explain_counts(coverage_counts(topology)), *identities(topology)]
    if topology.reserved:
        lines.insert(1, f"reserved trainer ranks {ranges(topology.reserved)}: no engine, still sources of their shards")
    return lines


def _sum(parts: Mapping[str, int]) -> str:
    """Return the parts that are not zero as a sum."""
    return " + ".join(f"{count} {name}" for name, count in parts.items() if count) or "0"


def _shown(shard: NodeShard, labels: Mapping[SlotName, SlotLabel]) -> list[SlotLabel]:
    """Return the slots of a node shard as their declaration writes them."""
    return [labels.get(place.slot, place.slot) for place in shard.places]


def _in_order(ranks: Sequence[int]) -> str:
    """Return ranks as ranges that keep their order, because a permutation is what a reader looks for."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(ranges(range(first, last + 1)) for first, last in runs) or "none"


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return rows with columns of equal width."""
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]
