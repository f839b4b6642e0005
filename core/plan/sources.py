"""Which of several replicas feeds whom.

Same slot, then same node, then another node.  Where several remain, bytes are
spread evenly over them.  The choice for one node depends on nothing but the
proof and that node, so every daemon comes to the same answer for itself; and a
box that comes from elsewhere has one source for the whole node, so that each of
its bytes crosses once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weightd.core.layout.columns import Int64
from weightd.core.plan.alike import equal_rows
from weightd.core.units import NodeId, RolloutRank, TrainerRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightd.core.plan.holdings import Boxes
    from weightd.core.roster.topology import Topology

REMOTE = -1
"""In place of a row: no rank of this node holds the box."""


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The boxes grouped by who holds them.

    Attributes:
        group: Group of each box, shape (B,).
        ranks: Per group, the ranks that hold its boxes, ascending.
        first: First row of each box in the table of pieces, shape (B,).
    """

    group: Int64
    ranks: tuple[tuple[int, ...], ...]
    first: Int64


def holders_of(boxes: Boxes) -> Holders:
    """Return who holds each box; thousands of boxes have a handful of groups of holders."""
    count = boxes.holders
    group: Int64 = np.zeros(len(boxes), np.int64)
    ranks: list[tuple[int, ...]] = []
    for n in np.unique(count).tolist():
        of_size = np.flatnonzero(count == n)
        rows = boxes.first[of_size][:, None] + np.arange(n)
        members = boxes.rank[rows]
        if n == 1:
            _, kinds, kind = np.unique(members[:, 0], return_index=True, return_inverse=True)
        else:
            kinds, kind = equal_rows(members)
        group[of_size] = kind + len(ranks)
        ranks.extend(tuple(r) for r in members[kinds].tolist())
    return Holders(group, tuple(ranks), boxes.first[:-1])


def choose_local(
    topology: Topology,
    node: NodeId,
    ranks: Sequence[RolloutRank],
    holders: Holders,
    box: Int64,
    target: Int64,
    nbytes: Int64,
) -> Int64:
    """Return for each needed part of a box the piece of this node that feeds it.

    Args:
        topology: The ranks and where they are.
        node: The node.
        ranks: Rollout ranks of the node.
        holders: Who holds each box.
        box: Box of each part, shape (M,).
        target: Position in ``ranks`` of who needs it, shape (M,).
        nbytes: Bytes of each part, shape (M,).

    Returns:
        Rows of the table of source pieces, ``REMOTE`` where no rank of the node holds the box, shape (M,).
    """
    chosen: Int64 = np.full(len(box), REMOTE, np.int64)
    load = dict.fromkeys(topology.trainer_ranks(node), 0)
    open_choices: list[tuple[Int64, list[int], tuple[int, ...]]] = []
    kind = holders.group[box] * len(ranks) + target
    order = np.argsort(kind, kind="stable")
    edges = np.flatnonzero(np.diff(kind[order], prepend=-1))
    for parts in np.split(order, edges[1:]) if len(order) else []:
        members = holders.ranks[int(holders.group[box[parts[0]]])]
        places = [topology.trainers[r] for r in members]
        mine = topology.place(ranks[int(target[parts[0]])])
        near = [m for m, p in enumerate(places) if p == mine][:1] or [m for m, p in enumerate(places) if p.node == node]
        if len(near) == 1:
            chosen[parts] = holders.first[box[parts]] + near[0]
            load[TrainerRank(members[near[0]])] += int(nbytes[parts].sum())
        elif near:
            open_choices.append((parts, near, members))
    for parts, near, members in open_choices:
        feeders = [TrainerRank(members[m]) for m in near]
        pick = spread(nbytes[parts], [load[r] for r in feeders])
        chosen[parts] = holders.first[box[parts]] + np.array(near, np.int64)[pick]
        for i, r in enumerate(feeders):
            load[r] += int(nbytes[parts][pick == i].sum())
    return chosen


def choose_remote(topology: Topology, node: NodeId, holders: Holders, box: Int64, nbytes: Int64) -> Int64:
    """Return for each box that a node fetches the piece that it is fetched from.

    Args:
        topology: The ranks and where they are.
        node: The node that fetches.
        holders: Who holds each box.
        box: The boxes, each once, shape (M,).
        nbytes: Bytes that are fetched of each, shape (M,).

    Returns:
        Rows of the table of source pieces, shape (M,).
    """
    nodes = ring(topology, node)
    node_load = dict.fromkeys(nodes, 0)
    rank_load = dict.fromkeys(range(len(topology.trainers)), 0)
    chosen: Int64 = np.zeros(len(box), np.int64)
    group = holders.group[box]
    groups = sorted(np.unique(group).tolist(), key=lambda g: (len(_homes(topology, holders.ranks[g])), g))
    for g in groups:  # those without a choice first: the others fill up around them
        members = holders.ranks[g]
        homes = sorted(_homes(topology, members), key=nodes.index)
        parts = np.flatnonzero(group == g)
        pick = spread(nbytes[parts], [node_load[n] for n in homes])
        for i, home in enumerate(homes):
            here = parts[pick == i]
            near = [m for m, r in enumerate(members) if topology.trainers[r].node == home]
            member = spread(nbytes[here], [rank_load[members[m]] for m in near])
            chosen[here] = holders.first[box[here]] + np.array(near, np.int64)[member]
            node_load[home] += int(nbytes[here].sum())
            for j, m in enumerate(near):
                rank_load[members[m]] += int(nbytes[here][member == j].sum())
    return chosen


def ring(topology: Topology, node: NodeId) -> list[NodeId]:
    """Return all nodes, beginning after ``node``: each node asks another one first, so none is asked by all at once."""
    nodes = list(topology.nodes)
    here = nodes.index(node)
    return nodes[here + 1 :] + nodes[: here + 1]


def _homes(topology: Topology, members: Sequence[int]) -> set[NodeId]:
    return {topology.trainers[r].node for r in members}


def spread(nbytes: Int64, load: Sequence[int]) -> Int64:
    """Return which of several feeders gives each item, so that their loads come out even within one item.

    Items stay in order and neighbours mostly stay together, which keeps their copies joinable.

    Args:
        nbytes: Bytes of each item, shape (K,).
        load: Bytes that each feeder already gives.

    Returns:
        Positions in ``load``, shape (K,).

    >>> spread(np.array([4, 4, 4, 4]), [0, 8, 0]).tolist()
    [0, 0, 2, 2]
    """
    if len(load) == 1:
        return np.zeros(len(nbytes), np.int64)
    total = int(nbytes.sum())
    shares = _fill(total, load)
    bounds = 2 * np.cumsum(shares)
    middles = 2 * np.cumsum(nbytes) - nbytes  # twice the middle of each item, to stay whole
    return np.minimum(np.searchsorted(bounds, middles, side="right"), len(load) - 1).astype(np.int64)


def _fill(total: int, load: Sequence[int]) -> list[int]:
    """Pour ``total`` onto the loads as water finds its level; the shares add up to ``total``."""
    order = sorted(range(len(load)), key=lambda i: (load[i], i))
    lowest = 1
    while lowest < len(order) and sum(load[order[lowest]] - load[i] for i in order[:lowest]) < total:
        lowest += 1
    taking = order[:lowest]
    level, rest = divmod(total + sum(load[i] for i in taking), lowest)
    shares = [0] * len(load)
    for place, i in enumerate(taking):
        shares[i] = level + (place < rest) - load[i]
    return shares
