"""Conservation on random rosters, sound ones and broken ones."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.rosters import live, sizes_only, table_verdict
from weightd.core.roster.counts import coverage_counts, coverage_of, groups, identities, pairs, placement
from weightd.core.roster.declared import roster_from_mapping
from weightd.core.roster.judge import judge
from weightd.core.roster.seating import declared_seating


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any roster on up to 12 slots: engines may overlap, leave the world or leave ranks out."""
    slots = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cut = sorted(draw(st.lists(st.integers(0, len(slots)), max_size=3)))
    bounds = [0, *cut, len(slots)]
    nodes = {f"n{i}": list(slots[a:b]) for i, (a, b) in enumerate(pairwise(bounds))}
    world = draw(st.integers(1, len(slots)))
    seat = st.integers(0, len(slots) + 1)
    engines = draw(st.lists(st.lists(seat, min_size=1, max_size=6), max_size=4))
    return {
        "nodes": nodes,
        "trainer_slots": draw(st.permutations(slots))[:world],
        "engines": [{"id": f"E{i}", "slots": listed} for i, listed in enumerate(engines)],
        "reserved_trainer_ranks": draw(st.lists(st.integers(0, world - 1), max_size=4)),
        "mode": draw(st.sampled_from(["colocated", "disaggregated", "mixed"])),
        "allow_mixed_engine": draw(st.booleans()),
    }


@st.composite
def sound_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a roster without fault: engines cut a permutation of the slots, the rest of the ranks is reserved."""
    table = draw(tables())
    slots = draw(st.permutations([s for listed in table["nodes"].values() for s in listed]))
    used = draw(st.integers(0, len(slots)))
    cut = sorted(draw(st.sets(st.integers(1, max(used - 1, 1)), max_size=3)))
    bounds = sorted({0, *(c for c in cut if c < used), used})
    engines = [slots[a:b] for a, b in pairwise(bounds)]
    taken = set(slots[:used])
    left = [r for r, s in enumerate(table["trainer_slots"]) if s not in taken]
    listed = [{"id": f"E{i}", "slots": list(e)} for i, e in enumerate(engines)]
    return {**table, "engines": listed, "reserved_trainer_ranks": left, "mode": "mixed", "allow_mixed_engine": True}


@given(tables())
def test_counts_of_any_roster_add_up_and_agree_with_counting_by_hand(table: dict[str, Any]) -> None:
    roster = roster_from_mapping(table).roster
    seating = declared_seating(roster)
    assert seating is not None
    counts = coverage_of(seating, roster.reserved, roster.mode)
    in_engines = [slot for engine in table["engines"] for slot in engine["slots"]]
    by_hand = [slot for slot in table["trainer_slots"] if slot in in_engines]

    assert counts.covered == len(by_hand)
    assert counts.covered + counts.reserved + counts.uncovered + counts.source_only == len(table["trainer_slots"])
    assert counts.covered + counts.excess + counts.without_trainer + counts.on_no_node == len(in_engines)


@given(tables())
def test_uncovered_says_what_is_left(table: dict[str, Any]) -> None:
    covered = {slot for engine in table["engines"] for slot in engine["slots"]}
    reserved = set(table["reserved_trainer_ranks"])
    left = [r for r, s in enumerate(table["trainer_slots"]) if s not in covered and r not in reserved]
    told = [e.fields() for e in table_verdict(table) if e.code == "E_UNCOVERED"]

    assert [list(e["ranks"]) for e in told] == ([left] if left and table["mode"] != "disaggregated" else [])
    for e in told:
        assert e["covered"] + e["reserved"] + e["uncovered"] == e["world"]
        assert sorted(r for ranks in e["by_node"].values() for r in ranks) == left


@given(sound_tables())
def test_node_shards_of_a_sound_roster_add_up(table: dict[str, Any]) -> None:
    file = roster_from_mapping(table)
    topology = judge(file.roster, file.registrations())
    sizes = {engine["id"]: len(engine["slots"]) for engine in table["engines"]}
    total = sum(sizes.values())

    for engine, shards in groups(topology).items():
        assert sum(len(shard.ranks) for shard in shards) == sizes[engine]
        assert len({shard.node for shard in shards}) == len(shards)
        assert [shard.ranks[0] for shard in shards] == sorted(shard.ranks[0] for shard in shards)
        for shard in shards:
            assert all(table["engines"][int(engine[1:])]["slots"][k] in table["nodes"][shard.node] for k in shard.ranks)
    assert [line.rpartition(" = ")[2] for line in identities(topology)] == [str(total)] * 2
    counts = coverage_counts(topology)
    assert counts.uncovered == 0
    assert counts.memberships == total


@given(sound_tables())
def test_sizes_and_live_ranks_give_the_declared_topology(table: dict[str, Any]) -> None:
    file = roster_from_mapping(table)
    declared = judge(file.roster, file.registrations())
    measured = judge(sizes_only(file.roster), live(file))

    assert measured == declared
    assert pairs(measured) == pairs(declared)
    assert placement(measured) == placement(declared)
