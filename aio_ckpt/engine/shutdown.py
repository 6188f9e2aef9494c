"""Shutdown of an engine: pending saves are finished, cancelled or reported, then all resources are released."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import anyio

from aio_ckpt.engine.job import Job, WriteJob
from aio_ckpt.engine.job_queue import MAX_CALLS, JobQueue, raise_failure
from aio_ckpt.errors import EngineForkedError, StallError
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.exit_status import fail_at_exit
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import start_beside_or_here
from aio_ckpt.runtime.waiting import WaitWarning

_log = logging.getLogger("aio_ckpt")


@contextlib.contextmanager
def log_if_second_to(error: BaseException | None) -> Iterator[None]:
    """Raise an error of the block, or only log it if ``error`` of the training loop came first."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        if isinstance(second, EngineForkedError):  # a fork that leaves the block, as by sys.exit(), has no saves
            return
        # A failed save was logged when it failed, so one line says that nobody will see this error raised.
        _log.error("a save failed while the trainer was failing: %s", named(second))
        _log.debug("where", exc_info=True)


class Shutdown:
    """The ways to end an engine.

    Each first lets no more save enter, and at the end releases all resources, which is idempotent. If Ctrl-C ends the
    wait, nothing is released: pending saves go on and are drained at interpreter exit.
    """

    def __init__(
        self,
        queue: JobQueue,
        *,
        background: Callable[[], Iterable[Future[Any]]],
        agreements: Callable[[], Iterable[str]],
        copying: Callable[[], str],
        release: Callable[[], None],
        restore: Callable[[], None],
        drain_secs: float,
    ) -> None:
        """``background`` returns the other work that must end. It begins before its save finishes.

        ``agreements`` names the work of all ranks, in the background, that has not ended; ``copying`` the copy to the
        mirror, '' if there is none. ``release`` may wait for the disk. ``restore`` restores signal handlers, which
        needs the main thread. ``drain_secs``: longest wait for pending saves at interpreter exit.
        """
        self._queue = queue
        self._background = background
        self._agreements = agreements
        self._copying = copying
        self._release = release
        self._restore = restore
        self.drain_secs = drain_secs

    async def finish(self) -> None:
        """Wait for pending saves and release. Raises the failure of a save that nobody awaited, once."""
        with self._warning("close").on_loop():
            for work in self._begin():
                await asyncio.wrap_future(follow(work))
            for work in self._background():
                await asyncio.wrap_future(follow(work))
            try:
                await asyncio.wrap_future(start_beside_or_here(self._release))
            finally:
                self._restore()
        self._raise_unreported()

    async def leave(self, error: BaseException | None) -> None:
        """Do :meth:`finish` at the end of an ``async with``, even if the task is cancelled. ``error`` ended the block.

        An engine that stayed open would hold its root until the process ends.
        """
        cancelled: asyncio.CancelledError | None = None
        with log_if_second_to(error), anyio.CancelScope(shield=True):
            while True:
                try:
                    await self.finish()
                    break
                except asyncio.CancelledError as again:
                    cancelled = again
        if cancelled is not None:
            raise cancelled

    def finish_blocking(self) -> None:
        """Do :meth:`finish` for a caller without a loop."""
        warning = self._warning("close")
        warning.wait_for(self._begin())
        warning.wait_for(self._background())
        self._release_here()
        self._raise_unreported()

    def finish_forsaken(self, give_way: Callable[[], None]) -> None:
        """Do :meth:`finish` for an engine that nobody refers to. ``give_way`` is called once its saves have ended.

        If a save failed that nobody heard of, the process ends with status 1.
        """
        warning = self._warning("close")
        warning.wait_for(self._begin())
        if self._queue.take_unreported(MAX_CALLS) is not None:  # it was logged when it failed
            fail_at_exit()
        try:
            give_way()
            warning.wait_for(self._background())
        finally:
            self._release_here()

    def abandon(self, timeout_secs: float) -> None:
        """Cancel pending saves and release.

        A save that does not end within ``timeout_secs`` is logged and left behind.
        """
        self._begin()
        for job in self._queue.pending(WriteJob):
            try:
                job.ticket.cancel()
                job.ticket.exception(timeout_secs)
            except StallError as error:
                _log.error("terminate(): the save of %s does not end: %s", job.title, error)
        self._release_here()

    def drain(self) -> None:
        """Wait at most ``drain_secs``, log the steps that are lost, and release. Called at interpreter exit.

        If a step is lost, or a save failed that nobody heard of, the process ends with status 1.
        """
        deadline, warning = time.monotonic() + self.drain_secs, self._warning("sys.exit")
        pending = self._queue.pending(WriteJob)
        try:
            warning.wait_for(self._begin(), self.drain_secs)
            warning.wait_for(self._background(), deadline - time.monotonic())
        finally:  # also after Ctrl-C: the lost steps are logged in any case
            late = [job for job in pending if not job.finished.done()]
            if late:
                steps = [job.step for job in late if job.step is not None]
                lost = ", ".join([f"steps {steps}"] * bool(steps) + [job.title for job in late if job.step is None])
                _log.error("interpreter exit: %s were not committed in drain_timeout_secs, or before Ctrl-C", lost)
            for name in self._agreements():
                _log.error("interpreter exit: other ranks did not end in drain_timeout_secs: %s", name)
            if late or self._queue.take_unreported(MAX_CALLS) is not None:
                fail_at_exit()
            self._release_here()

    def _warning(self, call: str) -> WaitWarning:
        return self._queue.wait_warning(call, others=self._waits_for)

    def _waits_for(self) -> str:
        """Return what is waited for beside saves; '' if it is deletions."""
        for name in self._agreements():
            return f"other ranks: {name}"
        return self._copying()

    def _release_here(self) -> None:
        try:
            self._release()
        finally:
            self._restore()

    def _raise_unreported(self) -> None:
        failed = self._queue.take_unreported(MAX_CALLS)
        if failed is not None:
            raise_failure(failed)

    def _begin(self) -> list[Future[None]]:
        self._queue.close()
        return [job.finished for job in self._queue.pending(Job)]
