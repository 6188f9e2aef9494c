"""Fail the n-th call of the storage for n = 1, 2, 3 ... until a run passes untouched, and look at what is left."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_ckpt import CheckpointEngine
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import AioCkptError, ReadError, RootError, SaveCancelledError, StallError, WriteError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.root_names import CLAIM_FILE, LOCK_FILE, PENDING_DIR, TRASH_DIR
from aio_ckpt.storage.os_errors import DISK_FULL
from tests.campaigns.faults.clock import Clock
from tests.campaigns.faults.ground import Ground, Outcome, explain, is_state, small_chunks, state_of
from tests.campaigns.faults.store import CALLS, ERRORS, SYNCS, Call, Fault

__all__ = ["FAULTS", "LOADS", "SAVES", "Loading", "Point", "Saving", "cancel_now", "load_points", "save_points"]

STALL_SECS = 2.0
"""Of engines whose calls hang: only the few that the caller's own thread waits for really take so long."""

PASSING_SECS = 1000.0
"""Longer than every deadline."""

_RENAMES = frozenset({"rename", "replace"})
_CLEARED = (f"{PENDING_DIR}/dead", f"{TRASH_DIR}/dead", f"{TRASH_DIR}/step_000000007", LOCK_FILE)

FAULTS: tuple[Fault, ...] = (
    *(Fault(name=errno.errorcode[code], code=code) for code in ERRORS),
    Fault(name="fsync fails once", code=errno.EIO, counts=SYNCS, is_late=True),
    Fault(name="rename fails", code=errno.EIO, counts=_RENAMES),
    Fault(name="all calls fail from here on", code=errno.EIO, is_lasting=True),
    Fault(name="slow", is_slow=True, counts=CALLS - {"lock"}),
    Fault(name="cancel"),
)
"""What happens to a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One fault at one place."""

    name: str
    """Scenario, fault, number and call."""
    problems: tuple[str, ...]
    """What was lost, kept or told wrongly; none: survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A kind of save that is made to fail."""

    name: str
    """In the report."""
    is_fresh: bool = False
    """Each fault meets an engine and a root of its own."""
    overwrites: bool = False
    """The newest step is replaced."""
    has_leftovers: bool = False
    """A dead writer left a pending directory and trash in the root."""
    config: tuple[tuple[str, Any], ...] = ()
    """Settings of the engine."""


SAVES = (
    Saving(name="first save", is_fresh=True),
    Saving(name="first save beside leftovers", is_fresh=True, has_leftovers=True),
    Saving(name="later save", config=(("staging", "shm"),)),
    Saving(name="save with retention", config=(("keep_last", 2),)),
    Saving(name="overwrite", overwrites=True),
)


# -- saves ------------------------------------------------------------------------------------------


def save_points(folder: Path, saving: Saving, fault: Fault, *, start: int = 1, stride: int = 1) -> Iterator[Point]:
    """Every point of a fault in a kind of save, or from ``start`` on one of ``stride``."""
    with small_chunks(), Clock() as clock, contextlib.ExitStack() as stack:
        for number in itertools.count(start, stride):
            if number == start or saving.is_fresh:
                stack.close()
                ground = stack.enter_context(_ground(folder / str(number), saving, fault, clock))
            point = _strike(ground, saving, fault, number, clock)
            if point is None:
                return
            yield point


@contextlib.contextmanager
def _ground(root: Path, saving: Saving, fault: Fault, clock: Clock) -> Iterator[Ground]:
    limits = {"stall_timeout_secs": STALL_SECS} if fault.is_slow else {}
    if saving.has_leftovers:
        _leave(root)
    ground = Ground(root, **{**dict(saving.config), **limits})
    clock.drive(ground.engine)
    try:
        if not saving.is_fresh:
            for _ in range(3):
                ground.keep(ground.save())
        yield ground
    finally:
        ground.close()


def _leave(root: Path) -> None:
    """What a dead writer leaves: a pending directory, and trash."""
    for name in (f"{PENDING_DIR}/dead-1", f"{TRASH_DIR}/step_000000007"):
        (root / name).mkdir(parents=True)
        (root / name / data_file_name("dead-1", 0)).write_bytes(bytes(100))


def _strike(ground: Ground, saving: Saving, fault: Fault, number: int, clock: Clock) -> Point | None:
    """One save with its call ``number`` failing, then one without; None if it has no such call."""
    accepted: list[bool] = []

    def on_hit() -> None:
        if fault.is_slow:
            clock.advance(PASSING_SECS)
        elif not fault.code:
            accepted.extend(cancel_now(ground.engine))

    ground.storage.arm(fault, number, on_hit)
    outcome = ground.save(overwrite=saving.overwrites)
    hit = ground.storage.disarm()
    if hit is None:
        return None
    decision = Decision(ground, fault, outcome, hit, was_cancelled=any(accepted))
    problems = decision.problems()
    if fault.is_slow and saving.overwrites:
        decision.other_saves = True  # documented: nothing is called on a store that stands still
    kept = decision.leftovers
    if saving.has_leftovers and outcome.error is not None:
        kept += ("pending/dead", "trash/")  # cleared when the engine becomes the writer
    problems += ground.look(leftovers=kept, other_saves=decision.other_saves)
    again = ground.save(overwrite=saving.overwrites)  # else each point adds a step, and with it calls
    if again.error is not None:
        problems.append(f"the next save failed: {explain(again.error)}")
    else:
        ground.keep(again)
    after = ground.look(leftovers=decision.leftovers, other_saves=decision.other_saves)
    problems += [f"after the next save: {text}" for text in after]
    return Point(name=f"{saving.name}, {fault.name}, {number}: {hit}", problems=tuple(problems))


def cancel_now(engine: CheckpointEngine) -> list[bool]:
    """What ``ticket.cancel()`` of each pending save does, at this very instant."""
    answers: list[bool] = []
    for save in engine._queue.pending(WriteJob):
        try:
            save.cancel().send(None)
        except StopIteration as answer:
            answers.append(bool(answer.value))
    return answers


class Decision:
    """Whether a save that met a fault ended as it must."""

    def __init__(self, ground: Ground, fault: Fault, outcome: Outcome, hit: Call, *, was_cancelled: bool) -> None:
        self._ground = ground
        self._fault = fault
        self._outcome = outcome
        self._hit = hit
        self._was_cancelled = was_cancelled
        self.leftovers: tuple[str, ...] = ()
        """Beginnings of names that may stay, as documented."""
        self.other_saves = False
        """Names that may stay in a checkpoint, as documented."""
        final = ground.root / f"step_{outcome.step:09d}"
        self._was_durable = _is_durable(ground.storage.done[: ground.storage.done_at_hit], final)
        """Whether the checkpoint was committed when the fault came."""
        self._was_clearing = hit.name != "lock" and _below(ground.root, hit.path).startswith(_CLEARED)
        """Whether it came while a dead writer's leftovers were cleared."""
        self._was_claiming = (
            _below(ground.root, hit.path) == CLAIM_FILE and hit.name == "write_file" and fault.code in DISK_FULL
        )
        """Whether the disk was full at the claim: on a local disk, the lock alone excludes others then."""
        began = [call.name for call in ground.storage.done[: ground.storage.done_at_hit]]
        self._was_looking = hit.name == "list_dir" and hit.path == ground.root and "lock" not in began
        """Whether it came while the new engine looked for an earlier run: the save reads the steps under its lock."""

    def problems(self) -> list[str]:
        """What is wrong with how it ended; a success is kept."""
        error = self._outcome.error
        if self._was_durable or self._fault.is_lasting:
            # What a commit replaces, an expired step, what a broken disk holds: logged, cleared by a later engine.
            self.leftovers = ("pending/", "trash/", *_expired(self._ground))
            self.other_saves = True
        if self._was_clearing:  # documented: logged, the next holder of the lock tries again
            self.leftovers += ("pending/dead", "trash/")
        if error is None:
            self._ground.keep(self._outcome)
            if self._was_clearing or self._was_looking or self._was_claiming:
                return []
            if self._was_durable or (not self._fault.code and not self._fault.is_slow and not self._was_cancelled):
                return []
            return ["the save succeeded, though a call failed before it was durable"]
        if self._was_durable:
            return [f"the save failed, though it was durable: {explain(error)}"]
        found = [*self._wrong_error(error), *self._retried()]
        if isinstance(error, AioCkptError) and error.in_doubt:  # documented: it may become visible, whole
            self.leftovers += ("pending/",)
            self.other_saves = True
            if self._shows():
                self._ground.keep(self._outcome)
        return found

    def _shows(self) -> bool:
        """Whether the step holds what was saved, whole."""
        return self._ground.shows(self._outcome)

    def _wrong_error(self, error: BaseException) -> Iterator[str]:
        """Type, errno, path and stage."""
        hit, fault = self._hit, self._fault
        if fault.is_slow:
            if not isinstance(error, StallError) or not error.stage:
                yield f"a slow call ended as {explain(error)}"
            return
        if not fault.code:
            if not isinstance(error, SaveCancelledError) or not self._was_cancelled:
                yield f"cancelled: {explain(error)}"
            return
        if not isinstance(error, WriteError | ReadError | RootError):
            yield f"type: {explain(error)}"
            return
        named = [call for call in self._ground.storage.struck if error.filename == str(call.path)]
        if error.errno != fault.code or not named:
            yield f"errno and path: {explain(error)}, not {fault.code} and {hit.path}"
            return
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != fault.code:
            yield f"its cause is lost: {error.__cause__!r}"
        if error.stage not in [self._stage(call) for call in named]:
            yield f"stage: {explain(error)}, not that of {named[0]}"

    def _stage(self, failed: Call) -> str:
        """By what had been called: a write begins with the save's own directory, a commit with the root manifest."""
        begun = self._ground.storage.begun
        before = begun[: begun.index(failed) + 1]
        if any(call.name == "write_file" and call.path.match("aio_ckpt.*.json") for call in before):
            return "commit"
        own = Path(PENDING_DIR).name
        return "write" if any(call.name == "make_dir" and call.path.parent.name == own for call in before) else "open"

    def _retried(self) -> Iterator[str]:
        """After a failed fsync its pages may be gone though the next one succeeds: never again on the same file."""
        hit, begun = self._hit, self._ground.storage.begun
        later = begun[begun.index(hit) + 1 :]
        undone = next((index for index, call in enumerate(later) if call.name in _RENAMES), len(later))
        if self._fault.code and hit.name in SYNCS and hit in later[:undone]:  # an undone rename is synced anew
            yield f"{hit} was tried again"


def _is_durable(done: Sequence[Call], final: Path) -> bool:
    replaced = [index for index, call in enumerate(done) if call.name == "replace" and call.path == final / ".metadata"]
    if replaced and Call("sync_dir", final) in done[replaced[-1] :]:
        return True
    places = [index for index, call in enumerate(done) if call.name in _RENAMES and call.path == final]
    return bool(places) and Call("sync_dir", final.parent / PENDING_DIR) in done[places[-1] :]  # after the root's


def _below(root: Path, path: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else ""


def _expired(ground: Ground) -> tuple[str, ...]:
    last = ground.config.keep_last
    return () if last is None else tuple(f"step_{step:09d}" for step in sorted(ground.committed)[:-last])


# -- loads ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A way to read that is made to fail."""

    name: str
    """In the report."""
    run: Callable[[Ground], object]
    """Reads the newest checkpoint; returns its state."""


def _load(ground: Ground) -> object:
    target = state_of(0)
    report = ground.engine.load(target, None, strict=False, allow_missing=False, fallback=True).result(60)
    if report.skipped or report.step != max(ground.committed):
        raise AssertionError(f"it took step {report.step} and skipped {report.skipped}")
    return target


def _read(ground: Ground) -> object:
    return ground.engine.read(None, only=None).result(60)


LOADS = (Loading(name="load", run=_load), Loading(name="read", run=_read))


def load_points(folder: Path, loading: Loading, fault: Fault) -> Iterator[Point]:
    """Every point of a fault in a way to read."""
    with small_chunks(), contextlib.closing(Ground(folder)) as ground:
        for _ in range(2):
            ground.keep(ground.save())
        for number in itertools.count(1):
            ground.storage.arm(fault, number)
            problems: list[str] = []
            try:
                state = loading.run(ground)
            except Exception as error:  # noqa: BLE001 - to be judged
                problems += _wrong_read_error(error, ground.storage.struck, fault)
            else:
                hit = ground.storage.hit
                if hit is not None and hit.name != "close_read":
                    problems.append("it succeeded")
                if not is_state(state, ground.committed[max(ground.committed)]):
                    problems.append("it returned something else")
            hit = ground.storage.disarm()
            ground.settle()
            if hit is None:
                return
            problems += ground.look()
            if not is_state(loading.run(ground), ground.committed[max(ground.committed)]):
                problems.append("the next one returned something else")
            yield Point(name=f"{loading.name}, {fault.name}, {number}: {hit}", problems=tuple(problems))


def _wrong_read_error(error: Exception, struck: Sequence[Call], fault: Fault) -> Iterator[str]:
    if not isinstance(error, ReadError):
        yield f"type: {explain(error)}"
    elif error.errno != fault.code or error.filename not in [str(call.path) for call in struck]:
        yield f"errno and path: {explain(error)}"
