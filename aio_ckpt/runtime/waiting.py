"""Lines about waits that last: when they are due, and how they are logged.

A blocked thread asks :meth:`WaitWarning.pause_secs` how long it may sleep. A wait on an event loop is watched by
:meth:`WaitWarning.on_loop`, which costs one timer. Neither needs a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.errors import StallError
from aio_ckpt.reports import title
from aio_ckpt.runtime.portal import start_beside_or_here

T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")
FIRST_LINE_SECS = 30.0
"""Duration of a wait when the first line names it. Shorter waits are normal."""


@contextlib.contextmanager
def forgiving_suspension(secs: float, forgive: Callable[[float], object], *, limit_secs: float) -> Iterator[None]:
    """Call ``forgive`` with the seconds by which the block, a wait for at most ``secs``, has ended too late.

    If that is much of ``limit_secs``, the process was suspended (SIGSTOP, Slurm, ``docker pause``): the monotonic clock
    goes on meanwhile. Less is not forgiven. A thread that holds the interpreter again and again makes each wait late.
    """
    began = time.monotonic()
    yield
    late_secs = time.monotonic() - began - secs
    if late_secs > limit_secs / 4:
        forgive(late_secs)


def next_line_secs(waited_secs: float) -> float:
    """Return the duration at which the next line is due: ``FIRST_LINE_SECS``, twice as much, four times, and so on."""
    due = FIRST_LINE_SECS
    while due <= waited_secs:
        due *= 2
    return due


def duration_text(secs: float) -> str:
    """Return a duration for people: seconds below 2 minutes, minutes below 2 hours, else hours."""
    if secs < 120:
        return f"{secs:.0f} s"
    return f"{secs / 60:.0f} min" if secs < 7200 else f"{secs / 3600:.1f} h"


def call_text(call: str, target: object = None) -> str:
    """Return a call in the user's words: "save() of step 200"; without a step or path, "load()"."""
    return f"{call}()" if target is None else f"{call}() of {title(target)}"


class WaitWarning:
    """Warning about a wait that lasts: logged after 30 s, 60 s, 120 s and so on. Progress begins the wait anew."""

    def __init__(
        self,
        describe: Callable[[str], str] | None = None,
        *,
        waited_secs: Callable[[], float] | None = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Begin the wait.

        Args:
            describe: returns the line; gets the duration of the wait as text. None: the caller passes each line.
            waited_secs: returns the seconds since the last progress; None: those since this call.
            step: step that the records name as ``step``; None if there is none.
            rank: rank that the records name as ``rank``; None if it is unknown.
        """
        self._began = time.monotonic()
        self._describe = describe
        self._waited_secs = waited_secs
        self._step = step
        self._rank = rank
        self._due = FIRST_LINE_SECS
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_due(self) -> bool:
        """Whether a line is due now."""
        return self._left_secs() <= 0

    def _waited(self) -> float:
        return time.monotonic() - self._began if self._waited_secs is None else self._waited_secs()

    def _left_secs(self) -> float:
        """Return the seconds until the next line is due, 0 or less if it is due."""
        waited = self._waited()
        if self._due > max(FIRST_LINE_SECS, 2 * waited):  # there was progress since the last line
            self._due = next_line_secs(waited)
        return self._due - waited

    @property
    def is_first(self) -> bool:
        """Whether the next line is the first about this wait."""
        return self._due <= FIRST_LINE_SECS

    def log(self, describe: Callable[[str], str]) -> None:
        """Log a line now, unless it is empty; the next is due when the wait has doubled."""
        waited = self._waited()
        self._due = next_line_secs(waited)
        line = describe(duration_text(waited))
        if line:
            known = {"step": self._step, "rank": self._rank}
            _log.warning("%s", line, extra={name: value for name, value in known.items() if value is not None})

    def pause_secs(self, at_most: float = MAX_SECS) -> float:
        """Log the line if it is due. Return the seconds until the next is due, ``at_most`` at most."""
        left = self._left_secs()
        if left <= 0 and self._describe is not None:
            self.log(self._describe)
            left = self._left_secs()
        return min(at_most, max(0.0, left))

    @contextlib.contextmanager
    def on_loop(self) -> Iterator[None]:
        """Log the lines while the block waits on the running loop."""
        self._look(asyncio.get_running_loop())
        try:
            yield
        finally:
            assert self._timer is not None
            self._timer.cancel()  # drops the callback too, so that no cycle keeps what ``describe`` refers to

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self.pause_secs(), self._look, loop)

    def wait_for(self, futures: Iterable[Future[Any]], timeout_secs: float = MAX_SECS) -> bool:
        """Block until all ``futures`` are done, and log the lines meanwhile; False after ``timeout_secs``."""
        deadline = time.monotonic() + timeout_secs
        for future in futures:  # one by one: Ctrl-C in concurrent.futures.wait() would leave them locked
            while not future.done():
                try:
                    future.exception(self.pause_secs(max(0.0, deadline - time.monotonic())))
                except CancelledError:
                    pass
                except TimeoutError:
                    if time.monotonic() >= deadline:
                        return False
        return True


def disk_warning(
    doing: str, path: Path, *, idle_secs: Callable[[], float] | None = None, rank: int | None = None
) -> WaitWarning:
    """Return the lines about work under ``path``, of a disk or a store, that waits for it.

    ``idle_secs`` returns the seconds since its last progress, which may be older than this wait; None: the work is one
    step.
    """
    began = time.monotonic()
    verb = "has taken" if idle_secs is None else "has made no progress for"
    storage = "store" if "://" in str(path) else "file system"

    def describe(waited: str) -> str:
        return f"{doing} {verb} {waited}: the {storage} of {path} is slow, or does not answer"

    def waited_secs() -> float:
        waited = time.monotonic() - began
        return waited if idle_secs is None else min(waited, idle_secs())

    return WaitWarning(describe, waited_secs=waited_secs, rank=rank)


def call_within(limit_secs: float, call: Callable[[], T], doing: str, path: Path) -> T:
    """Return ``call()``, which looks at ``path``, from a thread of its own, as the disk may hang.

    Raises:
        StallError: the call did not end within ``limit_secs``. The thread is left behind.
    """
    work = start_beside_or_here(call)
    if not disk_warning(doing, path).wait_for([work], limit_secs):
        raise StallError(f"{doing} did not end within {limit_secs} s: the file system of {path} does not answer")
    return work.result()
