"""Changes of the committed checkpoints that all ranks agree on: ``rollback()``, ``delete()`` and ``remove()``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aio_ckpt.argument_checks import check_flag
from aio_ckpt.commit import step_numbers
from aio_ckpt.engine.call_lock import CallLock
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.engine.root_session import RootSession, StepsChange
from aio_ckpt.errors import BusyError, EngineClosedError, PeerFailedError
from aio_ckpt.mirror.mirror_queue import MirrorQueue
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.remote_path import check_place
from aio_ckpt.rescue.hooks import Rescue
from aio_ckpt.runtime.deadline import NO_DEADLINE
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.ticket import Milestone

_CHANGE: Exchange[tuple[str, bool], tuple[str, StepsChange]] = Exchange(
    tuple[str, bool], tuple[str, StepsChange], stage="agree"
)
"""A rank sends its call and whether it has pending saves; the leader replies with the busy ranks and the change."""
_DELETED: Exchange[None, None] = Exchange(None, None, stage="agree")
"""The leader tells that it has deleted the files of a step."""


@dataclass(slots=True, kw_only=True, eq=False)
class AgreedChanges:
    """Caller's half of the calls that remove checkpoints. The leader changes the root, and the other ranks wait."""

    ctx: EngineContext
    call_lock: CallLock
    portal: Portal
    root_session: RootSession
    queue: JobQueue
    earlier_run: EarlierRun
    rescue: Rescue
    mirror_queue: MirrorQueue | None
    """What copies steps to the mirror; None without a mirror, and on other ranks than the leader."""

    def rollback(self, step: int) -> list[int]:
        """See ``CheckpointEngine.rollback``."""
        self.call_lock.check("rollback()")
        with self.call_lock.mutex:
            topic = Topic("rollback", self.queue.next_number("rollback"))
            gone = self._change_steps("rollback", topic, step, self.root_session.abandon_steps_after)
            self.earlier_run.go_on()
            self.rescue.give_up(f"rollback({step}) went back behind it", after=step)
            if self.mirror_queue is not None:
                self.mirror_queue.go_back(step)
            return gone

    def delete(self, step: int, *, allow_newest: bool) -> None:
        """See ``CheckpointEngine.delete``. Blocks."""
        self.call_lock.check("delete()")
        with self.call_lock.mutex:
            topic = Topic("delete", self.queue.next_number("delete"))
            self._change_steps("delete", topic, step, self.root_session.discard, allow_newest=allow_newest)
        self._delete_files(step, Topic(f"the deletion of the files of step {step}", part=f"call {topic.number}"))

    def _change_steps(
        self, kind: str, topic: Topic, step: int, change: Callable[..., StepsChange], **flags: bool
    ) -> list[int]:
        """Change the committed steps on all ranks: the leader does it if no rank has a pending save; the others wait.

        ``kind`` names the call, and the ranks meet under ``topic``. ``change`` gets the step and ``flags``. Returns the
        steps that are gone.
        """
        members = self.ctx.members
        coordinator, timeout_secs, what = members.coordinator, members.reply_limit_secs, f"{kind}()"
        try:
            members.await_met(NO_DEADLINE)
            step = step_numbers.check_step_number(step)
            for name, flag in flags.items():
                check_flag(name, flag)
            call = f"{kind}({', '.join([str(step), *(f'{name}=True' for name, flag in flags.items() if flag)])})"
            mine = call, bool(self.queue.pending_count)
            asked = self.portal.call(_CHANGE.gather, coordinator, topic, mine, timeout=timeout_secs, what=what)
            busy = _busy_ranks(asked, call)
            changed: StepsChange = (None, [])
            if members.is_leader and not busy:
                self.root_session.check_holds_steps(call)  # first: a mistyped root stays as it is
                self.root_session.become_writer(NO_DEADLINE)
                self.queue.steps.forget()  # a change that fails midway has renamed some steps
                changed = change(step, **flags)
            busy, (newest, gone) = self.portal.call(
                _CHANGE.broadcast, coordinator, topic, [(busy, changed)], timeout=timeout_secs, what=what
            )
        except BaseException as error:
            self._send_refusal(topic, error)
            raise
        coordinator.end_call(topic)
        if busy:
            whose = f"saves of rank {busy}" if len(asked) != 1 else "saves"
            raise BusyError(
                f"{kind}({step}): {whose} are pending; await their tickets first (error.ticket, if save() raised)"
            )
        self.queue.steps.change(newest)
        members.newest_step = newest
        return gone

    def _delete_files(self, step: int, topic: Topic) -> None:
        """Delete the files of a step that was renamed: the leader does it, and the others wait. Saves go on."""
        members = self.ctx.members
        try:
            if members.is_leader:
                self.root_session.delete_discarded(step)
            done = functools.partial(_DELETED.broadcast, members.coordinator, topic, [None])
            self.portal.call(done, timeout=members.reply_limit_secs, what="delete()")
        except BaseException as error:
            self._send_refusal(topic, error)
            raise
        members.coordinator.end_call(topic)

    def remove(self, path: object) -> Milestone[None]:
        """See ``CheckpointEngine.remove``."""
        self.call_lock.check("remove()")
        members, session = self.ctx.members, self.root_session
        with self.call_lock.mutex:
            number = self.queue.next_number("remove")
            try:
                self.queue.check_open()
                members.await_met(NO_DEADLINE)
                place = check_place("path", path)
                session.check_outside_root(place, NO_DEADLINE)
                if members.is_leader:
                    session.become_writer(NO_DEADLINE)
                return self.queue.remove(place, number)
            except BaseException as error:
                self._send_refusal(Topic("remove", number), error)
                raise

    def _send_refusal(self, topic: Topic, error: BaseException) -> None:
        """Tell the other ranks that this rank takes no part in the call of ``topic``."""
        with contextlib.suppress(EngineClosedError):
            self.portal.submit(self.ctx.members.refuse, topic, error)


def _busy_ranks(asked: Sequence[tuple[str, bool]], call: str) -> str:
    """Describe the ranks that have pending saves, which forbid a change of the steps; '' if there is none."""
    for rank, (other, _) in enumerate(asked):
        if other != call:
            text = f"rank {rank} calls {other} where rank 0 calls {call}"
            raise PeerFailedError(f"{text}: give the same step on every rank", rank=rank, stage="agree")
    return ", ".join(str(rank) for rank, (_, is_busy) in enumerate(asked) if is_busy)
