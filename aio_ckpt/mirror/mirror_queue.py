"""Copies of committed steps in the mirror, in the background: which step is next, one at a time, until it is there.

The newest step is copied first, and one that a newer one overtakes is passed over. Nothing needs a journal: what is to
be copied follows from what the root and the mirror hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.commit import discovery
from aio_ckpt.commit.root_claim import longest_silence
from aio_ckpt.config import EngineConfig, Mirror
from aio_ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    EngineClosedError,
    FormatVersionError,
    ProtectedStepError,
    RootError,
    StallError,
)
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.mirror.copy_step import StepCopier
from aio_ckpt.mirror.pace import Pace, PacedExecutor
from aio_ckpt.remote_path import Place, RemotePath
from aio_ckpt.reports import amount
from aio_ckpt.runtime.ctrl_c import Lock
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import STOP_SECS, Portal
from aio_ckpt.runtime.thread_priority import lower_priority
from aio_ckpt.storage.mounts import OBJECT_STORE
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.ticket import Milestone

_THREADS = 8
"""Four readers, and calls beside them that must not wait: the heartbeat of the claim."""
_NICE, _IOPRIO = 19, 7
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 5.0, 300.0
"""Pause before a copy that failed is tried again. It doubles."""
_FINAL = (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    ProtectedStepError,
)
"""Errors after which a step is not tried again: the root has deleted or damaged it, or the mirror holds another one."""
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True)
class _WantedCopy:
    """A step to be copied."""

    step: int
    mirrored: Milestone[Path | None] | None = None
    """Milestone of its save; None if an earlier engine saved it."""
    replaces: bool = False
    """Whether it replaces another save of the step, also in the mirror."""

    def resolve(self, path: Path | None) -> None:
        if self.mirrored is not None:
            self.mirrored.resolve(path)

    def fail(self, error: BaseException) -> None:
        if self.mirrored is not None:
            self.mirrored.fail(error)


class MirrorQueue:
    """The mirror of one engine, on its leader, with threads of its own."""

    def __init__(
        self,
        root: Path,
        place: Path,
        rule: Mirror,
        config: EngineConfig,
        given: Sequence[Place],
        *,
        is_saving: Callable[[], bool],
    ) -> None:
        """``place`` is the checked path of ``rule``, and ``given`` are the places as the caller gave them.

        While ``is_saving()``, copies go slowly.
        """
        self._given = given
        self._root = root
        self._place = place
        self._rule = rule
        self._config = config
        self._stall_secs = config.stall_timeout_secs + longest_silence(OBJECT_STORE)
        self._pace = Pace(rule.max_bytes_per_sec, is_saving)
        self._portal = Portal(f"aio_ckpt-mirror-{id(self):x}", 1)
        self._lock = Lock()
        self._wanted: _WantedCopy | None = None
        self._copied_now: _WantedCopy | None = None
        self._is_abandoned = False
        """Whether a rollback has abandoned the step that is being copied."""
        self._is_ahead = True
        """Whether the mirror may hold steps that a rollback has abandoned."""
        self._is_rolling_back = False
        self._has_copied = False
        """Whether this engine has seen a copy in the mirror, also one that a rollback has abandoned since."""
        self.is_ready = False
        """Whether :meth:`held_steps` knows what earlier engines have left to be copied."""
        self._is_closing = False
        self._wake = anyio.Event()
        self._moved, self._progress = time.monotonic(), 0
        self._running: Future[None] | None = None
        self._executor: PacedExecutor | None = None
        self.newest: int | None = None
        """Newest step that is known to be in the mirror."""

    def start(self) -> None:
        """Begin with the newest step that the root holds.

        Raises:
            ConfigError: the store of the mirror cannot be opened.
            SystemLimitError: the system gives no thread.
        """
        with self._portal.opening():
            self._executor = PacedExecutor(
                self._portal.name, _THREADS, self._pace, functools.partial(lower_priority, _NICE, _IOPRIO)
            )
            storage = AnyStorage(self._executor, given=self._given)
            if isinstance(self._place, RemotePath):
                storage.store_of(self._place)  # raises ConfigError now, if it cannot be opened
            copier = StepCopier(
                storage=storage,
                executor=self._executor,
                root=self._root,
                place=self._place,
                names=StepNames(self._config.step_dir),
                keep_last=self._rule.keep_last,
                stale_after_secs=self._config.stale_after_secs,
            )
            self._running = self._portal.submit(self._run, copier)

    # -- calls of the engine --------------------------------------------------------------------------

    def check_thread(self, what: str) -> None:
        """Raise WrongThreadError on a thread of the mirror, on which a copy would wait for itself."""
        self._portal.check_thread(what)

    def offer(self, step: int, mirrored: Milestone[Path | None], *, replaces: bool) -> None:
        """Copy a step that was committed, in the place of an older one that waits. Call this before it may expire."""
        if step % self._rule.every:
            mirrored.resolve(None)
            return
        with self._lock:
            passed, self._wanted = self._wanted, _WantedCopy(step, mirrored, replaces)
            if passed is not None and passed.step > step:
                passed, self._wanted = self._wanted, passed
            newer = self._wanted.step
        if passed is not None:
            _log.warning("step %d is not copied to %s: step %d came before its turn", passed.step, self._place, newer)
            passed.resolve(None)
        self._portal.post(self._notify)

    def go_back(self, step: int) -> None:
        """Note that a rollback has abandoned the steps after ``step``: set them aside in the mirror, too.

        One that waits is not copied. One that is being copied may come to the mirror before.
        """
        with self._lock:
            self._is_ahead = True
            self._is_abandoned |= self._copied_now is not None and self._copied_now.step > step
            if self.newest is not None and self.newest > step:
                self.newest = None
            dropped = self._wanted if self._wanted is not None and self._wanted.step > step else None
            if dropped is not None:
                self._wanted = None
        if dropped is not None:
            dropped.fail(CheckpointNotFoundError(f"step {dropped.step} is not copied: rollback({step}) abandoned it"))
        self._portal.post(self._notify)

    def held_steps(self) -> set[int]:
        """Return the steps that retention has to keep: the one that is being copied, and the next one."""
        with self._lock:
            return {wanted.step for wanted in (self._copied_now, self._wanted) if wanted is not None}

    @property
    def activity(self) -> str:
        """What is being done, for a log line; '' if nothing is."""
        if self._is_rolling_back:
            return f"the rollback of {self._place}"
        wanted = self._copied_now or self._wanted
        return "" if wanted is None else f"the copy of step {wanted.step} to {self._place} ({amount(self._progress)})"

    def finish(self) -> list[Future[None]]:
        """Copy what is wanted, once more if that failed, and end. Return what is to be waited for."""
        self._is_closing = True
        self._pace.lift()
        self._portal.post(self._notify)
        return [] if self._running is None else [self._running]

    def close(self) -> None:
        """End now. What is not copied is logged, and the next engine with this mirror goes on."""
        self._is_closing = True
        self._pace.lift()
        self._portal.close(STOP_SECS)
        if self._executor is not None:
            self._executor.close(STOP_SECS)
        for wanted in (self._copied_now, self._wanted):
            if wanted is not None:
                text = "step %d is not copied to %s: the next engine with this mirror copies the newest step"
                _log.error(text, wanted.step, self._place)
                wanted.fail(EngineClosedError(f"the engine was closed before step {wanted.step} was copied"))
        self._copied_now = self._wanted = None

    # -- on the loop of the mirror --------------------------------------------------------------------

    def _notify(self) -> None:
        self._wake.set()

    async def _run(self, copier: StepCopier) -> None:
        await self._find_first(copier)
        pause_secs = 0.0
        while True:
            has_work = self._is_ahead or self._wanted is not None
            with anyio.move_on_after(pause_secs if has_work else None):
                if not self._is_closing and (pause_secs or not has_work):
                    await self._wake.wait()
            self._wake = anyio.Event()
            is_done = False
            with contextlib.suppress(Exception):  # of a handler of the log, or of a callback of the milestone
                if self._is_ahead:
                    is_done = await self._roll_back(copier)
                elif (wanted := self._take_wanted()) is not None:
                    is_done = await self._copy(copier, wanted)
                elif self._is_closing:
                    return
                else:
                    continue
            pause_secs = 0.0 if is_done else min(max(2 * pause_secs, _FIRST_PAUSE_SECS), _LONGEST_PAUSE_SECS)

    def _take_wanted(self) -> _WantedCopy | None:
        with self._lock:
            wanted, self._wanted = self._wanted, None
            self._copied_now, self._is_abandoned = wanted, False
        return wanted

    async def _find_first(self, copier: StepCopier) -> None:
        """Want the newest step that an earlier engine has left, unless this one has committed a step meanwhile."""
        try:
            found = await discovery.discover(copier.storage, copier.root, copier.names)
            steps = [checkpoint.step for checkpoint in found if checkpoint.step % self._rule.every == 0]
            with self._lock:
                if steps and self._wanted is None:
                    self._wanted = _WantedCopy(steps[-1])
        except Exception as error:  # noqa: BLE001 - the saves of this engine are copied all the same
            _log.warning("%s: what is to be copied to %s is unknown: %s", self._root, self._place, error)
        finally:
            self.is_ready = True

    async def _roll_back(self, copier: StepCopier) -> bool:
        """Set aside in the mirror what rollbacks have abandoned. If that fails, try again, unless the engine closes."""
        self._is_ahead, self._is_rolling_back = False, True
        try:
            with anyio.fail_after(self._stall_secs):
                await copier.set_abandoned_aside()
        except Exception as error:  # noqa: BLE001 - whatever it is, training and later copies go on
            self._is_ahead = not self._is_closing
            text = "%s: steps that a rollback has abandoned are still there, and come back if %s is lost: %s"
            _log.warning(text, self._place, self._root, error)
            return False
        finally:
            self._is_rolling_back = False
        return True

    async def _copy(self, copier: StepCopier, wanted: _WantedCopy) -> bool:
        """Copy a step. If that fails, want it again, unless a newer one waits or the engine is closing."""
        began, self._progress = time.monotonic(), 0
        self._moved = began
        try:
            path = await self._while_it_moves(copier, wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is, training and later copies go on
            with self._lock:
                self._copied_now = None
                is_final = self._is_abandoned or isinstance(error, _FINAL)
                is_last = is_final or self._is_closing or self._wanted is not None
                if not is_last:
                    self._wanted = wanted
            if is_last:
                wanted.fail(error)
            is_busy = isinstance(error, RootError) and error.errno == errno.EBUSY  # a dropped engine copies there
            is_left = not is_last or wanted.mirrored is None  # to a later try, or to the engine that saved it
            level = logging.INFO if is_busy and is_left else logging.WARNING
            _log.log(level, "step %d was not copied to %s: %s", wanted.step, self._place, error)
            return False
        self._has_copied = True
        with self._lock:
            self._copied_now = None
            if not self._is_abandoned:
                self.newest = max(wanted.step, self.newest or 0)
        wanted.resolve(path)
        if self._progress:
            secs = time.monotonic() - began
            _log.info("step %d is in %s: %s in %.1f s", wanted.step, path, amount(self._progress / 2), secs)
        return True

    async def _while_it_moves(self, copier: StepCopier, wanted: _WantedCopy) -> Path:
        """Return the copy of a step. Raises StallError if no byte moves for too long."""
        step, path = wanted.step, None

        async def copy() -> None:
            nonlocal path
            path = await copier.copy(step, self._advance, replaces=wanted.replaces, is_known=self._has_copied)
            watch.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as watch:
                watch.start_soon(copy)
                while (left_secs := self._moved + self._stall_secs - time.monotonic()) > 0:  # noqa: ASYNC110 - threads move it
                    await anyio.sleep(left_secs)
                raise StallError(f"the copy of step {step} to {self._place} has not moved for {self._stall_secs:g} s")
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        assert path is not None, "only the end of the copy ends the watch without an error"
        return path

    def _advance(self, nbytes: int) -> None:
        """Count bytes, in the thread that copied them, which waits here, or on the loop, which read them back."""
        self._moved = time.monotonic()
        self._progress += nbytes
        self._pace.pay(nbytes)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._pace.wait(gives_way=True)
