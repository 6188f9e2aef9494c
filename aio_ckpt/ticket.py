"""Result of ``save()``: a :class:`SaveTicket` with :class:`Milestone` s. Any thread and any loop can wait for them.

If a wait is given up (a cancelled await, ``asyncio.timeout``, a timeout), the save goes on. Only
:meth:`SaveTicket.cancel` cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from aio_ckpt.argument_checks import MAX_SECS, check_wait
from aio_ckpt.errors import ConfigError, EngineClosedError, SaveCancelledError, StallError
from aio_ckpt.message_texts import shown
from aio_ckpt.reports import Progress, SaveReport, title
from aio_ckpt.runtime.ctrl_c import new_future

__all__ = ["Milestone", "PendingCall", "SaveTicket", "finish", "resolve_with"]

T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")


class Milestone(Generic[T]):
    """Milestone of a save: staged, committed or mirrored. The save reaches it once, or fails to.

    Invariant: the outcome is set once, by the engine, and never by a waiter. Each await has a private future of
    its own loop, woken by a callback. All waiters of a failure get the same exception object, with the traceback
    that it had when it was set, so that waiting a thousand times does not grow it.
    """

    def __init__(self, name: str, portal_check: Callable[[str], None]) -> None:
        """``name`` is used in errors. ``portal_check(what)`` raises on the engine's threads and in a forked child."""
        self.name = name
        self._check = portal_check
        self._future: Future[T] = new_future()
        self._traceback: TracebackType | None = None
        self._observed = False

    def __repr__(self) -> str:
        return f"<Milestone {self.name}: {self.state}>"

    @property
    def state(self) -> str:
        """State as text: ``pending``, ``reached``, ``cancelled`` or ``failed: <type of the error>``."""
        if not self._future.done():
            return "pending"
        error = self._future.exception()
        if isinstance(error, SaveCancelledError):
            return "cancelled"
        return "reached" if error is None else f"failed: {type(error).__name__}"

    @property
    def observed(self) -> bool:
        """Whether a waiter was given the failure (by ``result``, ``exception`` or an await)."""
        return self._observed

    def done(self) -> bool:
        """Whether the outcome is known; never blocks."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait in this thread, at most ``timeout`` seconds (None: without a limit).

        Raises:
            StallError: the time is over; the save goes on.
            WrongThreadError: the wait would block the engine's own thread for ever. It is not raised once ``done()``.
            EngineForkedError: the save belongs to another process.
            Exception: why the milestone was not reached.
        """
        self._wait(timeout)
        try:
            return self._take()
        finally:
            del self  # as in _take

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like :meth:`result` and return the failure, or None. The caller has then observed it."""
        self._wait(timeout)
        error = self._future.exception()
        self._observed |= error is not None
        return error

    def peek(self) -> BaseException | None:
        """Return the failure if there is one by now. Never waits, and the failure does not count as observed."""
        return self._future.exception() if self._future.done() else None

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in any running loop but the engine's own. Raises what :meth:`result` raises, without the timeout."""
        if not self._future.done():
            self._check(f"await {self.name}")
            yield from self._wait_in_loop().__await__()
        try:
            return self._take()
        finally:
            del self  # as in _take

    def add_done_callback(self, fn: Callable[[Milestone[T]], object]) -> None:
        """Call ``fn(self)`` once the outcome is known: in the thread that sets it, or at once if it is known.

        The thread that sets it is the engine's own, so ``fn`` must not block: all saves stand still meanwhile. If
        ``fn`` raises anything, SystemExit and CancelledError too, the logger ``aio_ckpt`` logs the error, and nothing
        else changes.

        Args:
            fn: function of one argument, this milestone. What it returns is ignored.
        """
        self._future.add_done_callback(lambda _: _call(fn, self))

    def resolve(self, value: T) -> bool:
        """Set the outcome to reached, with ``value``. If there is an outcome, keep it and return False."""
        try:
            self._future.set_result(value)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: BaseException) -> bool:
        """Set the outcome to failed, with ``error``. If there is an outcome, keep it and return False."""
        if not self._future.done():
            self._traceback = error.__traceback__
        try:
            self._future.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def _wait(self, timeout: float | None) -> None:
        check_wait("timeout", timeout)
        if self._future.done():
            return
        self._check(f"waiting for {self.name}")
        try:
            # Does not raise the failure: a TimeoutError from here is the wait's own. No system waits beyond MAX_SECS.
            self._future.exception(None if timeout is None or timeout > MAX_SECS else max(0, timeout))
        except TimeoutError:
            raise StallError(f"{self.name}: not reached within {shown(timeout)} s; it goes on") from None

    async def _wait_in_loop(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(_set_if_pending, waiter)
            except RuntimeError:  # the waiter's loop was closed: nobody waits
                if not loop.is_closed():
                    raise

        self._future.add_done_callback(wake)
        await waiter

    def _take(self) -> T:
        error = self._future.exception()
        if error is None:
            return self._future.result()
        self._observed = True
        try:
            raise error.with_traceback(self._traceback)
        finally:
            del error, self  # the error holds this frame by its traceback, and so would hold itself


class PendingCall(Milestone[T]):
    """Result of a call of the async engine that waits for the disk or for other ranks: ``await engine.latest_step()``.

    The call has begun, in another thread. ``await`` it, or call :meth:`result` in a thread without a loop. If a
    wait is given up, the call goes on. If it is used as a value, a TypeError names ``await``. If nobody waits for it,
    a RuntimeWarning does.
    """

    _was_waited_for = True  # of an instance whose constructor Ctrl-C ended

    def __init__(self, name: str, portal_check: Callable[[str], None], work: Future[T]) -> None:
        """The outcome is that of ``work``."""
        super().__init__(name, portal_check)
        self._was_waited_for = False
        resolve_with(self, work)

    def __await__(self) -> Generator[Any, None, T]:
        self._was_waited_for = True
        return super().__await__()

    def _wait(self, timeout: float | None) -> None:
        self._was_waited_for = True
        super()._wait(timeout)

    def __bool__(self) -> bool:
        raise self._misuse()

    def __eq__(self, other: object) -> bool:
        raise self._misuse()

    def __lt__(self, other: object) -> bool:
        raise self._misuse()

    __le__ = __gt__ = __ge__ = __lt__
    __hash__ = Milestone.__hash__

    def __del__(self) -> None:
        if not self._was_waited_for:
            warnings.warn(f"{self.name} was never awaited: {_AWAIT_IT}", RuntimeWarning, stacklevel=2)

    def _misuse(self) -> TypeError:
        return TypeError(f"{self.name} of the async engine is no value yet: {_AWAIT_IT}")


_AWAIT_IT = "write await in front of the call, or call .result() behind it where no event loop runs"


def _call(fn: Callable[[Milestone[T]], object], milestone: Milestone[T]) -> None:
    """Call ``fn(milestone)``, and log every error. Raised, it would end the thread or the loop that set the outcome."""
    try:
        fn(milestone)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which comes to the main thread alone
        _log.exception("a callback of a finished wait raised, which changes nothing else")


def _set_if_pending(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SaveTicket:
    """Handle of one save in the background. ``await ticket`` is ``await ticket.committed``.

    A skipped save (``when_busy="skip"``) has ``skipped=True``. All milestones are reached, and the report is None.
    """

    def __init__(
        self,
        *,
        step: int,
        path: Path | None = None,
        portal_check: Callable[[str], None],
        cancel: Callable[[], bool] | None = None,
        fence: Callable[[object], None] | None = None,
        progress: Callable[[], Progress] | None = None,
        skipped: bool = False,
        waited_secs: float = 0.0,
    ) -> None:
        """``cancel`` asks the engine to cancel the save. ``fence(stream)`` makes a stream wait for the copies.
        ``progress`` returns the progress of a save that is not finished; it may be called in any thread.
        """
        self.step = step
        """Step that is saved; 0 for a save with ``path=`` and for a file, which have none."""
        self.path = path
        """Directory or file that the caller named; None for a save of a step."""
        self.skipped = skipped
        """Whether the save was not begun because others were pending."""
        self.waited_secs = waited_secs
        """Seconds that ``save()`` waited for pending saves and for memory; ``save_file()``: for pending ones alone."""
        self.staged: Milestone[None] = Milestone(f"staged of {title(path or step)}", portal_check)
        """Reached once everything is copied. The sources may be changed then."""
        self.committed: Milestone[SaveReport | None] = Milestone(f"committed of {title(path or step)}", portal_check)
        """Reached once the checkpoint is durable and visible."""
        self.mirrored: Milestone[Path | None] = Milestone(f"mirrored of {title(path or step)}", portal_check)
        """Reached once the mirror holds a verified copy, whose directory it is; None if this rank makes none: without a
        :class:`Mirror`, on other ranks than 0, and if ``every`` leaves the step out or a later one came first."""
        self._cancel = cancel
        self._fence = fence
        self._read_progress = progress
        self._last_progress = Progress(stage="capture", bytes_done=0, bytes_total=0)
        if skipped:
            self.staged.resolve(None)
            self.committed.resolve(None)
            self.mirrored.resolve(None)
        self.committed.add_done_callback(self._release)

    def __repr__(self) -> str:
        return f"<SaveTicket {title(self.path or self.step)}: {self._state()}>"

    def __await__(self) -> Generator[Any, None, SaveReport | None]:
        return self.committed.__await__()

    @property
    def progress(self) -> Progress:
        """Progress of the save on this rank, in bytes of its data file. Any thread may read it at any time.

        A committed save is ``done``, with all bytes, and so is a skipped one, with none. A failed or cancelled save is
        ``failed``, with the bytes written until then.
        """
        is_finished, read = self.committed.done(), self._read_progress
        now = self._last_progress if read is None else read()
        if not is_finished:
            return now
        return replace(now, stage="done" if self.committed.state == "reached" else "failed")

    def done(self) -> bool:
        """Whether the save is finished: committed, failed, cancelled or skipped."""
        return self.committed.done()

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Wait in this thread until the save is committed. Returns its report; None for a skipped save.

        Args:
            timeout: most seconds to wait; None waits without a limit.

        Raises:
            StallError: the time is over; the save goes on.
            SaveCancelledError: the save was cancelled.
            WrongThreadError: the wait would block the engine's own thread for ever. It is not raised once ``done()``.
            EngineForkedError: the save belongs to another process.
            Exception: why the save failed: WriteError, StallError, PeerFailedError and others.
        """
        return self.committed.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait in this thread until the save is finished. Returns its failure, or None if it was committed or skipped.

        The caller has then observed the failure, so no later ``save()`` or ``close()`` raises it.

        Args:
            timeout: most seconds to wait; None waits without a limit.

        Raises:
            StallError, WrongThreadError, EngineForkedError: as :meth:`result`.
        """
        return self.committed.exception(timeout)

    def cancel(self) -> bool:
        """Ask the engine to cancel the save; False if it is too late.

        A cancelled save never becomes visible, and its outcome is SaveCancelledError.
        """
        cancel = self._cancel
        return cancel is not None and cancel()

    def fence(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream`` (None: the current one) wait for the copies out of guarded tensors.

        Raises:
            ConfigError: ``stream`` is no stream.
        """
        if stream is not None and not isinstance(stream, torch.Stream):
            raise ConfigError(f"fence(stream={shown(stream)}): give a torch.Stream, None for the current one")
        fence = self._fence
        if fence is not None:
            fence(stream)

    def _release(self, _: Milestone[SaveReport | None]) -> None:
        # A trainer may keep its tickets for ever; the callbacks hold the save's state.
        if self._read_progress is not None:
            self._last_progress = self._read_progress()
        self._cancel = self._fence = self._read_progress = None

    def _state(self) -> str:
        if self.skipped:
            return "skipped"
        if self.committed.done():
            return "committed" if self.committed.state == "reached" else self.committed.state
        return "staged" if self.staged.state == "reached" else "pending"


def resolve_with(milestone: Milestone[T], work: Future[T]) -> None:
    """Settle ``milestone`` with the outcome of ``work`` once that is done. Cancelled work means a closed engine."""

    def take(done: Future[T]) -> None:
        error = EngineClosedError("the engine was closed") if done.cancelled() else done.exception()
        if error is None:
            milestone.resolve(done.result())
        else:
            milestone.fail(error)

    work.add_done_callback(take)


def finish(ticket: SaveTicket, outcome: SaveReport | BaseException) -> None:
    """Set the outcome of a save: all milestones fail with an error; a report reaches ``committed``."""
    if isinstance(outcome, BaseException):
        ticket.staged.fail(outcome)
        ticket.committed.fail(outcome)
        ticket.mirrored.fail(outcome)
    else:
        ticket.committed.resolve(outcome)
