"""The daemon: opens the sockets, hands every message to its run, and ends in order.

Nothing is decided here.  A message of a hook or of a peer becomes an event of
its run; what a run wants sent goes out through ``to_hook`` and ``to_peer``,
which never wait: whatever finds no room is repeated by its owner.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType

import anyio
import anyio.to_thread
import zmq
from anyio.abc import TaskGroup, TaskStatus

from weightd.core.errors import ConfigError, InternalInvariantBroken, WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.layout.message import decode_layout
from weightd.core.session import events as ev
from weightd.core.units import NO_TERM, Boot, NodeId, RunName, Term
from weightd.core.wire import messages as m
from weightd.core.wire.blobs import BlobAssembler, cut_blob
from weightd.core.wire.faults import LocalProtocolError, PeerProtocolError, ProtocolError, ProtocolMismatch
from weightd.daemon.admission import HookRefused
from weightd.daemon.attached import AttachedHooks, Hook, check_layout, name_of
from weightd.daemon.bulk.landing import MemoryBudget
from weightd.daemon.bulk.mailbox import Mailbox
from weightd.daemon.bulk.memcpy import measure_memcpy
from weightd.daemon.bulk.port import BulkServer
from weightd.daemon.bulk.tcp_server import TcpBulkServer
from weightd.daemon.config import Config
from weightd.daemon.control.curve import load_keys
from weightd.daemon.control.limits import ControlLimits, Sent
from weightd.daemon.control.peers import FromPeer, PeerAddress, PeerLinks
from weightd.daemon.control.router import FromHook, HookRouter
from weightd.daemon.control.zap import ZapGate
from weightd.daemon.descriptors import Descriptors
from weightd.daemon.epochs import LayoutStore
from weightd.daemon.fd_server import FdServer
from weightd.daemon.journal import JournalError
from weightd.daemon.open_files import why_full
from weightd.daemon.service.service import Service
from weightd.daemon.status.document import encode_document, status_document
from weightd.daemon.supervisor import NO_TRACE, RunSupervisor
from weightd.daemon.workers import in_worker

log = logging.getLogger("weightd.daemon")

DRAIN_LOOK_S = 0.05
"""Between two looks whether what is waited for in an orderly stop is decided: a hook tells its state at once."""

GIVE_UP_S = 1.0
"""For the failure of a version that is given up to be journaled and told."""

WAITING_LIMIT = 256
"""Messages of peers that wait for their run to begin; more are dropped, and repeated by who sent them."""

GOODBYE_S = 0.1
"""For the goodbye of a hook that left in order: it comes by the other socket, whose end of the race is open."""


class Daemon:
    """All that one node's daemon holds; ``serve`` runs it.

    Attributes:
        config: As started.
        boot: This incarnation.
        hooks: Attached hooks.
        runs: Runs with hooks or a leader here, or that a peer leads.
        heard_at: When each peer was last heard, on the loop's clock.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.boot = Boot(secrets.randbits(63))
        self.started_at = time.time()
        self.hooks = AttachedHooks(config.limits.hooks)
        self.runs: dict[RunName, RunSupervisor] = {}
        self.layouts = LayoutStore()
        self.heard_at: dict[NodeId, float] = {}
        self.memcpy_bytes_per_s = 0.0
        self.dropped = 0
        self._blobs = BlobAssembler()
        self._asked: set[str] = set()
        self._seq = 0
        self._seen: dict[tuple[NodeId, Boot], int] = {}
        self._tasks: TaskGroup | None = None
        self._scopes: dict[RunName, anyio.CancelScope] = {}
        self._router: HookRouter | None = None
        self._peers: PeerLinks | None = None
        self._calls: Mailbox[Callable[[], None]] | None = None
        self._begins = anyio.Lock()
        self._waiting = 0
        self.budget = MemoryBudget(config.limits.memory_budget_bytes or _half_of_memory())
        self.bulk: BulkServer

    # ------------------------------------------------------------ life

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.

        Raises:
            ConfigError: A directory or a socket cannot be had.
        """
        config = self.config
        _make_directories(config)
        keys = load_keys(config.secret_key_file) if config.secret_key_file else None
        limits = ControlLimits(
            heartbeat_s=config.deadlines.heartbeat_s, heartbeat_timeout_s=config.deadlines.heartbeat_timeout_s
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peers = {
            n: PeerAddress(p.control.host, p.control.port, p.public_key if keys else None)
            for n, p in config.peers.items()
        }
        try:
            async with AsyncExitStack() as stack:
                gate = stack.enter_context(ZapGate(context))
                self._peers = stack.enter_context(
                    PeerLinks(
                        context,
                        PeerAddress(config.control.host, config.control.port),
                        peers,
                        gate,
                        keys=keys,
                        limits=limits,
                    )
                )
                self._router = await stack.enter_async_context(
                    HookRouter(
                        context,
                        config.control_socket,
                        gate,
                        allowed_uids=config.allowed_uids,
                        mode=config.socket_mode,
                        limits=limits,
                        on_fault=self._answer_fault,
                    )
                )
                descriptors = Descriptors(self)
                fds = await stack.enter_async_context(
                    FdServer(config.fd_socket, descriptors, config.allowed_uids, config.socket_mode)
                )
                stack.callback(self.hooks.close)
                self._calls = stack.enter_context(Mailbox())
                bulk = TcpBulkServer(config.bulk.host, config.bulk.port, config.deadlines.fetch_stall_s)
                stack.callback(bulk.close)
                self.bulk = bulk
                self.memcpy_bytes_per_s = await anyio.to_thread.run_sync(measure_memcpy)
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(gate.serve)
                    tasks.start_soon(self._run_calls, self._calls)
                    tasks.start_soon(self._serve_hooks, self._router)
                    tasks.start_soon(self._serve_peers, self._peers)
                    tasks.start_soon(fds.serve)
                    log.info("serving", extra={"facts": {"node": config.node, "socket": str(config.control_socket)}})
                    task_status.started()
        finally:
            context.term()

    async def _run_calls(self, calls: Mailbox[Callable[[], None]]) -> None:
        """Run what worker threads want done on the loop."""
        async for call in calls:
            call()

    def soon(self, call: Callable[[], None]) -> None:
        """Run a call on the event loop, from any thread."""
        if self._calls is not None:
            self._calls.post(call)

    async def drain(self) -> None:
        """Stop taking versions; wait up to ``drain_s`` for those that engines stand in, then fail them by name."""
        limit_s, begun = self.config.deadlines.drain_s, anyio.current_time()
        for run in self.runs.values():
            run.drain()
        await self._until_decided(begun + limit_s)
        waited_s = anyio.current_time() - begun
        for run in self.runs.values():
            left = run.undecided()
            if left is not None:
                facts = {"run": run.run, "version": left.version, "stage": left.stage, "waiting_for": left.waiting_for}
                log.warning("gives a version up", extra={"facts": {**facts, "waited_s": waited_s, "drain_s": limit_s}})
                run.give_up(waited_s)
        await self._until_decided(anyio.current_time() + GIVE_UP_S)

    async def _until_decided(self, deadline_at: float) -> None:
        # Looked at, not told: what is waited for is spread over states of machines and hooks, which know no event.
        while any(run.undecided() for run in self.runs.values()) and anyio.current_time() < deadline_at:  # noqa: ASYNC110
            await anyio.sleep(DRAIN_LOOK_S)

    def say_goodbye(self) -> None:
        """Tell every hook that this daemon stops in order."""
        for hook in self.hooks:
            self.to_hook(hook.session, hook.run, NO_TERM, NO_TRACE, m.Bye("the daemon stops"))

    # ------------------------------------------------------------ sending (``supervisor.Links``)

    def to_hook(self, session: ev.SessionId, run: RunName, term: Term, trace: bytes, body: m.Body) -> bool:
        """Send to an attached hook; say whether there was room."""
        hook = self.hooks.get(session)
        if hook is None or self._router is None:
            return False
        if isinstance(body, m.Refusal):
            log.warning("refused", extra={"facts": {"run": run, "who": hook.name, "code": body.error.code}})
        return self._send(partial(self._router.send, hook.routing_id), self._envelope(run, term, trace, body))

    def to_peer(self, node: NodeId, run: RunName, term: Term, trace: bytes, body: m.Body) -> bool:
        """Send to another node's daemon; say whether there was room."""
        if isinstance(body, m.BlobWanted):
            self._asked.add(body.digest)
        return self._peers is not None and self._send(
            partial(self._peers.send, node), self._envelope(run, term, trace, body)
        )

    @staticmethod
    def _send_chunks(chunks: Iterator[m.BlobChunk], send: Callable[[m.BlobChunk], bool]) -> None:
        """Send chunks until the queue is full; the other side asks again from the first that it lacks."""
        for chunk in chunks:
            if not send(chunk):
                return

    def _send(self, send: Callable[[m.Envelope], Sent], envelope: m.Envelope) -> bool:
        """Send, or say in the log why a message of ours cannot be one; whoever waits for it has a deadline."""
        try:
            return send(envelope) is Sent.SENT
        except LocalProtocolError as error:
            self.dropped += 1
            log.error("a message was not sent", extra={"facts": {"run": envelope.run, "error": str(error)}})  # noqa: TRY400 - the error is its text
            return False

    def _envelope(self, run: RunName, term: Term, trace: bytes, body: m.Body) -> m.Envelope:
        self._seq += 1
        return m.Envelope(m.PROTOCOL, run, term, self.boot, self._seq, trace, self.config.node, body)

    def _answer(self, routing_id: bytes, run: RunName, body: m.Body) -> None:
        if self._router is not None:
            self._send(partial(self._router.send, routing_id), self._envelope(run, NO_TERM, NO_TRACE, body))

    def _answer_fault(self, routing_id: bytes, error: ProtocolError) -> None:
        """Tell a process that speaks another protocol; other bad messages are only counted and dropped."""
        if isinstance(error, ProtocolMismatch):
            self._answer(routing_id, RunName(""), m.Refusal(error.to_wire()))

    # ------------------------------------------------------------ hooks

    async def _serve_hooks(self, router: HookRouter) -> None:
        async for message in router:
            try:
                self._from_hook(message)
            except PeerProtocolError as error:
                self.dropped += 1
                log.warning("dropped a message of a hook", extra={"facts": {"error": str(error)}})
            except Exception:  # one message that finds a fault of ours must not take every run's daemon away
                self.dropped += 1
                log.exception("a message of a hook met a fault", extra={"facts": {"from": message.envelope.sender}})

    def _from_hook(self, message: FromHook) -> None:
        envelope = message.envelope
        body = envelope.body
        if isinstance(body, m.StatusWanted):
            self._answer(message.routing_id, RunName(""), m.Status(encode_document(self.status())))
            return
        if isinstance(body, m.TrainerHello | m.EngineHello):
            self._greeted(message, body)
            return
        hook = self.hooks.find(RunName(envelope.run), envelope.sender, envelope.boot)
        if hook is None:
            self.dropped += 1  # of a hook that was removed: it greets again, or has ended
            return
        if hook.pid != message.process.pid:
            raise PeerProtocolError(
                f"pid {message.process.pid}", f"speaks for {hook.name}, pid {hook.pid}", "$.boot", 0
            )
        hook.routing_id = message.routing_id
        run = self.runs[hook.run]
        match body:
            case m.PublisherReport() | m.ReceiverReport():
                self._ask_layout(hook)
                run.inbox.repeat(ev.HookReported(hook.session, body, envelope.seq))
            case m.BlobWanted(digest, first):
                blob = run.planning.rank_blob(digest)
                chunks = cut_blob(blob, digest, first) if blob is not None else iter(())
                self._send_chunks(chunks, partial(self.to_hook, hook.session, hook.run, NO_TERM, NO_TRACE))
            case m.BlobChunk():
                self._layout_chunk(body, hook.name)
            case m.Bye(why):
                self.lost(hook, why or "it detached", orderly=True)
            case _:
                raise PeerProtocolError(hook.name, f"{type(body).__name__} is no message of a hook", "$.body", 0)

    def _greeted(self, message: FromHook, hello: m.TrainerHello | m.EngineHello) -> None:
        envelope = message.envelope
        run, name = RunName(envelope.run), name_of(hello)
        hook = self.hooks.find(run, name, envelope.boot)
        if hook is not None and hook.pid == message.process.pid:
            self._welcome(hook, message)
        elif self._tasks is not None:
            self._tasks.start_soon(self._admit, message, hello)

    async def _admit(self, message: FromHook, hello: m.TrainerHello | m.EngineHello) -> None:
        """Take a hook on, or say why not; off the loop's socket tasks, since a run may have to read its journal."""
        run, name, boot = RunName(message.envelope.run), name_of(hello), message.envelope.boot
        async with self._begins:
            hook = self.hooks.find(run, name, boot)  # its greeting may have been repeated meanwhile
            if hook is None or hook.pid != message.process.pid:
                error = self._why_not(run, name, hello, message) or await self._take_on(run, boot, hello, message)
                if error is not None:
                    log.warning("refused a hook", extra={"facts": {"run": run, "who": name, "code": error.code}})
                    self._answer(message.routing_id, run, m.Refusal(error.to_wire()))
                    return
                hook = self.hooks.find(run, name, boot)
        if hook is not None:
            self._welcome(hook, message)

    def _welcome(self, hook: Hook, message: FromHook) -> None:
        hook.routing_id = message.routing_id
        deadlines = self.config.deadlines
        welcome = m.Welcome(
            self.config.node, hook.session, deadlines.heartbeat_s, deadlines.heartbeat_timeout_s, m.MAX_FRAME_BYTES
        )
        self.to_hook(hook.session, hook.run, NO_TERM, NO_TRACE, welcome)
        self._ask_layout(hook)

    def _why_not(
        self, run: RunName, name: str, hello: m.TrainerHello | m.EngineHello, message: FromHook
    ) -> WeightdError | None:
        """Return why this daemon takes no such hook on, whatever its run says."""
        limits, sender, pid = self.config.limits, message.envelope.sender, message.process.pid
        if not run:
            return HookRefused(name, run, "the run has no name", "give the hook the name of the run")
        if sender != name:
            return HookRefused(name, run, f"its messages say {sender!r}", "report this: the hook is at fault")
        known = self.hooks.find(run, name, message.envelope.boot)
        if known is not None:
            why = f"pid {pid} greets with the boot of pid {known.pid}, which is attached"
            return HookRefused(name, run, why, "attach with a Publisher or Receiver made in this process")
        if hello.pid != pid:
            hint = "share the host's process ids with the container, or attach from outside it"
            log.info(
                "another pid", extra={"facts": {"run": run, "who": name, "says": hello.pid, "is": pid, "hint": hint}}
            )
        if len(self.hooks) >= limits.hooks:
            return HookRefused(name, run, f"{limits.hooks:,} hooks are attached", "raise limits.hooks")
        if full := why_full():
            return HookRefused(name, run, full, "raise the daemon's limit of open files (LimitNOFILE, ulimit -n)")
        if run not in self.runs and len(self.runs) >= limits.runs and not self._end_unused_run():
            return HookRefused(name, run, f"{limits.runs} runs are here", "raise limits.runs")
        return None

    async def _take_on(
        self, run: RunName, boot: Boot, hello: m.TrainerHello | m.EngineHello, message: FromHook
    ) -> WeightdError | None:
        try:
            supervisor = await self._run(run)
            if isinstance(hello, m.TrainerHello) and hello.rank == 0 and hello.roster is not None:
                await supervisor.rank0_greeted(hello.roster, boot)
        except WeightdError as error:
            return error
        except Exception as error:  # as for messages: a fault of ours is this hook's, not every run's
            log.exception("a greeting met a fault", extra={"facts": {"from": name_of(hello)}})
            return InternalInvariantBroken("a hook is taken on", f"{type(error).__name__}: {error}")
        self._end_predecessors(run, name_of(hello))
        hook = self.hooks.add(run, boot, hello, message.process.pid, message.routing_id)
        supervisor.inbox.outcome(ev.HookGreeted(hook.session, hello, boot))
        return None

    def refuse(self, hook: Hook, error: WeightdError) -> None:
        """Refuse an attached hook and forget it."""
        self.to_hook(hook.session, hook.run, NO_TERM, NO_TRACE, m.Refusal(error.to_wire()))
        self.lost(hook, f"it was refused: {error.code}")

    def closed(self, hook: Hook) -> None:
        """A hook's descriptor socket has closed: its process has ended, or its goodbye is on the way."""
        hook.closed = True
        if self._tasks is not None:
            self._tasks.start_soon(self._closed, hook)

    async def _closed(self, hook: Hook) -> None:
        await anyio.sleep(GOODBYE_S)
        self._lost_socket(hook)

    def _lost_socket(self, hook: Hook) -> None:
        self.lost(hook, f"pid {hook.pid} has ended or closed its socket")

    def _end_predecessors(self, run: RunName, name: str) -> None:
        """End the closed hooks of a rank that greets anew: whoever is started again at once is no second claim."""
        for hook in self.hooks:
            if hook.closed and (hook.run, hook.name) == (run, name):
                self._lost_socket(hook)

    def lost(self, hook: Hook, why: str, *, orderly: bool = False) -> None:
        """Note the end of a hook; harmless when done twice."""
        if self.hooks.get(hook.session) is None:
            return
        log.info("hook ended", extra={"facts": {"run": hook.run, "who": hook.name, "pid": hook.pid, "why": why}})
        run = self.runs.get(hook.run)
        self.hooks.remove(hook, keep=run is not None and run.may_read(hook))
        digest = hook.hello.layout_digest
        if digest not in self._asked and all(h.hello.layout_digest != digest for h in self.hooks):
            self._blobs.forget(digest)  # what it announced and never sent must not fill the room of others
        if run is not None:
            run.inbox.outcome(ev.HookLost(hook.session, why, orderly))

    # ------------------------------------------------------------ layouts

    def _ask_layout(self, hook: Hook) -> None:
        """Ask for the hook's layout until it is here, or check the one that is."""
        if hook.layout:
            return
        digest, nbytes = hook.hello.layout_digest, hook.hello.layout_nbytes
        layout = self.layouts.layout(digest)
        if layout is not None:
            self._layout_here(hook, layout)
            return
        self._blobs.expect(digest, nbytes, hook.name)
        first = self._blobs.missing().get(digest, 0)
        self.to_hook(hook.session, hook.run, NO_TERM, NO_TRACE, m.BlobWanted(digest, first))

    def _layout_chunk(self, chunk: m.BlobChunk, who: str) -> None:
        blob = self._blobs.add(chunk, who)
        if blob is not None and self._tasks is not None:
            self._tasks.start_soon(self._take_layout, chunk.digest, blob)

    async def _take_layout(self, digest: str, blob: bytes) -> None:
        """Decode and check a layout off the loop: a large one takes half a second."""
        self._asked.discard(digest)
        try:
            layout = await in_worker("decoding a layout", partial(decode_layout, blob, whose=f"layout {digest}"))
        except WeightdError as error:
            for hook in self.hooks:
                if hook.hello.layout_digest == digest:
                    self.refuse(hook, error)
            return
        self.layouts.put(digest, blob, layout)
        for hook in self.hooks:
            if hook.hello.layout_digest == digest and not hook.layout:
                self._layout_here(hook, layout)

    def _layout_here(self, hook: Hook, layout: Layout) -> None:
        error = self._other_size(hook) or check_layout(hook.hello, layout)
        if error is not None:
            self.refuse(hook, error)
            return
        hook.layout = True
        self.ready_if_complete(hook)

    def _other_size(self, hook: Hook) -> WeightdError | None:
        """Return why a hook is refused that announced its layout with another size than it has."""
        digest, announced = hook.hello.layout_digest, hook.hello.layout_nbytes
        nbytes = len(self.layouts.data(digest) or b"")
        if nbytes == announced:
            return None
        return PeerProtocolError(
            hook.name, f"layout {digest} has {nbytes:,} bytes, announced were {announced:,}", "", 0
        )

    def ready_if_complete(self, hook: Hook) -> None:
        """Tell the run that a hook is ready, once nothing of it is lacking."""
        if hook.complete and not hook.ready:
            hook.ready = True
            self.runs[hook.run].inbox.outcome(ev.HookReady(hook.session))

    # ------------------------------------------------------------ peers

    async def _serve_peers(self, peers: PeerLinks) -> None:
        async for message in peers:
            try:
                self._from_peer(message)
            except PeerProtocolError as error:
                self.dropped += 1
                log.warning("dropped a message of a peer", extra={"facts": {"error": str(error)}})
            except Exception:  # as for hooks
                self.dropped += 1
                log.exception("a message of a peer met a fault", extra={"facts": {"from": message.node}})

    def _from_peer(self, message: FromPeer) -> None:
        node, envelope = message
        self.heard_at[node] = anyio.current_time()
        if not self._in_order(node, envelope):
            self.dropped += 1
            return
        run = self.runs.get(RunName(envelope.run))
        if run is not None:
            self._for_run(run, message)
        elif isinstance(envelope.body, m.Goal | m.Recover) and self._waiting < WAITING_LIMIT:
            self._begin_for(message)
        else:
            self.dropped += 1

    def _begin_for(self, message: FromPeer) -> None:
        """Begin the run that a peer leads, or is about to lead, and hear it then."""
        if self._tasks is not None:
            self._waiting += 1
            self._tasks.start_soon(self._begun, message)

    async def _begun(self, message: FromPeer) -> None:
        try:
            async with self._begins:
                run = await self._run(RunName(message.envelope.run))
            self._for_run(run, message)
        except (PeerProtocolError, JournalError) as error:
            self.dropped += 1
            log.warning("dropped a message of a peer", extra={"facts": {"error": str(error)}})
        except Exception:  # as for hooks
            self.dropped += 1
            log.exception("a message of a peer met a fault", extra={"facts": {"from": message.node}})
        finally:
            self._waiting -= 1

    def _for_run(self, run: RunSupervisor, message: FromPeer) -> None:
        node, envelope = message
        name, body = run.run, envelope.body
        match body:
            case m.Goal():
                run.inbox.repeat(ev.GoalArrived(body, envelope.term, envelope.boot, envelope.seq))
            case m.NodeReport():
                run.inbox.repeat(ev.NodeReported(body, envelope.boot, envelope.seq))
            case m.Superseded(term, leader):
                run.inbox.repeat(ev.HigherTermSeen(term, leader))
            case m.Recover():
                self.to_peer(node, name, run.term, NO_TRACE, run.recovered())
            case m.Recovered():
                run.inbox.repeat(ev.PeerRecovered(body, envelope.boot))
            case m.BlobWanted(digest, first):
                data = self.layouts.data(digest)
                chunks = cut_blob(data, digest, first) if data is not None else iter(())
                self._send_chunks(chunks, partial(self.to_peer, node, name, run.term, NO_TRACE))
            case m.BlobChunk(digest, _, _, nbytes):
                if digest in self._asked and self.layouts.layout(digest) is None:
                    self._blobs.expect(digest, nbytes, f"node {node}")
                    self._layout_chunk(body, f"node {node}")
            case m.TicketWanted():
                run.answer_ticket(node, body)
            case m.Ticket():
                run.fetches.ticket(node, body)
            case m.Bye():
                log.info("peer stops", extra={"facts": {"node": node, "why": body.why}})
            case _:
                raise PeerProtocolError(f"node {node}", f"{type(body).__name__} is no message of a peer", "$.body", 0)

    def _in_order(self, node: NodeId, envelope: m.Envelope) -> bool:
        """Whether a message is newer than the last of its sender's incarnation."""
        last = self._seen.get((node, envelope.boot), 0)
        if envelope.seq <= last:
            return False
        if last == 0:  # a new incarnation: forget the older ones
            for known in [k for k in self._seen if k[0] == node]:
                del self._seen[known]
        self._seen[node, envelope.boot] = envelope.seq
        return True

    # ------------------------------------------------------------ runs

    async def _run(self, name: RunName) -> RunSupervisor:
        """Return the run, which begins here if it is not known yet; one begins at a time, under ``_begins``."""
        known = self.runs.get(name)
        if known is None:
            known = await RunSupervisor.begin(name, self)
            self.runs[name] = known
            if self._tasks is None:
                raise InternalInvariantBroken("runs begin while the daemon serves", name)
            self._tasks.start_soon(self._turn, known)
        return known

    def _end_unused_run(self) -> bool:
        """Make room for a new run: end the oldest one in which nobody takes part any more; its journals stay."""
        now = anyio.current_time()
        used = {hook.run for hook in self.hooks}
        name = next(
            (n for n, run in self.runs.items() if n not in used and n in self._scopes and run.unused(now)), None
        )
        if name is None:
            return False
        log.info("a run that nobody uses gives way", extra={"facts": {"run": name}})
        del self.runs[name]
        self._scopes.pop(name).cancel()
        self.hooks.keep_only(name, ())
        return True

    async def _turn(self, run: RunSupervisor) -> None:
        """Turn a run's crank.  A fault of ours in one run ends that run, with its ranks told, and no other."""
        try:
            with anyio.CancelScope() as scope:
                self._scopes[run.run] = scope
                await run.turn()
        except Exception as error:
            cause = _innermost(error)
            log.exception("a run ended by a fault", extra={"facts": {"run": run.run}})
            broken: WeightdError = (
                cause
                if isinstance(cause, WeightdError)
                else InternalInvariantBroken("the crank of a run turns", f"{type(cause).__name__}: {cause}")
            )
            self.runs.pop(run.run, None)
            for hook in self.hooks:
                if hook.run == run.run:
                    self.to_hook(hook.session, hook.run, NO_TERM, NO_TRACE, m.Refusal(broken.to_wire()))
                    self.hooks.remove(hook)
            self.hooks.keep_only(run.run, ())

    def status(self) -> dict[str, object]:
        """Return the status document as plain values."""
        return status_document(self)


async def serve_node(config: Config, environ: Mapping[str, str] = MappingProxyType({})) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order; a second signal does not wait for ``drain_s``.

    Args:
        config: The daemon's.
        environ: The process's environment, which says whether a service manager waits for word.

    Raises:
        WeightdError: The daemon cannot serve; not wrapped in a group, so that the command line can exit by its code.
    """
    daemon = Daemon(config)
    service = Service(daemon, environ)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(daemon.serve)
                await tasks.start(service.serve)  # every socket is bound and listened to by now
                await _next_signal(signals, "stopping")
                await service.stopping()
                async with anyio.create_task_group() as stopping:
                    stopping.start_soon(_cut_short, signals, stopping.cancel_scope)
                    await daemon.drain()
                    stopping.cancel_scope.cancel()
                daemon.say_goodbye()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            fault = _fault_of(group)
            if fault is None:
                raise
            raise fault from None


async def _next_signal(signals: AsyncIterator[signal.Signals], what: str) -> None:
    async for number in signals:
        log.info(what, extra={"facts": {"signal": signal.Signals(number).name}})
        return


async def _cut_short(signals: AsyncIterator[signal.Signals], scope: anyio.CancelScope) -> None:
    """End the drain when a second signal comes: whoever sends it does not want to wait."""
    await _next_signal(signals, "stops at once")
    scope.cancel()


def _fault_of(group: BaseExceptionGroup[BaseException]) -> WeightdError | None:
    """Return the error of ours that a group is about, if it is about nothing else."""
    ours, others = group.split(WeightdError)
    if ours is None or others is not None:
        return None
    first = _innermost(ours)
    return first if isinstance(first, WeightdError) else None


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _make_directories(config: Config) -> None:
    for field, path in (("runtime_dir", config.runtime_dir), ("state_dir", config.state_dir)):
        try:
            path.mkdir(mode=0o750 if field == "runtime_dir" else 0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be made: {error.strerror}", "configuration") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(field, str(path), "cannot be written", "configuration")


def _half_of_memory() -> int:
    """Return half of the host's memory in bytes: the landings' budget where none is set."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
