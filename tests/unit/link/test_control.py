"""A hook's end of the control socket, against a small daemon over real sockets."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.small_daemon import SmallDaemon
from weightd.core.errors import WeightdError
from weightd.core.session.deadlines import Deadlines
from weightd.core.session.faults import NoLeader
from weightd.core.units import NO_KEY, NO_TERM, EngineRank, RunName, Term, VersionKey
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import blob_digest
from weightd.core.wire.codec import encode
from weightd.link.control import ControlLink
from weightd.link.finding import DaemonPaths, daemon_paths, why_silent

pytestmark = [pytest.mark.net, pytest.mark.timeout(60)]

QUICK = Deadlines(heartbeat_s=0.1, heartbeat_timeout_s=0.5, restart_s=2.0)
BLOB = os.urandom(m.CHUNK_BYTES * 2 + 7)


@dataclass
class Face:
    """A hook that only remembers."""

    state: m.ReceiverReport = field(default_factory=lambda: m.ReceiverReport("unready"))
    welcomes: list[m.Welcome] = field(default_factory=list)
    goals: list[object] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    refusals: list[WeightdError] = field(default_factory=list)

    def hello(self) -> m.EngineHello:
        return m.EngineHello("E0", EngineRank(1), 2, os.getpid(), 1, "cpu", blob_digest(BLOB), len(BLOB))

    def report(self) -> m.ReceiverReport:
        return self.state

    def term_and_key(self) -> tuple[Term, VersionKey]:
        return NO_TERM, NO_KEY

    def blob(self, digest: str) -> bytes | None:
        return BLOB if digest == blob_digest(BLOB) else None

    def welcomed(self, welcome: m.Welcome) -> None:
        self.welcomes.append(welcome)

    def goal_arrived(self, goal: m.PublisherGoal | m.ReceiverGoal) -> None:
        self.goals.append(goal)

    def blob_arrived(self, digest: str, blob: bytes) -> None:
        self.blobs[digest] = blob

    def refused(self, error: WeightdError) -> None:
        self.refusals.append(error)


WHO = "E0[1]"


@pytest.fixture
def paths(tmp_path: Path) -> DaemonPaths:
    return daemon_paths(tmp_path)


@pytest.fixture
def face() -> Face:
    return Face()


@pytest.fixture
def link(paths: DaemonPaths, face: Face) -> Iterator[ControlLink]:
    link = ControlLink(paths, RunName("r"), WHO, face, QUICK)
    link.start()
    yield link
    link.close("the test ends")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with SmallDaemon(tmp_path) as daemon:
        yield daemon


def test_greets_and_is_welcomed(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")

    assert daemon.hooks[WHO].hello == face.hello()
    assert daemon.hooks[WHO].boot == link.boot
    assert link.silent_s() == 0.0


def test_layout_is_sent_in_chunks_when_asked_for(daemon: SmallDaemon, link: ControlLink) -> None:
    assert daemon.wait(lambda: (s := daemon.hooks.get(WHO)) and s.layout, "layout") == BLOB


def test_state_is_repeated_without_being_asked(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: WHO in daemon.hooks and len(daemon.hooks[WHO].reports) >= 3, "three reports")

    assert set(daemon.hooks[WHO].reports) == {face.state}


def test_change_is_reported_at_once(daemon: SmallDaemon, tmp_path: Path, face: Face) -> None:
    slow = Deadlines(heartbeat_s=30.0, heartbeat_timeout_s=60.0)
    link = ControlLink(daemon_paths(tmp_path), RunName("r"), WHO, face, slow)
    link.start()
    daemon.wait(lambda: WHO in daemon.hooks and daemon.hooks[WHO].report, "first report")
    face.state = m.ReceiverReport("torn")
    link.changed()
    daemon.wait(lambda: daemon.receiver(WHO).state == "torn", "the change", limit_s=5.0)
    link.close("")


def test_goals_arrive_and_old_ones_do_not(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    daemon.say(WHO, m.ReceiverGoal(stage="idle"), seq=1000)
    daemon.say(WHO, m.ReceiverGoal(stage="older"), seq=999)
    daemon.say(WHO, m.ReceiverGoal(stage="another run's"), "other", seq=1001)
    daemon.say(WHO, m.ReceiverGoal(stage="prepared"), seq=1002)
    daemon.wait(lambda: len(face.goals) == 2, "two goals")

    assert [g.stage for g in face.goals if isinstance(g, m.ReceiverGoal)] == ["idle", "prepared"]
    assert link.dropped == 2


def test_wanted_blob_is_asked_for_until_it_is_whole(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    plan = os.urandom(m.CHUNK_BYTES + 5)
    link.want(blob_digest(plan), len(plan))
    time.sleep(0.3)  # asked for in vain so far
    daemon.blobs[blob_digest(plan)] = plan
    daemon.wait(lambda: face.blobs, "blob")

    assert face.blobs == {blob_digest(plan): plan}


def test_refusal_is_the_callers_error_and_final(daemon: SmallDaemon, face: Face, paths: DaemonPaths) -> None:
    daemon.refuse = NoLeader("r", "node", "", 3.0, 2.0, "attach_s").to_wire()
    link = ControlLink(paths, RunName("r"), WHO, face, QUICK)
    link.start()
    daemon.wait(lambda: face.refusals, "refusal")
    time.sleep(0.3)
    link.close("")

    assert [type(e) for e in face.refusals] == [NoLeader]
    assert link.greetings == 1


def test_malformed_messages_are_dropped_and_harm_nothing(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    for frame in (b"", b"\xc1", os.urandom(100)):
        daemon.say_bytes(WHO, frame)
    daemon.say(WHO, m.ReceiverGoal(stage="after"))
    daemon.wait(lambda: face.goals, "goal")

    assert link.dropped == 3
    assert face.refusals == []


def test_another_protocol_is_refused(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    goal = m.Envelope(m.PROTOCOL + 1, RunName("r"), NO_TERM, daemon.boot, 10**6, bytes(16), "node", m.ReceiverGoal())
    daemon.say_bytes(WHO, encode(goal))
    daemon.wait(lambda: face.refusals, "refusal")

    assert face.refusals[0].code == "E_PROTOCOL_VERSION"


def test_oversize_frame_costs_the_connection_not_the_hook(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    daemon.say_bytes(WHO, bytes(m.MAX_FRAME_BYTES + 1))
    daemon.wait(lambda: daemon.hooks[WHO].hellos >= 2, "greets again", limit_s=15.0)

    assert link.dropped == 0, "it was never read"


def test_daemon_that_comes_back_finds_the_hook(tmp_path: Path, link: ControlLink, face: Face) -> None:
    with SmallDaemon(tmp_path) as first:
        first.wait(lambda: face.welcomes, "welcome")
    link.daemon_ended()
    time.sleep(0.7)

    assert link.silent_s() > 0.5

    with SmallDaemon(tmp_path) as second:
        second.wait(lambda: len(face.welcomes) == 2, "second welcome", limit_s=15.0)
        second.wait(lambda: second.hooks[WHO].report, "report")

    assert face.welcomes[0].session != face.welcomes[1].session


def test_silent_daemon_is_greeted_again(tmp_path: Path, link: ControlLink, face: Face) -> None:
    """The hook asks whether it is still known; nobody told it that it was forgotten."""
    with SmallDaemon(tmp_path) as daemon:
        daemon.wait(lambda: face.welcomes, "welcome")
        daemon.hooks.clear()
        daemon.wait(lambda: WHO in daemon.hooks, "greets again", limit_s=5.0)


def test_close_says_goodbye_with_the_last_state(daemon: SmallDaemon, link: ControlLink, face: Face) -> None:
    daemon.wait(lambda: face.welcomes, "welcome")
    face.state = m.ReceiverReport("serving", closing=True)
    link.close("done")
    link.close("twice")
    daemon.wait(lambda: daemon.hooks[WHO].bye is not None, "goodbye")

    assert daemon.hooks[WHO].bye == "done"
    assert daemon.receiver(WHO).closing


def test_close_without_a_daemon_is_bounded(paths: DaemonPaths, face: Face) -> None:
    link = ControlLink(paths, RunName("r"), WHO, face, QUICK)
    link.start()
    begun = time.monotonic()
    link.close("nobody there")

    assert time.monotonic() - begun < 3.0
    assert link.silent_s() > 0.0


def test_socket_is_found_by_path_directory_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = DaemonPaths(str(tmp_path / "control.sock"), str(tmp_path / "fd.sock"))

    assert daemon_paths(tmp_path) == expected
    assert daemon_paths(tmp_path / "control.sock") == expected
    assert daemon_paths(tmp_path / "later").control == str(tmp_path / "later" / "control.sock")
    monkeypatch.setenv("WEIGHTD_SOCKET", str(tmp_path))
    assert daemon_paths() == expected
    monkeypatch.delenv("WEIGHTD_SOCKET")
    assert daemon_paths().control == "/run/weightd/control.sock"


def test_reason_of_silence_is_looked_for(tmp_path: Path, daemon: SmallDaemon) -> None:
    import socket

    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))

    assert why_silent(str(tmp_path / "none.sock"), 0) == "there is no such socket"
    assert why_silent(str(tmp_path / "no" / "c.sock"), 0) == f"there is no directory {tmp_path / 'no'}"
    assert why_silent(str(stale / "c.sock"), 0) == f"there is no directory {stale}"
    assert why_silent(str(stale), 0) == "connecting to it fails: Connection refused"
    daemon.wait(lambda: (tmp_path / "control.sock").exists(), "socket")
    assert "answered none of 3 greetings" in why_silent(str(tmp_path / "control.sock"), 3)
