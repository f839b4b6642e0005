"""What a node knows of a run, in one place: its machine turns it, others only look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightd.core.session.attached import Attached
    from weightd.core.session.following import Following
    from weightd.core.session.landing import Landing
    from weightd.core.session.node_plans import NodePlans
    from weightd.core.session.node_records import NodeRecords
    from weightd.core.units import NodeId, RunName, Version


@dataclass(slots=True)
class NodeParts:
    """One run on one node.

    Attributes:
        following: Whom it follows.
        attached: Its hooks.
        landing: Its bytes from other nodes.
        plans: Its plans.
        records: Its journal.
        highest: Highest version that it was ever told of.
    """

    run: RunName
    node: NodeId
    following: Following
    attached: Attached
    landing: Landing
    plans: NodePlans
    records: NodeRecords
    highest: Version
