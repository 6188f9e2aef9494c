"""Faults in what is done beside saves: verify, protect, rollback, delete, setting damage aside, and short reads."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from aio_ckpt.checkpoint.verify import verify_checkpoint
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ReadError, RootError, StallError, WriteError
from aio_ckpt.format.root_names import CORRUPT_DIR, ENGINE_DIR, PROTECTED_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.reports import LoadReport
from tests.campaigns.faults.campaign import PASSING_SECS, STALL_SECS, Point
from tests.campaigns.faults.clock import Clock
from tests.campaigns.faults.ground import WAIT_SECS, Ground, explain, is_state, small_chunks, state_of
from tests.campaigns.faults.store import Call, Fault
from tests.support.saved_files import data_file

__all__ = ["UPKEEPS", "Upkeep", "short_reads", "upkeep_points"]

_STEPS = 3
_MAY_STAY = ("abandoned/", "corrupt/", "protected/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """A call that is made to fail."""

    name: str
    """In the report."""
    act: Callable[[Ground], object]
    """Makes the call."""
    judge: Callable[[Ground, Call, object], Iterator[str]]
    """What is wrong with the outcome: what it returned, or the error."""
    repair: Callable[[Ground], Iterator[str]]
    """Makes the call once more, without a fault: what is wrong then."""
    prepare: Callable[[Ground], object] = lambda _: None
    """Before it."""
    has_limit: bool = True
    """Whether a call that hangs is given up: a read waits for its disk as long as its caller does."""
    removes: int | None = None
    """Step that the call deletes, or None. Until a later pass, it may lie in the trash."""


def upkeep_points(folder: Path, upkeep: Upkeep, fault: Fault, *, stride: int = 1) -> Iterator[Point]:
    """Every point of a fault in an upkeep, or one of ``stride``; each on a root of its own."""
    if fault.is_slow and not upkeep.has_limit:
        return
    with small_chunks():
        for number in itertools.count(1, stride):
            point = _strike(folder / str(number), upkeep, fault, number)
            if point is None:
                return
            yield point


def _strike(root: Path, upkeep: Upkeep, fault: Fault, number: int) -> Point | None:
    limits = {"stall_timeout_secs": STALL_SECS} if fault.is_slow else {}
    with Clock() as clock, contextlib.closing(Ground(root, **limits)) as ground:
        for _ in range(_STEPS):
            ground.keep(ground.save())
        upkeep.prepare(ground)
        clock.drive(ground.engine)
        ground.storage.arm(fault, number, (lambda: clock.advance(PASSING_SECS)) if fault.is_slow else None)
        outcome: object
        try:
            outcome = upkeep.act(ground)
        except Exception as error:  # noqa: BLE001 - to be judged
            outcome = error
        hit = ground.storage.disarm()
        if hit is None:
            return None
        ground.settle()
        wrong = _wrong_error(outcome, ground.storage.struck, fault) if isinstance(outcome, Exception) else ()
        problems = [*wrong, *upkeep.judge(ground, hit, outcome)]
        problems += [f"the next time: {text}" for text in upkeep.repair(ground)]
        problems += _lost(ground, besides=upkeep.removes)
        again = ground.save()
        if again.error is not None:
            problems.append(f"the next save failed: {explain(again.error)}")
        else:
            ground.keep(again)
        problems += ground.look(leftovers=_MAY_STAY if upkeep.removes is None else (*_MAY_STAY, "trash/"))
        return Point(name=f"{upkeep.name}, {fault.name}, {number}: {hit}", problems=tuple(problems))


def _wrong_error(error: Exception, struck: Sequence[Call], fault: Fault) -> Iterator[str]:
    if fault.is_slow:
        if not isinstance(error, StallError):
            yield f"a slow call ended as {explain(error)}"
    elif not isinstance(error, ReadError | WriteError | RootError):
        yield f"type: {explain(error)}"
    elif error.errno != fault.code or error.filename not in [str(call.path) for call in struck]:
        yield f"errno and path: {explain(error)}"


def _lost(ground: Ground, *, besides: int | None) -> Iterator[str]:
    """Every state that was ever committed here, but the one of step ``besides``, is still somewhere, whole."""
    names = StepNames(ground.config.step_dir)
    here = [*ground.root.iterdir(), *(ground.root / ENGINE_DIR).glob("*/*")]
    for step in {*range(1, _STEPS + 1)} - {besides}:
        places = [path for path in here if names.name(step) in path.name]
        if len(places) != 1 or len(os.listdir(places[0])) != _FILES:
            yield f"step {step} is at {places}"


_FILES = 4
"""Number of files of a checkpoint of one rank."""

# -- verify -----------------------------------------------------------------------------------------


def _verify(ground: Ground) -> object:
    path = ground.root / StepNames(ground.config.step_dir).name(_STEPS)

    async def run() -> object:
        return await verify_checkpoint(
            ground.storage,
            path,
            step=_STEPS,
            executor=ground.executor,
            readers=2,
            on_progress=lambda _: None,
        )

    limit = ground.config.stall_timeout_secs
    return ground.engine._portal.call(run, timeout=limit, what="verify")


def _judge_verify(_: Ground, hit: Call, outcome: object) -> Iterator[str]:
    if outcome == () and hit.name != "close_read":
        yield "it was called sound, though a read failed"


def _repair_verify(ground: Ground) -> Iterator[str]:
    faults = _verify(ground)
    if faults:
        yield f"a sound checkpoint has faults: {faults}"


# -- protection -------------------------------------------------------------------------------------


def _protect(ground: Ground) -> object:
    ground.engine.protect(2).result()
    return None


def _judge_protect(ground: Ground, _: Call, outcome: object) -> Iterator[str]:
    if not isinstance(outcome, Exception):
        yield "it returned, though a call failed"
    if not set(_marks(ground)) <= {"2"}:
        yield f"marks: {_marks(ground)}"


def _repair_protect(ground: Ground) -> Iterator[str]:
    ground.engine.protect(2).result()
    if ground.engine.protected_steps().result() != [2]:
        yield f"protected are {ground.engine.protected_steps().result()}"


def _unprotect(ground: Ground) -> object:
    ground.engine.unprotect(2).result()
    return None


def _judge_unprotect(ground: Ground, hit: Call, outcome: object) -> Iterator[str]:
    if not isinstance(outcome, Exception):
        yield f"it returned, though {hit} failed"
    if "3" not in _marks(ground):
        yield "another step's mark is gone"


def _repair_unprotect(ground: Ground) -> Iterator[str]:
    ground.engine.unprotect(2).result()
    if ground.engine.protected_steps().result() != [3]:
        yield f"protected are {ground.engine.protected_steps().result()}"


def _protect_both(ground: Ground) -> None:
    for step in (2, 3):
        ground.engine.protect(step).result()


def _marks(ground: Ground) -> list[str]:
    return _names_below(ground, PROTECTED_DIR)


def _names_below(ground: Ground, directory: str) -> list[str]:
    return sorted(path.name for path in (ground.root / directory).glob("*"))


# -- rollback ---------------------------------------------------------------------------------------


def _rollback(ground: Ground) -> object:
    return ground.engine.rollback(1).result()


def _judge_rollback(ground: Ground, hit: Call, outcome: object) -> Iterator[str]:
    if not isinstance(outcome, Exception):
        yield f"it returned, though {hit} failed"
    steps = ground.engine.steps().result()
    if steps != list(range(1, len(steps) + 1)) or not steps:
        yield f"it left a history with a gap: {steps}"
    for step in steps:
        if not is_state(ground.read(step), ground.committed[step]):
            yield f"step {step} does not load as it was saved"


def _repair_rollback(ground: Ground) -> Iterator[str]:
    ground.engine.rollback(1).result()
    for step in (2, 3):
        ground.forget(step)
    if ground.engine.steps().result() != [1]:
        yield f"listed are {ground.engine.steps().result()}"
    if ground.engine.protected_steps().result():
        yield f"protected are {ground.engine.protected_steps().result()}"


def _protect_later(ground: Ground) -> None:
    ground.engine.protect(3).result()


# -- delete -----------------------------------------------------------------------------------------


def _delete(ground: Ground) -> object:
    ground.engine._agreed_changes.delete(2, allow_newest=False)
    return None


def _judge_delete(ground: Ground, hit: Call, outcome: object) -> Iterator[str]:
    if not isinstance(outcome, Exception):
        yield f"it returned, though {hit} failed"
    steps = ground.engine.steps().result()
    if steps not in ([1, 2, 3], [1, 3]):
        yield f"listed are {steps}"
    for step in steps:
        if not is_state(ground.read(step), ground.committed[step]):
            yield f"step {step} does not load as it was saved"


def _repair_delete(ground: Ground) -> Iterator[str]:
    with contextlib.suppress(CheckpointNotFoundError):  # the rename was made before the call failed
        ground.engine._agreed_changes.delete(2, allow_newest=False)
    ground.forget(2)
    if ground.engine.steps().result() != [1, 3]:
        yield f"listed are {ground.engine.steps().result()}"


# -- damage -----------------------------------------------------------------------------------------


def _hurt(ground: Ground) -> None:
    """One bit of the newest step's values."""
    file = data_file(ground.root / StepNames(ground.config.step_dir).name(_STEPS))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def _load(ground: Ground) -> object:
    target = state_of(0)
    submitted = ground.engine.load(target, None, strict=False, allow_missing=False, fallback=True)
    return submitted.result(WAIT_SECS), target


def _judge_load(ground: Ground, hit: Call, outcome: object) -> Iterator[str]:
    moved = _names_below(ground, CORRUPT_DIR)
    if isinstance(outcome, Exception):
        return
    report, target = _loaded(outcome)
    if report.step != _STEPS - 1 or not is_state(target, ground.committed[_STEPS - 1]):
        yield f"it loaded step {report.step}"
    if [entry.step for entry in report.skipped] != [_STEPS]:
        yield f"it skipped {report.skipped}"
    if bool(moved) is not (report.skipped[0].quarantined is not None) and hit.name != "sync_dir":
        yield f"set aside are {moved}, told {report.skipped[0].quarantined}"


def _loaded(outcome: object) -> tuple[LoadReport, Any]:
    assert isinstance(outcome, tuple)
    return outcome


def _repair_load(ground: Ground) -> Iterator[str]:
    report, target = _loaded(_load(ground))
    ground.forget(_STEPS)
    if report.step != _STEPS - 1 or not is_state(target, ground.committed[_STEPS - 1]):
        yield f"it loaded step {report.step}"
    if ground.engine.steps().result() != list(range(1, _STEPS)):
        yield f"listed are {ground.engine.steps().result()}"
    if not _names_below(ground, CORRUPT_DIR):
        yield "the damaged step was not set aside"


UPKEEPS = (
    Upkeep(name="verify", act=_verify, judge=_judge_verify, repair=_repair_verify, has_limit=False),
    Upkeep(name="protect", act=_protect, judge=_judge_protect, repair=_repair_protect),
    Upkeep(name="unprotect", act=_unprotect, judge=_judge_unprotect, repair=_repair_unprotect, prepare=_protect_both),
    Upkeep(name="rollback", act=_rollback, judge=_judge_rollback, repair=_repair_rollback, prepare=_protect_later),
    Upkeep(name="delete", act=_delete, judge=_judge_delete, repair=_repair_delete, removes=2),
    Upkeep(
        name="load that sets damage aside",
        act=_load,
        judge=_judge_load,
        repair=_repair_load,
        prepare=_hurt,
        has_limit=False,
    ),
)

# -- short reads ------------------------------------------------------------------------------------


def short_reads(folder: Path, *, stride: int = 1) -> Iterator[Point]:
    """The n-th read moves half of its bytes: continued. One that ends there is done anew and proves no damage."""
    with small_chunks():
        for is_end in (False, True):
            for number in itertools.count(1, stride):
                with contextlib.closing(Ground(folder / f"{is_end}-{number}")) as ground:
                    for _ in range(2):
                        ground.keep(ground.save())
                    problems, was_reached = _short_read(ground, number, is_end=is_end)
                    if not was_reached:
                        break
                    problems += ground.look()
                    how = "ends early" if is_end else "falls short"
                    yield Point(name=f"read {number} {how}", problems=tuple(problems))


def _short_read(ground: Ground, number: int, *, is_end: bool) -> tuple[list[str], bool]:
    preadv, left = os.preadv, number
    is_over = False

    def short(descriptor: int, views: Sequence[Any], offset: int, flags: int = 0) -> int:
        nonlocal left, is_over
        view = memoryview(views[0])
        if is_over:  # the rest of the read that fell short: nothing more
            is_over = False
            return 0
        left -= view.nbytes >= _PAGE_BYTES
        if left or view.nbytes < 2 * _PAGE_BYTES:
            return preadv(descriptor, views, offset, flags)
        left, is_over = -1, is_end
        return preadv(descriptor, [view[: view.nbytes // 2 // _PAGE_BYTES * _PAGE_BYTES]], offset, flags)

    with mock.patch.object(os, "preadv", short):
        try:
            report, target = _loaded(_load(ground))
        except AioCkptError as error:
            return [explain(error)], left < 0
    newest = max(ground.committed)
    problems = [] if is_state(target, ground.committed[newest]) else ["it returned something else"]
    if report.step != newest or report.skipped:
        problems.append(f"it took step {report.step} and skipped {report.skipped}")
    return problems, left < 0


_PAGE_BYTES = 4096
