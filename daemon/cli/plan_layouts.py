"""The ``--layouts`` half of ``weightd plan``: proof and plans of a roster from exported layouts, without a daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from weightd.core.errors import Refused, Story, WeightdError, some
from weightd.core.layout.columns import Layout
from weightd.core.layout.faults import MalformedLayout
from weightd.core.layout.files import LayoutFile, decode_file, layout_file_name
from weightd.core.plan.explain import PlanSummary, explain_plan, summarize
from weightd.core.plan.planner import plan_node
from weightd.core.plan.proof import prove_coverage
from weightd.core.roster.topology import Topology
from weightd.core.units import NodeId, RolloutRank, TrainerRank

BUCKET_LIMIT_BYTES = 32 << 20
"""Largest bucket where nothing else is said: the daemon's own default."""


@dataclass(eq=False)
class LayoutFilesMissing(WeightdError):
    """Ranks of the roster whose layouts are not in the folder.

    Attributes:
        directory: The folder.
        expected: Files that the roster asks for.
        found: Those of them that are there; ``found`` and the missing ones add up to ``expected``.
        missing: Names of the others.
    """

    code: ClassVar[str] = "E_LAYOUT_FILES"
    directory: str
    expected: int
    found: int
    missing: tuple[str, ...]

    def story(self) -> Story:
        """Return the text; it names the files."""
        return Story(
            what=f"{len(self.missing)} of {self.expected} layouts are missing in {self.directory}: {self.found} found",
            which=some(self.missing),
            effect="nothing was proved or planned",
            next="export them with Publisher.export_layout and Receiver.export_layout",
        )


@dataclass(eq=False)
class LayoutFileOfAnother(WeightdError):
    """A layout file whose content is of another rank, or of a run of another size, than its name and the roster say.

    Attributes:
        file: Name of the file.
        expected: Rank and size by name and roster.
        found: Rank and size that the file states.
    """

    code: ClassVar[str] = "E_LAYOUT_FILE_RANK"
    file: str
    expected: str
    found: str

    def story(self) -> Story:
        """Return the text; it compares both."""
        return Story(
            what=f"{self.file} holds the layout of {self.found}, expected {self.expected}",
            effect="nothing was proved or planned",
            next="export the layouts again from the run that the roster describes",
        )


@dataclass(eq=False)
class LayoutFileUnreadable(WeightdError):
    """A layout file that is there and cannot be read.

    Attributes:
        file: Its path.
        why: What the system says.
    """

    code: ClassVar[str] = "E_LAYOUT_FILE_READ"
    file: str
    why: str

    def story(self) -> Story:
        """Return the text."""
        return Story(
            what=f"layout file {self.file} cannot be read: {self.why}",
            effect="nothing was proved or planned",
            next="let this user read the file, or export the layout again",
        )


def plan_layouts(topology: Topology, directory: Path, bucket_limit_bytes: int = BUCKET_LIMIT_BYTES) -> PlanSummary:
    """Return proof and plans of all nodes in numbers.

    Args:
        topology: The judged roster.
        directory: Folder with ``trainer-<r>.layout`` and ``<engine>-<k>.layout`` of every rank of it.
        bucket_limit_bytes: Largest bucket.

    Raises:
        Refused: Files are missing, cannot be read or are of other ranks, or coverage is refused; all violations.
        BudgetError: The bucket limit is too small for an element.
    """
    trainers, rollouts = read_layouts(topology, directory)
    proof = prove_coverage(topology, trainers, rollouts)
    plans = {NodeId(n): plan_node(proof, n, bucket_limit_bytes) for n in topology.nodes}
    return summarize(proof, plans)


def read_layouts(topology: Topology, directory: Path) -> tuple[list[Layout], dict[RolloutRank, Layout]]:
    """Return the layouts of all ranks of a topology from a folder of exported ones.

    Raises:
        Refused: Holds every fault of every file.
    """
    ranks: list[TrainerRank | RolloutRank] = [TrainerRank(r) for r in range(len(topology.trainers))]
    ranks.extend(topology.rollout_ranks())
    paths = {who: directory / layout_file_name(who) for who in ranks}
    faults: list[WeightdError] = []
    missing = tuple(path.name for path in paths.values() if not path.is_file())
    if missing:
        faults.append(LayoutFilesMissing(str(directory), len(paths), len(paths) - len(missing), missing))
    files: dict[TrainerRank | RolloutRank, LayoutFile] = {}
    for who, path in paths.items():
        if path.name in missing:
            continue
        try:
            files[who] = _read(topology, who, path)
        except WeightdError as error:
            faults.append(error)
    if faults:
        raise Refused(f"layouts in {directory}", tuple(faults), "nothing was proved or planned")
    trainers = [files[TrainerRank(r)].layout for r in range(len(topology.trainers))]
    return trainers, {r: files[r].layout for r in topology.rollout_ranks()}


def _read(topology: Topology, who: TrainerRank | RolloutRank, path: Path) -> LayoutFile:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LayoutFileUnreadable(str(path), error.strerror or str(error)) from None
    try:
        file = decode_file(data)
    except MalformedLayout as error:
        raise MalformedLayout(f"{path.name}: {error.why}") from error
    size = len(topology.engines[who.engine]) if isinstance(who, RolloutRank) else len(topology.trainers)
    if file.who != who or file.size != size:
        raise LayoutFileOfAnother(path.name, _named(who, size), _named(file.who, file.size))
    return file


def _named(who: TrainerRank | RolloutRank, size: int) -> str:
    return f"{who} of {size}" if isinstance(who, RolloutRank) else f"trainer rank {who} of {size}"


def layouts_document(summary: PlanSummary) -> dict[str, Any]:
    """Return what ``--json`` adds under ``plan``: bytes per link and per rank, buckets, peak memory."""
    document: dict[str, Any] = msgspec.to_builtins(summary)
    return document


def layouts_text(summary: PlanSummary) -> str:
    """Return the same as a text for people."""
    return explain_plan(summary)
