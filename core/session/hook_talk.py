"""When a node speaks to its hooks: on every change, and again while a hook's state does not answer its goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightd.core.session.attached import acknowledged
from weightd.core.session.events import TellHook
from weightd.core.session.node_report import steady_goal
from weightd.core.session.view import rank_name
from weightd.core.units import RolloutRank, TrainerRank
from weightd.core.wire.messages import PublisherGoal, ReceiverGoal, Refusal, SlotRelease, TrainerHello

if TYPE_CHECKING:
    from weightd.core.errors import WireError
    from weightd.core.session.attached import Attached, Hook
    from weightd.core.session.events import HookGreeted, NodeEffect, SessionId
    from weightd.core.session.hook_goals import HookGoals, NoLeaderNow
    from weightd.core.wire.messages import Goal


class HookTalk:
    """What is said to the hooks of a node."""

    def __init__(self, attached: Attached, goals: HookGoals) -> None:
        self._attached = attached
        self._goals = goals

    # ------------------------------------------------------------ refusals

    @staticmethod
    def is_refused(event: HookGreeted, goal: Goal | None) -> bool:
        """Whether the leader still refuses an earlier try of this process; then the new one waits for that to end."""
        hello = event.hello
        who = f"trainer {hello.rank}" if isinstance(hello, TrainerHello) else f"{hello.engine}[{hello.k}]"
        return goal is not None and any((who, event.boot) in r.ranks for r in goal.refused)

    def repeat_refusal(self, session: SessionId) -> list[NodeEffect]:
        """Answer a refused hook that still speaks."""
        hook = self._attached.hooks.get(session)
        return [TellHook(session, Refusal(hook.refused))] if hook is not None and hook.refused is not None else []

    def refuse(self, goal: Goal) -> list[NodeEffect]:
        """Tell hooks that the leader refuses them."""
        refused = {rank: r.error for r in goal.refused for rank in r.ranks}
        out: list[NodeEffect] = []
        for hook in self._attached.hooks.values():
            error = refused.get((rank_name(hook.who), hook.boot))
            if hook.held_back:
                hook.held_back = error is not None
            elif error is not None and hook.refused is None:
                out += self._refuse_one(hook, error)
        return out

    def refuse_waiting(self, error: WireError, since: float) -> list[NodeEffect]:
        """Refuse every hook that came at or before ``since``."""
        waiting = [h for h in self._attached.hooks.values() if h.refused is None and h.since <= since]
        return [effect for hook in waiting for effect in self._refuse_one(hook, error)]

    @staticmethod
    def _refuse_one(hook: Hook, error: WireError) -> list[NodeEffect]:
        hook.refused = error
        return [TellHook(hook.session, Refusal(error))]

    # ------------------------------------------------------------ goals

    def tell(self, goal: Goal, lost: NoLeaderNow | None, now: float, *, beat: bool, silence: str) -> list[NodeEffect]:
        """Tell every hook its goal, if there is reason to.

        Args:
            goal: The leader's last one.
            lost: That nobody leads any more.
            now: The time.
            beat: Whether it is time to repeat what is not answered.
            silence: That the leader is silent, in words: told in place of the stage, again with every beat.
        """
        out: list[NodeEffect] = []
        for hook in self._attached.hooks.values():
            body = self._goal_of(hook, goal, lost) if hook.takes_part else None
            if body is not None and silence:
                body = msgspec.structs.replace(body, stage="", waiting_for=silence)
            if body is not None and ((beat and silence) or self._has_reason(hook, body, beat=beat)):
                hook.told, hook.told_at = steady_goal(body), now
                _note_what_it_may_do(hook, body)
                out.append(TellHook(hook.session, body))
        busy = self._goals.busy()
        for r in goal.release:
            if r.key not in busy:
                self._attached.free_ended(TrainerRank(r.rank), SlotRelease(r.slot, r.key))
        return out

    def _goal_of(self, hook: Hook, goal: Goal, lost: NoLeaderNow | None) -> PublisherGoal | ReceiverGoal | None:
        if isinstance(hook.who, RolloutRank):
            return self._goals.receiver(hook, goal, lost)
        return self._goals.publisher(hook, goal, lost)

    @staticmethod
    def _has_reason(hook: Hook, body: PublisherGoal | ReceiverGoal, *, beat: bool) -> bool:
        return steady_goal(body) != hook.told or (beat and not _answered(hook, body))


def _answered(hook: Hook, body: PublisherGoal | ReceiverGoal) -> bool:
    """Whether a hook's state answers its goal; a publisher's never does: it shall hear what its version waits for."""
    if not isinstance(body, ReceiverGoal):
        return False
    return acknowledged(body, hook.receiver) and hook.receiver.plan_digest == body.plan_digest


def _note_what_it_may_do(hook: Hook, body: PublisherGoal | ReceiverGoal) -> None:
    """From here on a hook may read, or overwrite, what it was told."""
    if isinstance(body, PublisherGoal):
        hook.freed = hook.freed | frozenset(body.release)
    elif body.order == "write":
        said = hook.receiver
        if (said.op, said.state, said.key) != (body.op, "applied", body.key):
            hook.told_to_read(body)
