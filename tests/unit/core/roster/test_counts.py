import pytest

from tests.rosters import a_file, topology
from weightd.core.errors import InternalInvariantBroken
from weightd.core.roster.counts import (
    CoverageCounts,
    SlotPair,
    check_i1,
    check_i2,
    count_identity,
    coverage_counts,
    identities,
    pairs,
    placement,
)
from weightd.core.roster.topology import NodeShard, Topology
from weightd.core.units import EngineRank, TrainerRank


def mixed_topology() -> Topology:
    """Trainers on slots 0-4 (rank r on slot 4 - r), E0 on 1, 2, 5, E1 on 6; rank 0 reserved."""
    return topology(
        a_file(
            nodes={"n0": [0, 1, 2], "n1": [3, 4, 5, 6]},
            trainer_slots=[4, 3, 2, 1, 0],
            engines=[{"id": "E0", "slots": [1, 2, 5]}, {"id": "E1", "slots": [6]}],
            mode="mixed",
            allow_mixed_engine=True,
            reserved_trainer_ranks=[0, 1, 4],
        )
    )


def test_counts_of_a_mixed_topology() -> None:
    assert coverage_counts(mixed_topology()) == CoverageCounts(
        world=5,
        covered=2,
        reserved=3,
        uncovered=0,
        source_only=0,
        memberships=4,
        excess=0,
        without_trainer=2,
        on_no_node=0,
    )


def test_counts_of_a_disaggregated_topology() -> None:
    file = a_file(
        trainer_slots=[0, 1], engines=[{"id": "E0", "slots": [2, 4]}], mode="disaggregated", reserved_trainer_ranks=[1]
    )
    counts = coverage_counts(topology(file))

    assert (counts.world, counts.covered, counts.reserved, counts.source_only, counts.without_trainer) == (
        2,
        0,
        1,
        1,
        2,
    )


def test_placement_and_pairs_go_by_slot() -> None:
    shared = (SlotPair(EngineRank(0), TrainerRank(3)), SlotPair(EngineRank(1), TrainerRank(2)))

    assert placement(mixed_topology()) == {"E0": "mixed", "E1": "remote"}
    assert pairs(mixed_topology()) == {"E0": shared, "E1": ()}


def test_identities_of_several_sizes() -> None:
    """Node shards are [1, 2] and [5] of E0 and [6] of E1, in order of their heads."""
    assert identities(mixed_topology()) == (
        "1 engine x 3 + 1 engine x 1 = 4",
        "1 node shard x 2 + 2 node shards x 1 = 4",
    )


@pytest.mark.parametrize(
    "sizes, line",
    [
        ([16], "1 engine x 16 = 16"),
        ([4, 4], "2 engines x 4 = 8"),
        ([2, 4, 2], "2 engines x 2 + 1 engine x 4 = 8"),
        ([], "0 engines = 0"),
    ],
)
def test_counting_by_size(sizes: list[int], line: str) -> None:
    assert count_identity("engine", sizes) == line


SOUND = CoverageCounts(8, 5, 2, 1, 0, 9, 2, 1, 1)


def test_sound_counts_pass() -> None:
    check_i1(SOUND)


@pytest.mark.parametrize("name", CoverageCounts._fields)
def test_any_number_that_is_off_by_one_breaks_the_identity(name: str) -> None:
    with pytest.raises(InternalInvariantBroken, match="I1"):
        check_i1(SOUND._replace(**{name: getattr(SOUND, name) + 1}))


def test_node_shards_that_lose_a_rank_break_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = mixed_topology()

    def without_last(self: Topology, engine: str) -> tuple[NodeShard, ...]:
        return (NodeShard(*[getattr(shards[0], n) for n in ("engine", "node", "ranks", "places")]),)

    shards = sound.group(next(iter(sound.engines)))
    check_i2(sound)
    monkeypatch.setattr(Topology, "group", without_last)
    with pytest.raises(InternalInvariantBroken, match=r"E0 of 3 has node shards with ranks \[0, 1\]"):
        check_i2(sound)
