"""Router and peer links on real sockets: who is heard, who is refused, what never waits."""

import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import zmq

from weightd.core.errors import ConfigError
from weightd.core.units import Boot, NodeId, RunName, Term
from weightd.core.wire.codec import decode, encode
from weightd.core.wire.faults import ProtocolError
from weightd.core.wire.messages import MAX_FRAME_BYTES, Bye, Envelope
from weightd.daemon.control.curve import CurveKeys
from weightd.daemon.control.limits import ControlLimits, Sent
from weightd.daemon.control.peers import PeerAddress, PeerLinks
from weightd.daemon.control.router import HookRouter
from weightd.daemon.control.zap import ZapGate
from weightd.daemon.control.zsock import ZSocket

pytestmark = [pytest.mark.net, pytest.mark.anyio]

Context = zmq.Context[zmq.Socket[bytes]]
QUICK = ControlLimits(linger_s=0.2, heartbeat_s=0.2, heartbeat_timeout_s=0.6)
A, B, C = NodeId("node-a"), NodeId("node-b"), NodeId("node-c")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


def note(sender: str, seq: int = 0, why: str = "") -> Envelope:
    return Envelope(1, RunName("grpo-7"), Term(1), Boot(5), seq, bytes(16), sender, Bye(why))


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[Context, ZapGate]]:
    """A context with its gate served; at the end its sockets are closed with it."""
    context: Context = zmq.Context()
    with ZapGate(context) as gate:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gate.serve)
                with anyio.fail_after(10):
                    yield context, gate
                tasks.cancel_scope.cancel()
        finally:
            context.destroy(linger=0)


def hook(context: Context, path: Path) -> ZSocket:
    raw = context.socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(f"ipc://{path}")
    return ZSocket(raw)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    with anyio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 - the condition changes outside of this event loop
            await anyio.sleep(0.005)
    return condition()


# ------------------------------------------------------------ hooks


async def test_a_hook_is_heard_with_its_process_and_answered(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with gated() as (context, gate):
        async with HookRouter(context, path, gate, limits=QUICK) as router:
            dealer = hook(context, path)
            await dealer.send([encode(note("trainer 3"))])

            heard = await anext(router)
            outcome = router.send(heard.routing_id, note("node-a", 1))
            answer = await dealer.receive()

        assert note("trainer 3") == heard.envelope
        assert (os.getuid(), os.getpid()) == heard.process
        assert Sent.SENT is outcome
        assert note("node-a", 1) == decode(answer[0].bytes)


async def test_the_socket_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    before = os.umask(0)
    os.umask(before)
    async with gated() as (context, gate), HookRouter(context, path, gate, limits=QUICK):
        mode = stat.S_IMODE(path.stat().st_mode)

    assert 0o600 == mode
    os.umask(after := os.umask(0))
    assert before == after


async def test_another_user_is_refused_at_the_handshake(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    others = frozenset({12345})
    async with (
        gated() as (context, gate),
        HookRouter(context, path, gate, allowed_uids=others, limits=QUICK) as router,
    ):
        dealer = hook(context, path)
        await dealer.send([encode(note("trainer 3"))])

        assert await until(lambda: gate.refused["uid"] > 0)
        with anyio.move_on_after(0.2) as scope:
            await anext(router)
        assert scope.cancelled_caught


async def test_what_is_no_message_is_counted_and_the_next_one_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    faults: list[ProtocolError] = []
    async with gated() as (context, gate):
        async with HookRouter(context, path, gate, limits=QUICK, on_fault=lambda _, e: faults.append(e)) as router:
            dealer = hook(context, path)
            await dealer.send([b"\xc1"])
            await dealer.send([encode(note("x")), b"a second frame"])
            await dealer.send([encode(note("x")).replace(b"\xa8protocol\x01", b"\xa8protocol\x02")])
            await dealer.send([encode(note("trainer 3"))])

            heard = await anext(router)

        assert "trainer 3" == heard.envelope.sender
        assert ["E_PROTOCOL", "E_PROTOCOL", "E_PROTOCOL_VERSION"] == [fault.code for fault in faults]
        assert {"E_PROTOCOL": 2, "E_PROTOCOL_VERSION": 1} == dict(router.refused)
        assert f"pid {os.getpid()} (uid {os.getuid()})" in str(faults[0])


async def test_an_oversize_frame_ends_the_connection_and_reaches_nobody(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with gated() as (context, gate), HookRouter(context, path, gate, limits=QUICK) as router:
        dealer = hook(context, path)
        await dealer.send([bytes(MAX_FRAME_BYTES + 1)])
        await anyio.sleep(0.3)
        await dealer.send([encode(note("trainer 3"))])  # on a connection made anew

        assert "trainer 3" == (await anext(router)).envelope.sender
        assert {} == dict(router.refused)  # it never came this far


async def test_a_flood_is_cut_to_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    limits = ControlLimits(rate=1.0, burst=10.0, linger_s=0.2)
    async with gated() as (context, gate):
        async with HookRouter(context, path, gate, limits=limits) as router:
            dealer = hook(context, path)
            for seq in range(30):
                await dealer.send([encode(note("trainer 3", seq))])
            heard = [(await anext(router)).envelope.seq for _ in range(10)]
            with anyio.move_on_after(0.2):
                await anext(router)

        assert list(range(10)) == heard
        assert 20 == router.refused["rate"]


async def test_sending_to_a_full_or_absent_hook_never_waits(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    limits = ControlLimits(queued=4, linger_s=0.0)
    async with gated() as (context, gate), HookRouter(context, path, gate, limits=limits) as router:
        dealer = hook(context, path)
        dealer.raw.rcvhwm = 4
        await dealer.send([encode(note("trainer 3"))])
        routing_id = (await anext(router)).routing_id
        outcomes = [router.send(routing_id, note("node-a", why="x" * 100_000)) for _ in range(2000)]
        assert Sent.SENT is outcomes[0]
        assert Sent.FULL is outcomes[-1]

        dealer.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, router)  # a ROUTER learns of an end where it receives
            assert await until(lambda: router.send(routing_id, note("node-a")) is Sent.GONE)
            tasks.cancel_scope.cancel()

        assert router.unsent["full"] > 0
        assert router.unsent["gone"] > 0


async def test_a_second_daemon_does_not_take_the_socket_away(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with gated() as (context, gate), HookRouter(context, path, gate, limits=QUICK):
        with pytest.raises(ConfigError, match="another daemon"):
            await HookRouter(context, path, gate, limits=QUICK).__aenter__()
        assert path.exists()


# ------------------------------------------------------------ peers


def new_keys() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def two_nodes(
    keys: dict[NodeId, CurveKeys] | None, proves: dict[NodeId, CurveKeys] | None = None
) -> AsyncIterator[tuple[PeerLinks, PeerLinks, ZapGate]]:
    """Two daemons' links in one process, each with its own context; node B knows of a node C, which is down.

    Args:
        keys: As configured.
        proves: Keys that are really used, where they are others.
    """
    ports = {A: free_port(), B: free_port(), C: free_port()}
    used = proves or keys

    def address(node: NodeId) -> PeerAddress:
        return PeerAddress("127.0.0.1", ports[node], keys[node].public if keys else None)

    async with gated() as (context_a, gate_a), gated() as (context_b, gate_b):
        with ExitStack() as stack:
            a = PeerLinks(context_a, address(A), {B: address(B)}, gate_a, keys=used[A] if used else None, limits=QUICK)
            known = {A: address(A), C: address(C)}
            b = PeerLinks(context_b, address(B), known, gate_b, keys=used[B] if used else None, limits=QUICK)
            yield stack.enter_context(a), stack.enter_context(b), gate_b


async def send_until(links: PeerLinks, node: NodeId, envelope: Envelope, seconds: float = 5.0) -> Sent:
    await until(lambda: links.send(node, envelope) is Sent.SENT, seconds)
    return links.send(node, envelope)


@pytest.mark.parametrize("with_keys", [False, True], ids=["loopback", "curve"])
async def test_peers_hear_each_other(with_keys: bool) -> None:
    keys = {node: new_keys() for node in (A, B, C)} if with_keys else None
    async with two_nodes(keys) as (a, b, _):
        assert Sent.SENT is await send_until(a, B, note(A))
        assert Sent.SENT is await send_until(b, A, note(B))

        assert (A, note(A)) == await anext(b)
        assert (B, note(B)) == await anext(a)


async def test_an_unknown_key_is_refused() -> None:
    keys = {node: new_keys() for node in (A, B, C)}
    async with two_nodes(keys, keys | {A: new_keys()}) as (a, b, gate_b):
        await send_until(a, B, note(A), seconds=0.5)

        assert await until(lambda: gate_b.refused["unknown key"] > 0)
        with anyio.move_on_after(0.2) as scope:
            await anext(b)
        assert scope.cancelled_caught


async def test_nobody_connects_to_a_daemon_with_another_key() -> None:
    keys = {node: new_keys() for node in (A, B, C)}
    async with two_nodes(keys, keys | {B: new_keys()}) as (a, _, __):
        assert Sent.FULL is await send_until(a, B, note(A), seconds=0.5)


@pytest.mark.parametrize("with_keys", [False, True], ids=["loopback", "curve"])
async def test_a_message_of_somebody_else_is_dropped(with_keys: bool) -> None:
    keys = {node: new_keys() for node in (A, B, C)} if with_keys else None
    async with two_nodes(keys) as (a, b, _):
        await send_until(a, B, note(C if with_keys else "node-d"))  # another node's name, and nobody's
        await send_until(a, B, note(A, 7))

        heard = await anext(b)

        assert (A, 7) == (heard.node, heard.envelope.seq)
        assert b.refused["E_PROTOCOL"] > 0


async def test_an_absent_peer_is_told_at_once() -> None:
    async with gated() as (context, gate):
        gone = PeerAddress("127.0.0.1", free_port())
        with PeerLinks(context, PeerAddress("127.0.0.1", 0), {B: gone}, gate, limits=QUICK) as links:
            assert Sent.FULL is links.send(B, note(A))
            assert Sent.GONE is links.send(NodeId("never configured"), note(A))
            assert links.port > 0


async def test_without_keys_only_loopback_is_listened_on() -> None:
    async with gated() as (context, gate):
        with pytest.raises(ConfigError, match="reachable from other hosts"):
            PeerLinks(context, PeerAddress("0.0.0.0", 0), {}, gate)
