"""Every error that a daemon may send to a hook, imported so that a hook raises it as what it is.

``core.errors.error_from_wire`` finds classes by their codes, and a class registers
its code when its module is imported.
"""

from weightd.core.errors import WeightdError, WireError, error_from_wire
from weightd.core.layout import faults as layout_faults
from weightd.core.plan import plan_faults
from weightd.core.plan import violations as plan_violations
from weightd.core.roster import declaration_violations, rank_violations
from weightd.core.roster import violations as roster_violations
from weightd.core.session import faults as session_faults
from weightd.core.wire import faults as wire_faults

KNOWN = (
    layout_faults,
    plan_faults,
    plan_violations,
    declaration_violations,
    rank_violations,
    roster_violations,
    session_faults,
    wire_faults,
)
"""Modules whose classes a daemon's errors may be of."""


def error_from_daemon(wire: WireError) -> WeightdError:
    """Return the error that a daemon sent, of its own class."""
    return error_from_wire(wire)
