"""Seconds and memory of a plan at the size of a 1T mixture-of-experts model, by numpy alone.

60 layers x 384 experts x 3 matrices of 7168 x 2048 in bfloat16: 69,120 tensors, 1.01e12 elements.  The trainer
holds 32 row shards of each expert, experts over 16 groups: 512 ranks, 2.2 million pieces.  An engine of 128 ranks
takes experts over 16 groups and 8 tensor-parallel parts: gate and up fused along rows, down cut along columns.

    python -m bench.plan_70k                 one rollout rank, alone on its node
    python -m bench.plan_70k --ranks 8       a node of eight
    python -m bench.plan_70k --ranks 128     the leader: the whole engine, proof and the plans of all nodes
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from weightd.core.layout.columns import BufferInfo, Int64, Layout, TensorInfo
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import CoverageProof, prove_coverage
from weightd.core.roster.topology import Place, Topology
from weightd.core.units import EngineId, EngineRank, NodeId, RolloutRank, SlotName

WIDE, NARROW = 7168, 2048
EXPERT_GROUPS, ROW_SHARDS, TENSOR_PARTS = 16, 32, 8
BYTES = 2

T = TypeVar("T")


def experts_of(group: int, layers: int, experts: int) -> list[tuple[int, int]]:
    per = experts // EXPERT_GROUPS
    return [(layer, e) for layer in range(layers) for e in range(group * per, (group + 1) * per)]


def table_of(group: int, layers: int, experts: int) -> tuple[TensorInfo, ...]:
    """Gate, up and down of each expert of a group; ranks of a group share the table, as interned messages do."""
    table = []
    for layer, e in experts_of(group, layers, experts):
        name = f"model.layers.{layer}.mlp.experts.{e}"
        table.append(TensorInfo(f"{name}.gate_proj.weight", (NARROW, WIDE), "bfloat16"))
        table.append(TensorInfo(f"{name}.up_proj.weight", (NARROW, WIDE), "bfloat16"))
        table.append(TensorInfo(f"{name}.down_proj.weight", (WIDE, NARROW), "bfloat16"))
    return tuple(table)


def each(n: int, first: int, second: int) -> Int64:
    """The same two numbers in n rows."""
    return np.tile(np.array([first, second], np.int64), (n, 1))


def in_turn(kinds: list[Int64]) -> Int64:
    """Rows of three kinds of pieces in turn: gate, up, down."""
    return np.stack(kinds, axis=1).reshape(-1, 2)


def trainer_layout(table: tuple[TensorInfo, ...], shard: int) -> Layout:
    n = len(table) // 3
    rows = np.array([NARROW, NARROW, WIDE]) // ROW_SHARDS
    cols = np.array([WIDE, WIDE, NARROW])
    kinds = range(3)
    extent = in_turn([each(n, rows[k], cols[k]) for k in kinds])
    numel = np.tile(rows * cols, n)
    offset = np.cumsum(numel) - numel
    return Layout(
        tensors=table,
        buffers=(BufferInfo("slot", int(numel.sum()) * BYTES, "bfloat16", "slot"),),
        tensor=np.arange(3 * n),
        buffer=np.zeros(3 * n, np.int64),
        offset=offset,
        start=in_turn([each(n, shard * rows[k], 0) for k in kinds]),
        extent=extent,
        step=np.ones_like(extent),
        stride=in_turn([each(n, cols[k], 1) for k in kinds]),
    )


def rollout_layout(table: tuple[TensorInfo, ...], layers: int, part: int) -> Layout:
    """Per layer w13 [E, 2 f/tp, d] and w2 [E, d, f/tp], as vLLM stores them."""
    n = len(table) // 3
    per = n // layers
    f = NARROW // TENSOR_PARTS
    extent = in_turn([each(n, f, WIDE), each(n, f, WIDE), each(n, WIDE, f)])
    layer, e = np.arange(n) // per, np.arange(n) % per
    one = f * WIDE
    buffers = []
    for name in range(layers):
        buffers.append(BufferInfo(f"layers.{name}.w13", 2 * per * one * BYTES, "bfloat16", "param"))
        buffers.append(BufferInfo(f"layers.{name}.w2", per * one * BYTES, "bfloat16", "param"))
    return Layout(
        tensors=table,
        buffers=tuple(buffers),
        tensor=np.arange(3 * n),
        buffer=np.stack([2 * layer, 2 * layer, 2 * layer + 1], axis=1).reshape(-1),
        offset=np.stack([2 * e * one, (2 * e + 1) * one, e * one], axis=1).reshape(-1),
        start=in_turn([each(n, part * f, 0), each(n, part * f, 0), each(n, 0, part * f)]),
        extent=extent,
        step=np.ones_like(extent),
        stride=in_turn([each(n, WIDE, 1), each(n, WIDE, 1), each(n, f, 1)]),
    )


def topology(ranks: int, per_node: int) -> Topology:
    trainers = tuple(Place(NodeId(f"t{r // 8:02}"), SlotName(f"g{r % 8}")) for r in range(EXPERT_GROUPS * ROW_SHARDS))
    places = tuple(Place(NodeId(f"r{k // per_node:02}"), SlotName(f"g{k % per_node}")) for k in range(ranks))
    return Topology(trainers, {EngineId("E0"): places}, frozenset(), "disaggregated")


def timed(what: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    value = what()
    return value, time.perf_counter() - begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ranks", type=int, default=1, help="rollout ranks to prove and plan: 1, 8 or 128")
    ap.add_argument("--layers", type=int, default=60)
    ap.add_argument("--experts", type=int, default=384)
    ap.add_argument("--bucket-mib", type=int, default=64)
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    tables = [table_of(g, a.layers, a.experts) for g in range(EXPERT_GROUPS)]
    trainers = [trainer_layout(tables[r // ROW_SHARDS], r % ROW_SHARDS) for r in range(EXPERT_GROUPS * ROW_SHARDS)]
    whole = a.ranks == EXPERT_GROUPS * TENSOR_PARTS
    topo = topology(a.ranks, min(a.ranks, 8))
    ranks = [RolloutRank(EngineId("E0"), EngineRank(k)) for k in range(a.ranks)]
    rollouts = {r: rollout_layout(tables[r.k // TENSOR_PARTS], a.layers, r.k % TENSOR_PARTS) for r in ranks}
    before, cpu = peak_mib(), time.process_time()

    def prove() -> CoverageProof:
        return prove_coverage(topo, trainers, rollouts, only=None if whole else ranks)

    proof, prove_s = timed(prove)
    nodes = sorted({topo.place(r).node for r in ranks})
    plans, plan_s = timed(lambda: [plan_node(proof, n, a.bucket_mib << 20) for n in nodes])
    after = peak_mib()
    result = {
        "tensors": 3 * a.layers * a.experts,
        "trainer_ranks": len(trainers),
        "source_pieces": sum(t.pieces for t in trainers),
        "rollout_ranks": a.ranks,
        "target_pieces": sum(t.pieces for t in rollouts.values()),
        "copies": sum(len(p.copies) for plan in plans for p in plan.ranks.values()),
        "fetch_rows": sum(len(p.fetch.gather) for p in plans),
        "buckets": sum(len(p.fetch.buckets) for p in plans),
        "nbytes": sum(p.nbytes for plan in plans for p in plan.ranks.values()),
        "prove_s": round(prove_s, 3),
        "plan_s": round(plan_s, 3),
        "total_s": round(prove_s + plan_s, 3),
        "cpu_s": round(time.process_time() - cpu, 3),  # what the same takes on a machine that does nothing else
        "layouts_mib": round(before),
        "peak_mib": round(after),
    }
    if a.json:
        json.dump(result, sys.stdout)
        print()
        return
    for key, value in result.items():
        print(f"{key:>15}  {value:>16,}")


if __name__ == "__main__":
    main()
