"""The demo's two runs as processes: what is started, what is waited for, and what is made of what they say."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightd.core.errors import WeightdError, binary_size
from weightd.daemon.children import Children, Heard, Said
from weightd.daemon.cli.demo_sizes import (
    ENGINE,
    ENGINE_NODES,
    ENGINES_DECLARED,
    LEFT_OUT,
    NODES,
    TRAINER_NODES,
    VERSIONS,
    write_sizes,
)
from weightd.daemon.local_nodes import LocalNodes

TRAINERS = tuple(f"trainer-{r}" for r in range(len(TRAINER_NODES)))
ENGINES = tuple(f"{ENGINE}-{k}" for k in range(len(ENGINE_NODES)))
NODE_OF = dict(zip((*TRAINERS, *ENGINES), (*TRAINER_NODES, *ENGINE_NODES), strict=True))

READY_S = 60.0
"""For eight processes to import torch on a small machine."""

DELIVERY_S = 60.0
REFUSAL_S = 30.0
SHOW_S = 0.5
"""Between two looks at what the run is doing."""

STATUS_S = 5.0
ATTACH_S = 5.0
"""The second run's time for all ranks to attach."""


class SceneFailed(Exception):
    """The demo did not come to the end that it is to show; the text says where."""


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        compared: Said by each engine rank about each version: its comparison with the gathered tensors.
        published: Said by each trainer rank about each version.
        versions: Sync records, from the leading daemon's status document.
        refusals: Error of every process of the second run, by process.
        seconds: Of each act.
    """

    compared: dict[str, dict[int, Said]] = field(default_factory=dict)
    published: dict[str, dict[int, Said]] = field(default_factory=dict)
    versions: list[dict[str, Any]] = field(default_factory=list)
    refusals: dict[str, Said] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def delivered(self) -> bool:
        """Whether every engine rank compared every version, and every byte was equal."""
        wanted = set(range(1, VERSIONS + 1))
        return all(
            set(self.compared.get(rank, {})) == wanted and all(said["equal"] for said in self.compared[rank].values())
            for rank in ENGINES
        )

    @property
    def refused(self) -> bool:
        """Whether every process that attached was told that the left-out rank is missing."""
        attached = {name for name in NODE_OF if name != ENGINES[LEFT_OUT]}
        return set(self.refusals) == attached and all("E_RANK_MISSING" in r["codes"] for r in self.refusals.values())


class Scene:
    """The processes of the demo, in one folder."""

    def __init__(
        self, folder: Path, children: Children, tell: Callable[[str], None], show: Callable[[str], None]
    ) -> None:
        """Prepare the scene.

        Args:
            folder: For everything that is written.
            children: Where its processes are to live.
            tell: Takes a line that stays.
            show: Takes a line that the next one replaces: what is going on.
        """
        self._folder = folder
        self._children = children
        self._tell = tell
        self._show = show
        self._nodes: LocalNodes | None = None
        self._run = ""
        self.outcome = Outcome()

    def deliver(self) -> None:
        """Run the first act: three steps, three versions, every byte compared.

        Raises:
            SceneFailed: A process failed, or something took too long.
        """
        write_sizes(self._folder)
        self._tell(f"starting {len(NODES)} daemons, {len(TRAINERS)} trainer ranks and {len(ENGINES)} engine ranks")
        nodes = self._start_daemons("delivery", {})
        for name in NODE_OF:
            self._start_rank(name)
        nodes.wait_until_up(self._children)
        self._tell(f"daemons of nodes {' and '.join(NODES)} are up")
        self._gather("ready", NODE_OF, READY_S, "import torch")
        self._tell("all ranks have imported torch: two trainer ranks and two engine ranks on each node")
        began = time.monotonic()
        self._order(NODE_OF, "delivery", nodes)
        self._gather("finished", NODE_OF, DELIVERY_S, "deliver three versions")
        self.outcome.seconds["delivery"] = time.monotonic() - began
        self.outcome.versions = run_status(nodes, "delivery")["versions"]
        for name in NODE_OF:
            self._children[name].tell({"order": "leave"})
        for name in NODES:
            self._children[nodes.child_name(name)].stop()

    def leave_one_out(self) -> None:
        """Run the second act: the same ranks but one, refused at attach.

        Raises:
            SceneFailed: A process failed, or something took too long.
        """
        nodes = self._start_daemons("refusal", {"attach_s": ATTACH_S})
        nodes.wait_until_up(self._children)
        there = [name for name in NODE_OF if name != ENGINES[LEFT_OUT]]
        self._tell(f"again, without engine rank {ENGINE}[{LEFT_OUT}]; attach_s is {ATTACH_S:.0f}")
        began = time.monotonic()
        self._order(there, "refusal", nodes)
        for heard in self._gather("refused", there, REFUSAL_S, "be refused"):
            self.outcome.refusals[heard.child] = heard.said or {}
        self.outcome.seconds["refusal"] = time.monotonic() - began

    # ------------------------------------------------------------ inside

    def _start_daemons(self, act: str, deadlines: dict[str, float]) -> LocalNodes:
        nodes = LocalNodes(self._folder / act, NODES, deadlines)
        for name in NODES:
            nodes.start(self._children, name)
        return nodes

    def _start_rank(self, name: str) -> None:
        kind, _, number = name.rpartition("-")
        module = "trainer_hooks" if name in TRAINERS else "rollout_hooks"
        argv = [sys.executable, "-m", f"weightd.{module}.demo", "--rank", number, "--folder", str(self._folder)]
        if name in TRAINERS:
            argv += ["--world", str(len(TRAINERS)), "--versions", str(VERSIONS)]
        else:
            argv += ["--engine", kind, "--versions", str(VERSIONS)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._children.start(name, argv, env)

    def _order(self, names: Iterable[str], run: str, nodes: LocalNodes) -> None:
        self._run, self._nodes = run, nodes
        for name in names:
            socket = str(nodes.socket(NODE_OF[name]))
            self._children[name].tell({"order": "run", "run": run, "socket": socket, "engines": ENGINES_DECLARED})

    def _gather(self, event: str, names: Iterable[str], limit_s: float, what: str) -> list[Heard]:
        """Listen until every process of ``names`` said ``event``, and take note of all that they say meanwhile."""
        waiting = set(names)
        out: list[Heard] = []
        end = time.monotonic() + limit_s
        while waiting:
            self._show(f"waiting for {len(waiting)} of {len(NODE_OF)} processes to {what}{self._doing()}")
            heard = self._children.hear(min(end - time.monotonic(), SHOW_S))
            if heard is None:
                if time.monotonic() < end:
                    continue
                raise SceneFailed(f"{', '.join(sorted(waiting))} did not {what} within {limit_s:.0f} s{self._doing()}")
            if heard.said is None:
                self._ended(heard)
            elif heard.said["event"] == event and heard.child in waiting:
                waiting.discard(heard.child)
                out.append(heard)
            else:
                self._note(heard.child, heard.said)
        return out

    def _doing(self) -> str:
        """Return what the run in hand is doing, in the leading daemon's words; nothing while there is none."""
        if self._nodes is None:
            return ""
        try:
            leader = run_status(self._nodes, self._run)["leader"]
        except (WeightdError, KeyError):
            return ""
        if leader is None:
            return ""
        version = f"version {leader['version']} " if leader["version"] else ""
        waiting = f", waiting for {', '.join(leader['waiting_for'])}" if leader["waiting_for"] else ""
        return f" ({version}{leader['stage']} for {leader['age_s']} s{waiting})"

    def _ended(self, heard: Heard) -> None:
        if heard.status == 0:
            return
        tail = self._children[heard.child].log_tail()
        raise SceneFailed(f"{heard.child} ended with status {heard.status}:\n{tail}")

    def _note(self, child: str, said: Said) -> None:
        match said["event"]:
            case "failed":
                raise SceneFailed(f"{child}: {said['text']}")
            case "trained" if child == TRAINERS[0]:
                self._tell(f"step {said['step']} trained, loss {said['loss']:.3f}, {said['seconds']:.1f} s")
            case "published":
                self.outcome.published.setdefault(child, {})[said["version"]] = said
                self._tell_once_whole(self.outcome.published, TRAINERS, said, "published", "by {n} trainer ranks")
            case "compared":
                self.outcome.compared.setdefault(child, {})[said["version"]] = said
                equal = all(r[said["version"]]["equal"] for r in self.outcome.compared.values() if said["version"] in r)
                verdict = "every byte equal" if equal else "BYTES DIFFER"
                text = f"committed, received by {{n}} engine ranks and compared with full_tensor(): {verdict}"
                self._tell_once_whole(self.outcome.compared, ENGINES, said, text, "")
            case _:
                return

    def _tell_once_whole(
        self, seen: dict[str, dict[int, Said]], ranks: tuple[str, ...], said: Said, what: str, by: str
    ) -> None:
        version = said["version"]
        mine = [seen[rank][version] for rank in ranks if version in seen.get(rank, {})]
        if len(mine) < len(ranks):
            return
        nbytes = binary_size(sum(m["nbytes"] for m in mine))
        slowest = max(m["seconds"] for m in mine)
        text = f"{what} {by}".strip().format(n=len(ranks))
        self._tell(f"version {version} {text}; {nbytes}, {slowest:.2f} s on the slowest")


def run_status(nodes: LocalNodes, run: str) -> dict[str, Any]:
    """Return what the leading daemon says of a run."""
    found: dict[str, Any] = nodes.status(TRAINER_NODES[0], STATUS_S)["runs"][run]
    return found
