"""A run that pauses in the moment of a commit: a trainer rank must not hear of the pause first."""

from tests.fakes.leader_bench import E0
from tests.fakes.node_bench import NodeBench
from weightd.core.session import events as ev
from weightd.core.session.faults import RunPaused
from weightd.core.units import NO_KEY, Attempt, Boot, Version, VersionKey
from weightd.core.wire.messages import CommitNote


def test_a_pause_is_told_after_the_commit_that_came_with_it() -> None:
    """``wait()`` would raise the pause for a version that is committed, while the node's journal is being synced."""
    bench = NodeBench().ready()
    key = VersionKey(Version(1), Attempt(Boot(7), 1))
    bench.publish(key)
    pause = RunPaused("bench", "trainer 0 is lost", ("trainer 0",), 1).to_wire()
    bench.answers_journal = False
    effects = bench.goal("paused", NO_KEY, 5, committed=CommitNote(key, (E0,)), paused=pause)
    early = bench.told_publisher()

    bench.handle(ev.NodeJournaled([e.token for e in effects if isinstance(e, ev.JournalNode)][-1]))

    assert (NO_KEY, None) == (early.committed, early.paused)
    assert (key, pause) == (bench.told_publisher().committed, bench.told_publisher().paused)
