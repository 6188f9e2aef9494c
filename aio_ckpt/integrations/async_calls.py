"""``AsyncCallsQueue``: a queue of async calls whose ranks finalize, and fail, in the same poll."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import anyio
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt.checks import check_kind
from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import AioCkptError, PeerFailedError, SaveCancelledError
from aio_ckpt.integrations.async_saves import Committed, Shared
from aio_ckpt.ranks.agreed_work import WORK_STAGE, AgreedWork, Failure, Work
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.store_coordinator import default_coordinator
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Portal

_LEAVE_SECS = 10.0
"""Time that closing waits for the coordinator to leave."""


class AsyncCallsQueue:
    """Queue of async calls, in place of Megatron's or NVRx's.

    Each poll, and each call of any other method, is one of all ranks. A request is done once its save is committed, and
    its ``async_fn``, if it has one, has returned on every rank. All ranks then run its finalize functions in the same
    poll: between polls, training makes collectives, and finalize functions make collectives too. The ranks agree
    through their store, and no poll waits for another rank.

    If a request failed on any rank, the same poll raises the same PeerFailedError on all ranks. The finalize functions
    of that request are not run.

    Args:
        persistent: accepted; no process is started.
        config: ``stall_timeout_secs``, ``thread_nice`` and ``thread_ioprio`` are used.
        shared: resources to share with strategies.
    """

    def __init__(
        self, persistent: bool = True, *, config: EngineConfig | None = None, shared: Shared | None = None
    ) -> None:
        check_kind("config", config, EngineConfig)
        self.persistent = persistent
        self.call_idx = -1
        """Number of the last call, from 0."""
        self._shared = shared or Shared(config or EngineConfig())
        self._calls: deque[_Call] = deque()
        self._members: Membership | None = None
        self._meeting: _Meeting | None = None

    @classmethod
    def warmup_persistent_caller(cls, rank: int, *args: Any, **options: Any) -> None:
        """Do nothing: there is no process to start."""

    def schedule_async_request(self, async_request: Any) -> int:
        """Queue a request, and begin its ``async_fn`` in a thread, behind earlier saves. Return its number.

        ``preload_fn`` is called here.
        """
        self.call_idx += 1
        request = async_request.freeze()
        given = (*request.finalize_fns, *(request.async_fn_args or ()))
        works = [each.future for each in given if isinstance(each, Committed)]
        if request.async_fn is not None:
            args = list(request.async_fn_args)
            if request.preload_fn is not None:
                args[1] = request.preload_fn()
            named = request.async_fn_kwargs or {}
            works.append(self._shared.submit(functools.partial(request.async_fn, *args, **named)))
        self._calls.append(_Call(self.call_idx, request, works, self._met(), self._shared.portal()))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done, in their order. Return their numbers.

        Args:
            blocking: wait for all requests.
            no_dist: accepted; no poll makes a collective.

        Raises:
            PeerFailedError: a request failed; on all ranks alike. It has left the queue. On the rank that failed,
                ``__cause__`` is its error.
            StallError: another rank does not answer.
        """
        finalized = []
        while self._calls and self._calls[0].is_done(blocking=blocking):
            call = self._calls.popleft()
            call.check()
            for finalize in call.request.finalize_fns:
                finalize()
            finalized.append(call.number)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests, and leave the other ranks. The next request meets them again.

        Args:
            abort: forget the requests, and finalize none. A save that has begun may still commit.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._calls.clear()
            members, self._members = self._members, None
            meeting, self._meeting = self._meeting, None
            if members is not None:
                with contextlib.suppress(AioCkptError):
                    self._shared.portal().call(_leave, meeting, members.coordinator, timeout=_LEAVE_SECS)
                members.coordinator.close()

    def _met(self) -> Membership:
        """Return the ranks of this queue. The first call begins to wait for the others, in the background."""
        if self._members is None:
            stall_secs = self._shared.config.stall_timeout_secs
            owner = Owner.of_this_process(uuid.uuid4().hex[:12])
            members = self._members = Membership(default_coordinator(), owner, stall_secs=stall_secs)
            if members.are_several:
                coordinator, name = members.coordinator, "the queue of async calls"
                coordinator.register(name, stall_secs=stall_secs)
                self._meeting = _Meeting(functools.partial(coordinator.open, name, stall_secs=stall_secs))
                members.opened = self._shared.portal().submit(self._meeting.run)
        return self._members


class _Meeting:
    """Meeting of the ranks of a queue. All is called on the loop."""

    def __init__(self, open_: Callable[[], Awaitable[None]]) -> None:
        self._open = open_
        self._scope: anyio.CancelScope | None = None
        self._is_given_up = False
        self._has_ended: Future[None] = Future()

    async def run(self) -> None:
        """Wait for the other ranks; SaveCancelledError if it is given up."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._is_given_up:
                    self._scope.cancel()
                await self._open()
            if self._scope.cancelled_caught:
                raise SaveCancelledError("the queue of async calls was closed before all ranks had met")
        finally:
            self._has_ended.set_result(None)

    async def give_up(self) -> None:
        """End the meeting, unless the ranks have met. Otherwise the next one of another rank would be with this one."""
        self._is_given_up = True
        if self._scope is not None:
            self._scope.cancel()
        await asyncio.wrap_future(follow(self._has_ended))


async def _leave(meeting: _Meeting | None, coordinator: Coordinator) -> None:
    if meeting is not None:
        await meeting.give_up()
    await coordinator.leave()


class _Call:
    """Request in the queue, and its work on this rank."""

    def __init__(
        self, number: int, request: Any, works: Sequence[Future[Any]], members: Membership, portal: Portal
    ) -> None:
        self.number = number
        self.request = request
        self._works = works
        self._agreed = AgreedWork(members, portal, works, name=f"async call {number}", failure_of=_failure_of)

    def is_done(self, *, blocking: bool) -> bool:
        """Count a poll, and return whether the call is done; see :class:`AgreedWork`."""
        return self._agreed.is_done(blocking=blocking)

    def check(self) -> None:
        """Raise the error of the call, if it failed on any rank."""
        failure = self._agreed.failure()
        if failure is None:
            return
        raise PeerFailedError(
            f"async save {self.number} failed on rank {failure.rank}: {failure.text}: it was not finalized, and the "
            "checkpoint before it is the newest",
            rank=failure.rank,
            stage=WORK_STAGE,
            cause=failure.text,
        ) from next(filter(None, map(_error_of, self._works)), None)


def _error_of(work: Work) -> BaseException | None:
    """Return the error of a work that has ended. Of a CheckpointException, return the error of the first rank."""
    error = work.exception() if work.done() else None
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


def _failure_of(work: Work, rank: int) -> Failure | None:
    """Return the failure of a work that has ended on ``rank``. DCP tells all ranks the failures of each."""
    error, whole = _error_of(work), work.exception()
    if error is None:
        return None
    if isinstance(whole, CheckpointException) and whole.failures:
        rank = min(whole.failures)
    return Failure(rank, f"{type(error).__name__}: {error}")
