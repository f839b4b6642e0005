"""A compacted journal says the same, in fewer words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.wire_samples import ERROR
from weightd.core.session.compaction import compacted
from weightd.core.session.records import (
    AnyRecord,
    Committed,
    Failed,
    Held,
    Prepared,
    Started,
    TermTaken,
    replay,
    replay_node,
    to_plain,
)
from weightd.core.units import Attempt, Boot, EngineId, Epoch, NodeId, Op, Term, Version, VersionKey


def key(version: int, number: int = 1) -> VersionKey:
    return VersionKey(Version(version), Attempt(Boot(7), number))


keys = st.builds(key, st.integers(1, 6), st.integers(1, 2))
anything = st.one_of(
    st.builds(TermTaken, st.integers(1, 4).map(Term), st.sampled_from([NodeId("a"), NodeId("b")])),
    st.builds(Started, keys, st.just(Op(1)), st.just(Epoch(1))),
    st.builds(Prepared, keys, st.just(Op(1)), st.just(Epoch(1))),
    st.builds(Failed, keys, st.just(ERROR)),
    st.builds(Held, keys),
    st.builds(Committed, keys, st.sampled_from([(), (EngineId("E0"),), (EngineId("E1"),)])),
)


@given(st.lists(anything, max_size=30))
def test_it_adds_up_to_the_same_for_leader_and_node(records: list[AnyRecord]) -> None:
    plain = [to_plain(r) for r in records]
    kept = compacted(plain)

    assert replay(kept) == replay(plain)
    assert replay_node(kept) == replay_node(plain)
    assert compacted(kept) == kept


def test_a_thousand_versions_become_a_handful_of_records() -> None:
    records: list[AnyRecord] = [TermTaken(Term(1), NodeId("a"))]
    for v in range(1, 1001):
        records += [
            Started(key(v), Op(v), Epoch(1)),
            Prepared(key(v), Op(v), Epoch(1)),
            Committed(key(v), (EngineId("E0"),)),
        ]
    kept = compacted([to_plain(r) for r in records])

    assert [r["type"] for r in kept] == ["term", "start", "prepared", "commit"]
    assert replay(kept).committed.key == key(1000)
