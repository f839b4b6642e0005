"""What a sender reads for a bucket, against a loop over single elements."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.core.errors import InternalInvariantBroken
from weightd.core.plan.node_plan import Bucket, Copies, FetchPlan, TrainerSource
from weightd.core.units import Attempt, Boot, NodeId, TrainerRank, Version, VersionKey
from weightd.core.wire.faults import StaleSource
from weightd.daemon.bulk.gather import Gather, Lease
from weightd.link.memory import Pool

NODE = NodeId("node-a")
SOURCES = (TrainerSource(TrainerRank(0), 0), TrainerSource(TrainerRank(1), 2))
POOL_NBYTES = 4096
KEY = VersionKey(Version(1), Attempt(Boot(1), 1))

Row = tuple[int, int, tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int], int]
"""Source, its offset and strides, offset and strides in the landing, extent, itemsize."""


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[TrainerSource, Pool]]:
    pools = {source: Pool.create(str(source), POOL_NBYTES) for source in SOURCES}
    for seed, pool in enumerate(pools.values()):
        pool.payload[:] = np.random.default_rng(seed).integers(1, 256, POOL_NBYTES, dtype=np.uint8)
    yield pools
    for pool in pools.values():
        pool.close()


def plan(rows: list[Row], buckets: tuple[Bucket, ...]) -> FetchPlan:
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    zeros = np.zeros(len(rows), dtype=np.int64)
    gather = Copies(columns[0], columns[1], columns[2], zeros, columns[3], columns[4], columns[5], columns[6])
    return FetchPlan(SOURCES, buckets, gather, 100_000)


def one_bucket(rows: list[Row], offset: int, nbytes: int) -> FetchPlan:
    return plan(rows, (Bucket(0, NODE, offset, nbytes, 0, len(rows)),))


def by_elements(
    fetch: FetchPlan, pools: dict[TrainerSource, Pool], bucket: Bucket
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bucket, one element at a time."""
    out = np.zeros(bucket.nbytes, dtype=np.uint8)
    copies = fetch.gather
    for r in range(bucket.first_row, bucket.last_row):
        payload = pools[fetch.sources[copies.source[r]]].payload
        size = int(copies.itemsize[r])
        for place in itertools.product(*(range(n) for n in copies.extent[r])):
            start = int(copies.source_offset[r] + np.dot(place, copies.source_stride[r]))
            onto = int(copies.target_offset[r] + np.dot(place, copies.target_stride[r])) - bucket.landing_offset
            out[onto : onto + size] = payload[start : start + size]
    return out


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Row], int, int]:
    """Boxes of random arrays, packed one after the other, as a planner packs them; some with gaps."""
    rows: list[Row] = []
    start = at = draw(st.integers(0, 50))
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
        whole = [draw(st.integers(1, 5)) for _ in range(3)]
        extent = [draw(st.integers(1, n)) for n in whole]
        strides = (whole[1] * whole[2] * size, whole[2] * size, size)
        dense = (extent[1] * extent[2] * size, extent[2] * size, size)
        offset = draw(st.integers(0, POOL_NBYTES - whole[0] * strides[0]))
        at += draw(st.sampled_from([0, 0, 0, 4]))
        rows.append((draw(st.integers(0, 1)), offset, strides, at, dense, (extent[0], extent[1], extent[2]), size))
        at += extent[0] * dense[0]
    return rows, start, at - start


@given(cuts())
def test_any_cut_is_gathered_as_by_single_elements(
    pools: dict[TrainerSource, Pool], cut: tuple[list[Row], int, int]
) -> None:
    rows, offset, nbytes = cut
    fetch = one_bucket(rows, offset, nbytes)
    gather = Gather(fetch, NODE, pools)
    staging = np.full(gather.staging_nbytes, 255, dtype=np.uint8)  # what an earlier bucket left there

    found, _ = gather.read(0, staging)

    assert by_elements(fetch, pools, fetch.buckets[0]).tobytes() == found.tobytes()


def run(source: int, offset: int, onto: int, nbytes: int) -> Row:
    return (source, offset, (0, 0, 1), onto, (0, 0, 1), (1, 1, nbytes), 1)


@pytest.mark.parametrize(
    "rows, in_place",
    [
        ([run(0, 8, 0, 100)], True),
        ([run(0, 8, 0, 60), run(0, 68, 60, 40)], True),
        ([(0, 8, (40, 20, 2), 0, (40, 20, 2), (2, 2, 10), 2), run(0, 88, 80, 20)], True),
        ([(0, 8, (0, 0, 2), 0, (0, 0, 2), (1, 1, 50), 2)], True),
        ([(0, 8, (7, 5, 100), 0, (0, 0, 0), (1, 1, 1), 100)], True),  # one element of odd size
        ([run(0, 8, 0, 60), run(0, 70, 60, 40)], False),  # a gap at the source
        ([run(0, 68, 60, 40), run(0, 8, 0, 60)], False),  # in another order: not looked for
        ([run(0, 8, 0, 60), run(1, 68, 60, 40)], False),  # two pools
        ([(0, 8, (0, 20, 2), 0, (0, 10, 2), (1, 10, 5), 2)], False),  # a column cut
        ([run(0, 8, 0, 60)], False),  # 40 bytes of the bucket are nobody's
    ],
)
def test_what_lies_in_one_run_is_sent_from_where_it_lies(
    pools: dict[TrainerSource, Pool], rows: list[Row], in_place: bool
) -> None:
    fetch = one_bucket(rows, 0, 100)
    gather = Gather(fetch, NODE, pools)

    found, copied = gather.read(0, np.zeros(100, dtype=np.uint8))

    assert in_place is not copied
    assert in_place == np.shares_memory(found, pools[SOURCES[0]].payload)
    assert (0 if in_place else 100) == gather.staging_nbytes
    assert by_elements(fetch, pools, fetch.buckets[0]).tobytes() == found.tobytes()


def test_buckets_of_other_nodes_need_no_pool(pools: dict[TrainerSource, Pool]) -> None:
    mine = Bucket(0, NODE, 0, 4, 0, 1)
    other = Bucket(1, NodeId("node-b"), 4, 4, 1, 2)
    gather = Gather(plan([run(0, 0, 0, 4), run(1, 0, 4, 4)], (mine, other)), NODE, {SOURCES[0]: pools[SOURCES[0]]})

    assert {0: mine} == gather.buckets
    assert (SOURCES[0],) == gather.sources(0)


@pytest.mark.parametrize(
    "row, rule",
    [
        (run(0, POOL_NBYTES - 3, 0, 4), "its pool"),
        (run(0, -1, 0, 4), "its pool"),
        ((0, 0, (0, 2048, 1), 0, (0, 1, 1), (1, 3, 1), 1), "its pool"),
        (run(0, 0, 97, 4), "its bucket"),
        (run(0, 0, -1, 4), "its bucket"),
        ((0, 0, (0, 1, 1), 0, (0, 50, 1), (1, 3, 1), 1), "its bucket"),
    ],
)
def test_a_copy_that_leaves_its_place_is_an_error_of_ours(
    pools: dict[TrainerSource, Pool], row: Row, rule: str
) -> None:
    with pytest.raises(InternalInvariantBroken, match=rule):
        Gather(one_bucket([row], 0, 100), NODE, pools)


def test_a_lease_notices_any_change_of_what_it_reads() -> None:
    with Pool.create("trainer 0", 100) as read, Pool.create("trainer 1", 100) as unread:
        pools = {SOURCES[0]: read, SOURCES[1]: unread}
        lease = Lease(Gather(one_bucket([run(0, 0, 0, 100)], 0, 100), NODE, pools), KEY, dict.fromkeys(SOURCES, 0))
        lease.check(0)
        unread.bump()
        lease.check(0)
        for found in (1, 2):
            read.bump()
            with pytest.raises(StaleSource) as stale:
                lease.check(0)
            assert (0, found, "v1/0001.1") == (stale.value.expected, stale.value.found, stale.value.version)


def test_a_lease_of_a_source_that_was_being_written_is_never_good() -> None:
    with Pool.create("trainer 0", 100) as pool:
        pool.bump()
        lease = Lease(Gather(one_bucket([run(0, 0, 0, 9)], 0, 9), NODE, {SOURCES[0]: pool}), KEY, {SOURCES[0]: 1})

        with pytest.raises(StaleSource, match="being written"):
            lease.check(0)
