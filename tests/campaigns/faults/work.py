"""Faults inside the process: work in the I/O threads that dies, hangs or falls short, steps of tasks, memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import aio_ckpt
from aio_ckpt.engine import failed_save, state_pipeline
from aio_ckpt.errors import AioCkptError, EngineClosedError, SaveCancelledError, StallError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.leaves import objects as encoding
from aio_ckpt.memory import arena, arena_lifetimes
from aio_ckpt.runtime import portal
from aio_ckpt.snapshot import capture as snapshot
from aio_ckpt.snapshot import image
from aio_ckpt.write import writer as write
from tests.campaigns.faults.campaign import PASSING_SECS, STALL_SECS, Point, cancel_now
from tests.campaigns.faults.clock import Clock
from tests.campaigns.faults.ground import WAIT_SECS, Ground, Outcome, explain, small_chunks

__all__ = [
    "cancelled_steps",
    "dying_work",
    "hanging_work",
    "memory_in_growth",
    "memory_in_save",
    "memory_in_stages",
    "short_writes",
    "shut_down_executors",
]

_PACKAGE = str(Path(aio_ckpt.__file__).parent)
_KEPT = ("pending/", "trash/")
_UNGUARDED = {"Lease.release", "Lease._end_if_unused", "LifetimeManager._give_back"}
"""Callbacks of futures, which swallow what they raise: documented, the buffer stays lent until the engine is closed."""
Work = Callable[..., Any]


class Nth:
    """Says at which call something is to happen."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._lock = threading.Lock()
        self.was_reached = False
        """Whether there were so many calls."""

    def __call__(self) -> bool:
        """Count a call; True for the one."""
        with self._lock:
            self._left -= 1
            self.was_reached |= not self._left
            return not self._left


@contextlib.contextmanager
def _ground(folder: Path, *, saves: int = 2, **config: Any) -> Iterator[Ground]:
    with small_chunks(), contextlib.closing(Ground(folder, **config)) as ground:
        for _ in range(saves):
            ground.keep(ground.save())
        yield ground


def _judged(
    ground: Ground,
    name: str,
    outcome: Outcome,
    wrong: str | None,
    leftovers: tuple[str, ...] = (),
    *,
    may_show: bool = False,
) -> Point:
    """The point: what is ``wrong`` with the error, then look, save once more, look again.

    With ``may_show`` a commit that could be neither finished nor undone may be visible, whole, as documented.
    """
    problems: list[str] = []
    if outcome.error is None:
        ground.keep(outcome)
    elif wrong is not None:
        problems.append(f"{wrong}: {explain(outcome.error)}")
    elif ground.shows(outcome):
        ground.keep(outcome)
        if not may_show:
            problems.append(f"the step is visible, though its save failed: {explain(outcome.error)}")
    problems += ground.look(leftovers=leftovers)
    again = ground.save()
    if again.error is None:
        ground.keep(again)
    else:
        problems.append(f"the next save failed: {explain(again.error)}")
    problems += [f"after the next save: {text}" for text in ground.look(leftovers=leftovers)]
    return Point(name=name, problems=tuple(problems))


# -- work in threads --------------------------------------------------------------------------------


@contextlib.contextmanager
def _work(change: Callable[[Work], Work]) -> Iterator[None]:
    """Every function that is given to an I/O thread goes through ``change``."""
    submit = portal.Executor.submit

    def changed(self: portal.Executor, fn: Work, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(self, change(fn), *args, **kwargs)

    with mock.patch.object(portal.Executor, "submit", changed):
        yield


def dying_work(folder: Path, *, stride: int = 1) -> Iterator[Point]:
    """The n-th piece of work of a save raises ``SystemExit``, which ends a thread that does not hold it."""
    with _ground(folder) as ground:
        for number in itertools.count(1, stride):
            nth = Nth(number)

            def dies(fn: Work, nth: Nth = nth) -> Work:
                def die(*_: object) -> None:
                    raise SystemExit("the thread is told to die")

                return die if nth() else fn

            with _work(dies):
                outcome = ground.save()
            if not nth.was_reached:
                return
            error = outcome.error
            is_told = isinstance(error, AioCkptError) and isinstance(error.__cause__, SystemExit) and error.stage
            wrong = None if is_told else "the thread's death is not told"
            yield _judged(ground, f"work {number} of a save dies", outcome, wrong, _KEPT if error is None else ())


def hanging_work(folder: Path) -> Iterator[Point]:
    """The n-th piece of work hangs in the system until its save was given up, then it goes on."""
    with Clock() as clock, mock.patch.object(failed_save, "THREAD_WAIT_SECS", 0.05):
        for number in itertools.count(1):
            with _ground(folder / str(number), saves=1, stall_timeout_secs=STALL_SECS) as ground:
                clock.drive(ground.engine)
                nth, goes_on = Nth(number), threading.Event()

                def hangs(fn: Work, nth: Nth = nth, goes_on: threading.Event = goes_on, on: Ground = ground) -> Work:
                    def hang(*args: object) -> object:
                        on.engine._portal.post(clock.advance, PASSING_SECS)
                        goes_on.wait(WAIT_SECS)
                        return fn(*args)

                    return hang if nth() else fn

                with _work(hangs):
                    outcome = ground.save(settles=False)
                    goes_on.set()
                    ground.settle()
                if not nth.was_reached:
                    return
                wrong = None if isinstance(outcome.error, StallError) and outcome.error.stage else "no stall is told"
                yield _judged(ground, f"work {number} of a save hangs", outcome, wrong, _KEPT, may_show=True)


def shut_down_executors(folder: Path, *, stride: int = 1) -> Iterator[Point]:
    """The engine's threads are shut down under the n-th piece of work: another engine goes on."""
    for number in itertools.count(1, stride):
        with _ground(folder / str(number), saves=1) as ground:
            nth = Nth(number)

            def ends(fn: Work, nth: Nth = nth, on: Ground = ground) -> Work:
                def end(*args: object) -> object:
                    for executor in (on.executor, on.engine._portal.executor):
                        executor.shutdown(wait=False)
                    return fn(*args)

                return end if nth() else fn

            with _work(ends):
                outcome = ground.save()
            if not nth.was_reached:
                return
            is_told = isinstance(outcome.error, EngineClosedError | SaveCancelledError)
            ground.reopen()
            wrong = None if is_told or outcome.error is None else "the end of the threads is not told"
            yield _judged(ground, f"threads end at work {number}", outcome, wrong, _KEPT, may_show=True)


def short_writes(folder: Path) -> Iterator[Point]:
    """The n-th write, of the image or of a small file, moves only half of its bytes: it is continued."""
    with _ground(folder) as ground:
        for number in itertools.count(1):
            nth = Nth(number)
            with (
                mock.patch.object(os, "pwritev", functools.partial(_shortened, os.pwritev, nth)),
                _short_small_files(nth),
            ):
                outcome = ground.save()
            if not nth.was_reached:
                return
            yield _judged(ground, f"write {number} falls short", outcome, "a short write failed the save")


def _shortened(
    pwritev: Callable[..., int], nth: Nth, number: int, views: list[memoryview], offset: int, flags: int
) -> int:
    """Write half of the pages of the n-th write."""
    is_short = len(views[0]) > PAGE_BYTES and nth()
    return pwritev(number, [views[0][: _half(views[0])]] if is_short else views, offset, flags)


def _half(data: memoryview) -> int:
    return len(data) // 2 // PAGE_BYTES * PAGE_BYTES or PAGE_BYTES


@contextlib.contextmanager
def _short_small_files(nth: Nth) -> Iterator[None]:
    class Short(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[: len(data) // 2] if nth() else data)

    opens = Path.open

    def open_short(self: Path, mode: str = "r", buffering: int = -1, *rest: Any) -> Any:
        return Short(self, "x") if (mode, buffering) == ("xb", 0) else opens(self, mode, buffering, *rest)

    with mock.patch.object(Path, "open", open_short):
        yield


# -- steps of tasks ---------------------------------------------------------------------------------


class _Counted:
    """Awaits a coroutine and calls ``on_step`` before each of its steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_step: Callable[[], object]) -> None:
        self._coroutine = coroutine
        self._on_step = on_step

    def __await__(self) -> Generator[Any, Any, Any]:
        advance, given = self._coroutine.send, None
        while True:
            self._on_step()
            try:
                wanted = advance(given)
            except StopIteration as end:
                return end.value
            try:
                advance, given = self._coroutine.send, (yield wanted)
            except BaseException as error:  # noqa: BLE001 - a cancellation is the coroutine's to handle
                advance, given = self._coroutine.throw, error


@contextlib.contextmanager
def _steps(ground: Ground, on_step: Callable[[], object]) -> Iterator[None]:
    """``on_step`` is called before each step of each task that begins meanwhile on the engine's loop."""
    loop = ground.engine._portal._loop
    assert loop is not None

    async def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _Counted(coroutine, on_step)

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(run(coroutine), loop=loop, **kwargs)
        task.add_done_callback(lambda _: coroutine.close())  # of one that was cancelled before it began
        return task

    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def cancelled_steps(folder: Path, *, stride: int = 1) -> Iterator[Point]:
    """``ticket.cancel()`` at the n-th step of any task of a save."""
    with _ground(folder) as ground:
        for number in itertools.count(1, stride):
            nth, accepted = Nth(number), list[bool]()

            def on_step(nth: Nth = nth, accepted: list[bool] = accepted) -> None:
                if nth():
                    accepted.extend(cancel_now(ground.engine))

            with _steps(ground, on_step):
                outcome = ground.save()
            if not nth.was_reached:
                return
            if any(accepted):
                wrong = None if isinstance(outcome.error, SaveCancelledError) else "the cancellation is not told"
            else:
                wrong = "it failed without a reason"
            point = _judged(ground, f"cancelled at step {number}", outcome, wrong)
            if any(accepted) and outcome.error is None:
                point = Point(name=point.name, problems=(*point.problems, "cancelled, yet committed"))
            yield point


# -- memory -----------------------------------------------------------------------------------------


def _memory_points(
    folder: Path,
    places: tuple[tuple[Any, str], ...],
    error: Callable[[], BaseException],
    *,
    saves: int,
    most: int | None,
) -> Iterator[Point]:
    for owner, name in places:
        for number in itertools.islice(itertools.count(1), most):
            with _ground(folder / f"{name}-{number}", saves=saves, staging="shm") as ground:
                nth, real = Nth(number), getattr(owner, name)

                def fails(*args: Any, nth: Nth = nth, real: Work = real, **kwargs: Any) -> Any:
                    if nth():
                        raise error()
                    return real(*args, **kwargs)

                with mock.patch.object(owner, name, fails):
                    outcome = ground.save()
                if not nth.was_reached:
                    break
                is_told = isinstance(outcome.error, MemoryError) or getattr(outcome.error, "errno", 0) == errno.ENOMEM
                wrong = None if is_told else "no lack of memory is told"
                yield _judged(ground, f"{type(error()).__name__} at call {number} of {name}", outcome, wrong)


def memory_in_growth(folder: Path, *, most: int | None = None) -> Iterator[Point]:
    """No memory while an arena is made: by Python's own allocator, and by the system's.

    Args:
        most: calls that fail of each function; None: all.
    """
    places = ((mmap, "mmap"), (os, "posix_fallocate"))
    refusal = functools.partial(OSError, errno.ENOMEM, os.strerror(errno.ENOMEM))
    yield from _memory_points(folder / "system", places, refusal, saves=0, most=most)
    python: tuple[tuple[Any, str], ...] = (
        (mmap, "mmap"),
        (arena, "_populate"),
        (arena_lifetimes, "Lease"),
        (arena_lifetimes, "map_arena"),
        (image, "Image"),
        (image, "Future"),
    )
    yield from _memory_points(folder / "python", python, MemoryError, saves=0, most=most)


def memory_in_stages(folder: Path, *, most: int | None = None) -> Iterator[Point]:
    """No memory in a stage of a cached save; ``most`` as in :func:`memory_in_growth`."""
    places: tuple[tuple[Any, str], ...] = (
        (snapshot.Capture, "issue"),
        (snapshot.Capture, "check_sources"),
        (encoding.ObjectEncoder, "encode"),
        (write.ChunkPreparer, "prepare"),
        (state_pipeline, "render_metadata_file"),
        (state_pipeline, "render_rank"),
        (state_pipeline, "render_root"),
    )
    yield from _memory_points(folder, places, MemoryError, saves=2, most=most)


def memory_in_save(folder: Path, *, start: int = 1, stride: int = 1) -> Iterator[Point]:
    """No memory at the n-th call of a function of the package that ``save()`` makes on the caller's thread."""
    with _ground(folder, keep_last=3) as ground:
        for number in itertools.count(start, stride):
            nth = Nth(number)
            where = ""

            def watch(frame: FrameType, event: str, _: object, nth: Nth = nth) -> None:
                nonlocal where
                name = frame.f_code.co_qualname
                is_ours = event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)
                if is_ours and name not in _UNGUARDED and nth():
                    where = name
                    raise MemoryError(where)

            outcome = ground.save(profile=watch)
            if not nth.was_reached:
                return
            wrong = None if isinstance(outcome.error, MemoryError) else "no lack of memory is told"
            yield _judged(ground, f"MemoryError at call {number}: {where}", outcome, wrong)
