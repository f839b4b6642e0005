"""What a trainer adds to its loop: one ``Publisher``, and one ``publish()`` behind every step.

::

    with Publisher(model, run="grpo-7", engines={"E0": 4}) as publisher:
        for batch in batches:
            step(model, batch)
            version = publisher.publish()
        publisher.wait(version)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Required, Self, TypedDict, Unpack

from weightd.core.errors import ConfigError, WeightdError
from weightd.core.layout.columns import Layout
from weightd.core.layout.files import LayoutFile, encode_file
from weightd.core.roster.topology import Mode
from weightd.core.session.deadlines import Deadlines
from weightd.core.units import NodeId, SlotName, Version
from weightd.core.wire.messages import PublisherGoal
from weightd.trainer_hooks.adapters.chosen import Adapter, chosen_holdings, refuse_others
from weightd.trainer_hooks.adapters.leaves import Source
from weightd.trainer_hooks.adapters.megatron import Megatron
from weightd.trainer_hooks.attachment import TrainerAttachment
from weightd.trainer_hooks.declared import ShardSpec, declared_holdings
from weightd.trainer_hooks.describe import Casts, Described, UnusedSpec, describe_holdings
from weightd.trainer_hooks.exchange import Exchange
from weightd.trainer_hooks.facts import Facts, with_facts
from weightd.trainer_hooks.faults import NotAttached
from weightd.trainer_hooks.identity import Engines, declare_roster, identify
from weightd.trainer_hooks.live.choice import Memory, is_live, stepping_of, written_between_steps
from weightd.trainer_hooks.live.layout import describe_live
from weightd.trainer_hooks.live.stepping import Optimizers, Stepping
from weightd.trainer_hooks.lora.choice import Lora
from weightd.trainer_hooks.lora.holdings import lora_holdings
from weightd.trainer_hooks.renaming import Renaming, renamed_holdings
from weightd.trainer_hooks.replicas import Replicas
from weightd.trainer_hooks.shards import Holdings

Until = Literal["committed", "released"]

_DAEMON_S = 30.0
"""For a daemon to answer at all, unless ``attach_s`` is less: as long as one is given to restart."""

_REPORT_S = 15.0
"""The hook waits this much longer than the leader, whose report says more than a deadline here could."""


class PublisherOptions(TypedDict, total=False):
    """What every way to make a ``Publisher`` takes; its constructor says what each means."""

    run: Required[str]
    rank: int | None
    world: int | None
    slot: str | None
    engines: Engines | None
    reserved: Iterable[int]
    mode: Mode | None
    adapter: Adapter
    dtype: Casts
    masters: bool
    lora: Lora | None
    unused: Iterable[UnusedSpec]
    renamed: Renaming | None
    facts: Facts | None
    check_replicas: bool
    socket: str | os.PathLike[str] | None
    attach_s: float | None
    deadlines: Deadlines | None
    memory: Memory
    optimizer: Optimizers


class Publisher:
    """Publishes one trainer rank's shards, version by version.

    Every rank of the trainer makes one and calls ``publish`` in the same order.  Use from one thread.

    Attributes:
        run: Name of the training job.
        rank: This trainer rank.
        world: Number of trainer ranks.
    """

    def __init__(
        self,
        module_or_params: Source,
        *,
        run: str,
        rank: int | None = None,
        world: int | None = None,
        slot: str | None = None,
        engines: Engines | None = None,
        reserved: Iterable[int] = (),
        mode: Mode | None = None,
        adapter: Adapter = None,
        dtype: Casts = None,
        masters: bool = False,
        lora: Lora | None = None,
        unused: Iterable[UnusedSpec] = (),
        renamed: Renaming | None = None,
        facts: Facts | None = None,
        check_replicas: bool = False,
        socket: str | os.PathLike[str] | None = None,
        attach_s: float | None = None,
        deadlines: Deadlines | None = None,
        memory: Memory = "snapshot",
        optimizer: Optimizers = None,
    ) -> None:
        """Prepare a publisher; nothing is connected or allocated before ``attach``.

        Args:
            module_or_params: A module (plain, DDP, FSDP2 with or without tensor parallelism), a DeepSpeed engine
                (ZeRO-1, -2, -3, with or without AutoTP), a mapping from names to tensors, or pairs of them.
                Persistent buffers of a module belong to it.
            run: Name of the training job, the same on all ranks.
            rank: This rank; by default that of ``torch.distributed``, else ``RANK``.
            world: Number of trainer ranks; likewise, else ``WORLD_SIZE``.
            slot: Name of this rank's device; by default one of this process.
            engines: What the run consists of, from rank 0: sizes by engine, declarations, or the path of
                a roster file; None where the daemon has the roster.
            reserved: Trainer ranks without an engine by intent.
            mode: Where engines are against trainer ranks; ``disaggregated`` by default.
            adapter: ``plain``, ``fsdp2`` or ``deepspeed``, which refuse tensors of another framework; the declaration
                of a Megatron rank (``weightd.trainer_hooks.adapters.megatron.Megatron``); None for what the
                tensors themselves say.
            dtype: Cast on publish: one element type for all floating tensors, or by name.
            masters: Publish the fp32 masters of a DeepSpeed engine instead of what it computes with; ``dtype``
                casts them.
            lora: Of a PEFT model, ``merged``: the base weights with all active adapters, computed shard by shard while
                they are copied; ``adapter`` or ``LoraAdapter(name)``: that adapter's own tensors, under the names of a
                PEFT checkpoint.  A model with adapters is refused without it.
            unused: What nobody takes: names, (name, (first row, last row + 1)), or ``Unused``.
            renamed: Names of the checkpoint, where the model has others: prefixes by what they stand for, or
                a function of one name.  ``dtype``, ``unused`` and ``facts`` use the new names.
            facts: What no adapter can see: ties, true shapes, what is frozen, what is not published.
            check_replicas: Compare, at every publish, what several trainer ranks hold equally; a collective over
                ``torch.distributed``, within ``deadlines.collect_s``.
            socket: The daemon's control socket or its directory; by default ``WEIGHTD_SOCKET``, else
                ``/run/weightd``.
            attach_s: Limit of ``attach`` in seconds; by default ``deadlines.attach_s``.
            deadlines: This hook's own limits.
            memory: ``snapshot``: ``publish()`` copies, and training goes on at once.  ``live``: ``attach()`` moves the
                parameters into shared memory, they are published from there without a copy, and a step waits until
                their version is decided.
            optimizer: With ``live``, the optimizers of which steps wait; by default every torch optimizer of this
                process.  Whatever else writes the parameters calls ``before_step()`` first.

        Raises:
            WorldUnknown: Nobody says which rank this is.
            ConfigError: The roster file cannot stand; ``memory`` is neither of the two, or ``live`` with a cast.
        """
        self._live = is_live(memory, dtype)
        self._optimizer = optimizer
        self._stepping: Stepping | None = None
        # Pairs that come only once are kept: they are described at attach, and before that by whoever asks.
        self._source: Source | Holdings = (
            list(module_or_params) if isinstance(module_or_params, Iterator) else module_or_params
        )
        self.run = run
        self.rank, self.world = self._identity = identify(rank, world)
        self._slot = slot or f"pid-{os.getpid()}"
        self._roster = declare_roster(engines, self._identity, reserved, mode)
        self._adapter: Adapter = adapter
        self._casts = dtype
        self._masters = masters
        self._lora: Lora | None = lora
        self._unused = tuple(unused)
        self._renamed = renamed
        self._facts = facts
        self._check_replicas = check_replicas
        self._socket = socket
        self._deadlines = deadlines or Deadlines()
        self._attach_s = self._deadlines.attach_s if attach_s is None else attach_s
        self._attachment: TrainerAttachment | None = None

    @classmethod
    def from_shards(cls, shards: Iterable[ShardSpec], **options: Unpack[PublisherOptions]) -> Self:
        """Return a publisher of declared shards.

        Args:
            shards: (name, global shape, start, extent, tensor of shape ``extent``); an extent with a 0 is
                an empty shard, which makes the tensor known.  Several of one name are several boxes of it.
            options: Those of the constructor.

        Raises:
            PiecesDoNotAddUp: A tensor is not of the declared extent.
            ConfigError: ``masters``, ``adapter`` or ``lora`` is set.
        """
        adapter = options.get("adapter")
        if adapter is not None:
            raise ConfigError("adapter", str(adapter), "shards are declared: there is nothing to describe")
        if options.get("masters"):
            raise ConfigError("masters", "True", "a declared shard has no master: declare the master's tensor itself")
        lora = options.get("lora")
        if lora is not None:
            raise ConfigError(
                "lora", str(lora), "shards are declared as they are published: nothing says what adapters add"
            )
        publisher = cls({}, **options)
        publisher._source = declared_holdings(shards)
        return publisher

    # ------------------------------------------------------------ layout

    def describe(self) -> Layout:
        """Return what this rank holds, without any collective; its pieces account for every local element.

        Raises:
            UnsupportedPlacement: A tensor cannot be described.
            PiecesDoNotAddUp: A rule and the framework disagree about a shard.
        """
        return self._described().layout

    def export_layout(self, path: str | os.PathLike[str]) -> Path:
        """Write the layout for ``weightd plan`` and return its path.

        Args:
            path: The file, or a directory that is to hold ``trainer-<rank>.layout``.
        """
        node = self._attachment.node if self._attachment is not None else ""
        file = LayoutFile(self.rank, self.world, self.describe(), NodeId(node), SlotName(self._slot))
        target = Path(path) / file.name if Path(path).is_dir() else Path(path)
        target.write_bytes(encode_file(file))
        return target

    def _described(self) -> Described:
        source = self._source
        holdings = source if isinstance(source, Holdings) else self._found(source)
        holdings = with_facts(renamed_holdings(holdings, self._renamed), self._facts)
        whose = f"layout of trainer rank {self.rank}"
        if self._live:
            return describe_live(holdings, written_between_steps(source), self._unused, whose)
        return describe_holdings(holdings, self._casts, self._unused, whose)

    def _found(self, source: Source) -> Holdings:
        connect = partial(Exchange, self._identity, "lora", self._deadlines.collect_s)
        with_adapters = lora_holdings(source, self._lora, self._masters, connect)
        if with_adapters is None:
            return chosen_holdings(source, self._adapter, self._masters)
        if isinstance(self._adapter, Megatron):
            raise ConfigError("adapter", "Megatron", "a model with PEFT's adapters says itself what its tensors are")
        if self._adapter is not None:
            refuse_others(source, self._adapter)
        return with_adapters

    def _checked(self) -> Described:
        """Return what is attached, with the checks that reach other ranks."""
        described = self._described()
        if not self._check_replicas:
            return described
        exchange = Exchange(self._identity, "check_replicas", self._deadlines.collect_s)
        replicas = Replicas(described.layout, exchange)
        return replace(described, verify=(*described.verify, replicas.check))

    # ------------------------------------------------------------ life

    def attach(self) -> Self:
        """Make the shared memory, greet the daemon, and wait until the run's ranks are all there and proved.

        Raises:
            DaemonAbsent: No daemon answers on this node.
            Refused: The run is refused; the report holds every violation.
            DeadlinePassed: ``attach_s`` is over.
            LayoutError: This rank's tensors cannot be described.
        """
        if self._attachment is not None and self._attachment.forked:
            self.close()
        if self._attachment is not None:
            return self
        begun = time.monotonic()
        attachment = TrainerAttachment(
            self.run, self._identity, self._checked(), self._roster, self._slot, self._socket, self._deadlines
        )
        try:
            attachment.open(begun + min(_DAEMON_S, self._attach_s))
            attachment.wait_joined(self._attach_s, begun, _REPORT_S)
            self._stepping = stepping_of(attachment, self._optimizer)
        except BaseException as error:
            attachment.end(f"attach failed: {type(error).__name__}")
            raise
        self._attachment = attachment
        return self

    def close(self) -> None:
        """Leave the run in order; harmless when done twice.  What was published stays readable for its readers.

        Live parameters get memory of their own again, by one copy.
        """
        attachment, self._attachment = self._attachment, None
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.close()
        if attachment is not None:
            attachment.end("closed by the trainer")

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ versions

    def publish(self, version: int | None = None, label: object = None) -> Version:
        """Copy this rank's shards into a free slot and publish them; training may go on at once.

        Live parameters are published where they lie: training may go on, and its next step waits.

        Args:
            version: Number of the version; by default ``next_version``.  All ranks publish the same numbers
                in the same order.  A publish that raises over what this rank holds has used its number, as it has
                on the ranks where it does not raise; to repeat it, say the number.
            label: What the trainer calls it, for instance its step; shown by ``weightd status``.

        Returns:
            The number.

        Raises:
            VersionNotGrowing: The number does not grow; says which one would.
            SlotNotFree: No slot became free within ``release_s``.
            RunPaused: The run lacks ranks.
            HoldingsChanged: A parameter is not what was attached.
            NotBetweenSteps: A DeepSpeed engine is in the middle of a step; nothing was read.
            FrozenChanged: A tensor that is declared frozen was written.
            TieBroken: Tensors that are declared tied differ.
            ReplicasDisagree: Ranks hold different bytes where they are replicas (``check_replicas``).
            ExchangeFailed: A rank did not take part in the comparison of replicas, or of LoRA factors, in time.
            NothingToPublish: No adapter is active.
            PeerGone: The daemon is gone for longer than ``restart_s``.
            LiveMemoryWritten: Live parameters were written while the version before was published.
        """
        attachment = self._attached("publish()")
        with attachment.changed:
            key = attachment.ledger.key_for(None if version is None else Version(version))
            number = key.version
        slot = attachment.wait_slot(number, self._deadlines.release_s)
        try:
            attachment.slots.raise_written()
            attachment.slots.fill(slot)
        except BaseException:
            with attachment.changed:
                attachment.ledger.refused(key)
            raise
        with attachment.changed:
            key = attachment.ledger.key_for(number)  # its attempt, as it is known now
            attachment.ledger.published(key)
            attachment.slots.published(slot, key, None if label is None else str(label))
        attachment.tell()
        return number

    def before_step(self) -> None:
        """Return once the parameters may be written; at once unless ``memory="live"``.

        Steps of torch optimizers call it by themselves.  It waits up to ``deadlines.step_wait_s`` for the published
        version to be decided; then it copies the version, says so in the log, and returns once nobody reads the
        parameters any more.

        Raises:
            LiveMemoryWritten: The parameters were written while they were published.
            LiveMemoryRead: The copy is made, and somebody still reads the parameters after ``restart_s``.
            SlotNotFree: The version before is not decided either, after ``release_s``.
            MemoryExhausted: There is no memory for the copy.
            PeerGone: The daemon is gone for longer than ``restart_s``.
        """
        self._attached("before_step()")
        if self._stepping is not None:
            self._stepping.before_step()

    def wait(self, version: int, until: Until = "committed", timeout_s: float | None = None) -> Version:
        """Wait for the outcome of a version; at once if it is decided.

        Args:
            version: The version.
            until: ``committed``: engines may serve it.  ``released``: its slot may be overwritten, which for a
                committed version is when a newer one is committed.
            timeout_s: Limit in seconds; None for none of this wait's own.

        Returns:
            The number.

        Raises:
            Refused: It failed; the report says why, with every cause.
            VersionNotDecided: ``timeout_s`` is over.
            RunPaused: The run lacks ranks.
            PeerGone: The daemon is gone for longer than ``restart_s``.
        """
        self._attached("wait()").wait_outcome(Version(version), until, timeout_s)
        return Version(version)

    @property
    def next_version(self) -> Version:
        """Number of the next publish, unless it is told another."""
        attachment = self._attached("next_version")
        with attachment.changed:
            return attachment.ledger.next_version

    @property
    def committed(self) -> Version:
        """Last committed version of the run; 0 before the first."""
        return self.status.committed.version

    @property
    def status(self) -> PublisherGoal:
        """What the leader said last: stage, version in hand, what it waits for, last commit."""
        attachment = self._attached("status")
        with attachment.changed:
            return attachment.ledger.goal

    @property
    def refusal(self) -> WeightdError | None:
        """Why this rank is no longer part of the run, if so."""
        return self._attachment.refusal if self._attachment is not None else None

    def _attached(self, call: str) -> TrainerAttachment:
        if self._attachment is None:
            raise NotAttached(call, "not attached, or closed")
        if self._attachment.forked:
            raise NotAttached(call, self._attachment.forked)
        return self._attachment
