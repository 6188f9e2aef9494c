"""Saves in the background, and a queue of async calls whose ranks finalize, and fail, in the same poll."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import SharedResources
from aio_ckpt.dcp.install_handle import Installed
from aio_ckpt.dcp.stager import plan_staging
from aio_ckpt.errors import AioCkptError, PeerFailedError
from aio_ckpt.ranks.failure import Failure, work_failure
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.polls import AgreedWork, Work
from aio_ckpt.ranks.store_coordinator import default_coordinator
from aio_ckpt.runtime.ctrl_c import Lock, new_future
from aio_ckpt.runtime.futures import follow, outcome_of, run_cancellable
from aio_ckpt.runtime.portal import STOP_SECS, Portal
from aio_ckpt.runtime.thread_priority import lower_priority

T = TypeVar("T")

_LEAVE_SECS = 10.0
"""Time that closing waits for the coordinator to leave."""
_log = logging.getLogger("aio_ckpt")


class CommitWait:
    """Commit of a save, in the request that a queue gets: a finalize function, or an argument of ``async_fn``.

    A queue of ours waits for it before it calls a finalize function. A call waits too.
    """

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __call__(self) -> None:
        """Return once the checkpoint is committed. Raise the error of the save."""
        self.future.result()


class SaverResources:
    """Memory, threads and process group. Each opens at its first use, and again if it is used after :meth:`close`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.resources = SharedResources(config)
        """Threads and memory of the writers, the readers and the stager."""
        self._lock = Lock()
        self._portal: Portal | None = None
        self._groups: tuple[Any, dict[Any, Any]] = (None, {})
        """A world, and the groups of ours in it, by the group that has the same ranks."""

    def portal(self) -> Portal:
        """Return the portal. Its loop agrees with the other ranks; its one I/O thread saves, in the order of the calls.

        One thread only, because every rank must make the collectives of two saves in the same order.
        """
        with self._lock:
            if self._portal is None or self._portal.is_closed:
                config = self.config
                begin = functools.partial(lower_priority, config.thread_nice, config.thread_ioprio)
                portal = Portal(f"aio_ckpt-calls-{uuid.uuid4().hex[:8]}", 1, begin)
                with portal.opening():
                    self._portal = portal
            return self._portal

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call ``work`` in the thread, behind earlier work."""
        return self.portal().executor.submit(work)

    def saved_now(self, save: Callable[[], None], path: str | os.PathLike[str]) -> Future[None]:
        """Call ``save`` in this thread, behind earlier work, as there is no memory for a copy. Return its outcome."""
        _log.warning(
            "%s: saved before training goes on, as budget_bytes holds no copy of the state: raise budget_bytes "
            "where there is memory",
            path,
        )
        self.submit(lambda: None).result()  # the collectives of earlier saves come first, as on other ranks
        return outcome_of(save, (Exception, CheckpointException))  # the latter is no Exception

    def group(self, like: Any = None) -> Any:
        """Return a gloo group that only the thread uses, with all ranks, or those of the group ``like``.

        Its ranks make the first call together. Without a process group, this returns None.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return None
        world = dist.group.WORLD
        if self._groups[0] is not world:
            self._groups = (world, {})
        groups, like = self._groups[1], None if like is world else like
        if like not in groups:
            ranks = None if like is None else dist.get_process_group_ranks(like)
            groups[like] = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
        return groups[like]

    def copies(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of ``tensors`` in staging memory; None if ``budget_bytes`` cannot hold them."""
        with self.resources.running("a save") as resources:
            staging = plan_staging(resources, {"tensors": tensors})
            return staging.copied(resources)["tensors"] if staging.fits else None

    def close(self) -> None:
        """End the threads behind the work that was submitted, and free the memory behind its last user."""
        with self._lock:
            portal, self._portal = self._portal, None
        if portal is not None and not portal.is_closed:
            portal.executor.submit(lambda: None).exception()
            portal.close(STOP_SECS)
        self.resources.close()


class AsyncCallsQueue:
    """Queue of async calls, in place of Megatron's or NVRx's.

    Each poll, and each call of any other method, is one of all ranks. A request is done once its save is committed, and
    its ``async_fn``, if it has one, has returned on every rank. All ranks then run its finalize functions in the same
    poll: between polls, training makes collectives, and finalize functions make collectives too. The ranks agree
    through their store, and no poll waits for another rank.

    If a request failed on any rank, the same poll raises the same PeerFailedError on all ranks. The finalize functions
    of that request are not run.

    Args:
        persistent, is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: ignored: no process is started.
        config: ``stall_timeout_secs``, ``thread_nice`` and ``thread_ioprio`` are used.
        shared: resources to share with strategies.
    """

    shared: ClassVar[SaverResources | None] = None
    """Resources of the queues of this class. None: each has its own, unless it is given some."""
    queues: ClassVar[list[weakref.ref[Any]]] = []
    """Queues, in the order in which they were made, which is the same on all ranks."""

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        config: EngineConfig | None = None,
        shared: SaverResources | None = None,
    ) -> None:
        check_kind("config", config, EngineConfig)
        self.persistent = persistent
        self.call_idx = -1
        """Number of the last call, from 0."""
        self._shared = shared or self.shared or SaverResources(config or EngineConfig())
        self._calls: deque[_Call] = deque()
        self._members: Membership | None = None
        self._given_up: Future[None] = new_future()
        """Done once the meeting of the ranks, if they have not met yet, is given up."""
        self.queues.append(weakref.ref(self))

    @classmethod
    def get_instances(cls) -> list[Any]:
        """Return the queues that are alive. NVRx closes them for an in-process restart."""
        return [queue for each in cls.queues if (queue := each()) is not None]

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        **options: Any,
    ) -> None:
        """Do nothing: there is no process to start."""

    def schedule_async_request(self, async_request: Any) -> int:
        """Queue a request, and begin its ``async_fn`` in a thread, behind earlier saves. Return its number.

        ``preload_fn`` is called here.
        """
        self.call_idx += 1
        request = async_request.freeze()
        given = (*request.finalize_fns, *(request.async_fn_args or ()))
        works = [each.future for each in given if isinstance(each, CommitWait)]
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
            if members is not None:
                self._given_up.set_result(None)
                with contextlib.suppress(AioCkptError):
                    self._shared.portal().call(_leave, members, timeout=_LEAVE_SECS)
                members.coordinator.close()

    def _met(self) -> Membership:
        """Return the ranks of this queue. The first call begins to wait for the others, in the background."""
        if self._members is None:
            stall_secs = self._shared.config.stall_timeout_secs
            owner = Owner.of_this_process()
            members = self._members = Membership(
                default_coordinator("queues of async calls"), owner, stall_secs=stall_secs
            )
            self._given_up = new_future()
            if members.are_several:
                coordinator, name = members.coordinator, "the queue of async calls"
                coordinator.register(name, stall_secs=stall_secs)
                meet = functools.partial(coordinator.open, name, stall_secs=stall_secs)
                members.opened = self._shared.portal().submit(run_cancellable, self._given_up, meet)
        return self._members


async def _leave(members: Membership) -> None:
    """Leave the other ranks, once their meeting has ended: else the next one of another rank would be with this one."""
    await asyncio.wrap_future(follow(members.opened))
    await members.coordinator.leave()


class _Call(AgreedWork):
    """Request in the queue, and its work on this rank."""

    def __init__(
        self, number: int, request: Any, works: Sequence[Future[Any]], members: Membership, portal: Portal
    ) -> None:
        super().__init__(members, portal, works, name=f"async call {number}")
        self.number = number
        self.request = request

    def failure_of(self, work: Work) -> Failure | None:
        """Return the failure of a work that has ended. DCP tells all ranks the failures of each."""
        error, whole = _error_of(work), work.exception()
        if isinstance(whole, CheckpointException) and whole.failures and error is not None:
            return work_failure(error, min(whole.failures))
        return super().failure_of(work)

    def check(self) -> None:
        """Raise the error of the call, if it failed on any rank."""
        failure = self.failure()
        if failure is None:
            return
        raise PeerFailedError(
            f"async save {self.number} failed on rank {failure.rank}: {failure.cause}: it was not finalized, and the "
            "checkpoint before it is the newest",
            rank=failure.rank,
            stage=failure.stage,
            cause=failure.cause,
        ) from next(filter(None, map(_error_of, self._works)), None)


def _error_of(work: Work) -> BaseException | None:
    """Return the error of a work that has ended. Of a CheckpointException, return the error of the first rank."""
    error = work.exception() if work.done() else None
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


class QueueInstalled(Installed, ABC):
    """Handle of an ``install()``. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._shared = SaverResources(config)

    @abstractmethod
    def _queues(self) -> Iterable[AsyncCallsQueue]:
        """Return the queues that may hold pending calls."""

    def uninstall(self) -> None:
        """Finalize what is pending, and put the library's own back. Idempotent. Call it on all ranks."""
        try:
            for queue in self._queues():
                queue.close()
        finally:
            super().uninstall()
            self._shared.close()
