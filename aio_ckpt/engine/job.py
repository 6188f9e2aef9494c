"""One save between its call and its end: the arguments of the call, its times, and the job."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import anyio

from aio_ckpt.argument_checks import check_flag, check_one_of
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.user_extra import check_extra
from aio_ckpt.commit.user_files import check_files
from aio_ckpt.commit.user_metrics import check_metrics
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.plan.file_plan import FileContent
from aio_ckpt.plan.save_plan import Plan
from aio_ckpt.plan.trusted_plan import Versions
from aio_ckpt.ranks.membership import CALL_STAGE
from aio_ckpt.ranks.save_ledger import ContentSums
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.remote_path import RemotePath, check_place
from aio_ckpt.reports import Progress, Stage, StageTimings, Target, step_of, title
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.futures import ThreadTracker, follow
from aio_ckpt.runtime.log_records import is_logged, log_step
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.snapshot.stall_timer import StallTimer
from aio_ckpt.ticket import Milestone, SaveTicket
from aio_ckpt.write.frozen_file import FrozenFile
from aio_ckpt.write.part import Part


def sent_target(target: Target, root: Path) -> int | str:
    """Return a target as the ranks send it to each other."""
    return sent_path(target, root) if isinstance(target, Path) else target


def sent_path(path: Path, root: Path) -> str:
    """Return a path as the ranks send it to each other: from the root, which hosts may mount at different places.

    A place in an object store has one name on all hosts.
    """
    if isinstance(path, RemotePath):
        return str(path)
    return os.path.join("ROOT", os.path.relpath(path, root))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCall:
    """Arguments of one call of ``save()``, without the state."""

    step: Any
    """Step that the caller gave; None if none was given. It is checked unless the call is refused."""
    overwrite: bool
    """Whether a committed checkpoint of the same step is replaced; of a path, also one with foreign files."""
    metrics: Mapping[str, float | None]
    """Metrics of the step by name; None for a value that is not finite."""
    extra: Mapping[str, Any]
    """The caller's JSON values, a copy."""
    deadline: Deadline
    """Time by which the save must be committed."""
    started: float
    """``time.perf_counter`` at the call."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The caller's own files, by name, which the leader writes beside the data."""
    path: Path | None = None
    """Directory that the caller named, absolute; None for a save of a step, and for a refused call."""
    takes_step: bool = True
    """Whether the call takes a step number: no path was given."""
    refuse: Callable[[], SaveCall] | None = None
    """Raises the error of a refused call, after the other ranks were told; None if the call is accepted.

    A kept error would keep the frames of its traceback, and so the caller's state."""

    @classmethod
    def of(
        cls,
        step: object,
        *,
        path: str | os.PathLike[str] | None,
        overwrite: bool,
        deadline_secs: float | None,
        metrics: Mapping[str, object] | None,
        extra: dict[str, Any] | None,
        files: Mapping[str, bytes] | None,
    ) -> SaveCall:
        """Return the call that begins now. Raises nothing: bad arguments give a call with ``refuse``."""
        step = step_numbers.whole_number(step)
        started, began = time.perf_counter(), time.monotonic()

        def checked() -> SaveCall:
            deadline = replace(Deadline.after(deadline_secs), began=began)
            check_flag("overwrite", overwrite)
            check_one_of(step, path)
            if step is not None:
                step_numbers.check_step_number(step)
            return cls(
                step=step,
                path=None if path is None else check_place("path", path),
                takes_step=path is None,
                overwrite=overwrite,
                metrics=check_metrics(metrics),
                extra=check_extra(extra),
                files=check_files(files),
                deadline=deadline,
                started=started,
            )

        try:
            return checked()
        except Exception:  # noqa: BLE001 - ``refuse`` raises it again
            return cls(
                step=step,
                overwrite=False,
                metrics={},
                extra={},
                deadline=NO_DEADLINE,
                started=started,
                takes_step=path is None,
                refuse=checked,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedCall:
    """One call of ``save()``, with what makes it the same call on every rank."""

    call: SaveCall
    number: int
    """Number of the call."""
    round: SaveRound

    @property
    def target(self) -> Target | None:
        """Step or path that the caller gave."""
        return self.call.path or self.call.step

    def accepted(self) -> NumberedCall:
        """Return the call itself, or raise the error of a refused one."""
        return self if self.call.refuse is None else replace(self, call=self.call.refuse())


Reached: TypeAlias = Literal["blocked", "staged", "written", "synced", "agreed", "dir_synced"]


class SaveTimer:
    """Times at which one save reached its stages, in seconds from its call."""

    def __init__(self, started: float, *, waited_secs: float, plan_secs: float = 0.0) -> None:
        """``started`` is ``time.perf_counter`` at the call."""
        self._started = started
        self.waited_secs = waited_secs
        """Seconds that the call waited for room and for memory."""
        self._plan_secs = plan_secs
        self.secs = dict.fromkeys(get_args(Reached), 0.0)
        """Seconds from the call to each stage; 0 if it was not reached."""

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._started

    def reached(self, what: Reached) -> None:
        """Note that ``what`` is reached now. The last call counts."""
        self.secs[what] = time.perf_counter() - self._started

    def timings(self) -> StageTimings:
        """Return all times, for the report of a save that is committed now."""
        return StageTimings(
            waited_secs=self.waited_secs,
            plan_secs=self._plan_secs,
            committed_secs=self.elapsed(),
            **{f"{what}_secs": secs for what, secs in self.secs.items()},
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One call that the queue runs in the background, from the call until its end."""

    kind: ClassVar[str]
    """Name of the method that makes the job."""
    target: Target
    """Step that is saved, or the path that the caller named."""
    number: int = 0
    """Number of the call, the same on every rank; 0 for a file, of which the other ranks know nothing."""
    finished: Future[None] = field(default_factory=Future)
    """Done once the job has ended and is cleaned up."""
    step: int | None = field(init=False)
    """Step that is saved; None if the caller named a path."""
    title: str = field(init=False)
    """Name of the target in messages: ``step 5``, or its path."""

    def __post_init__(self) -> None:
        self.step = step_of(self.target)
        self.title = title(self.target)

    @property
    def turn_ended(self) -> Future[None]:
        """Future that is done once the commits of later calls may go on."""
        return self.finished


@dataclass(slots=True, kw_only=True, eq=False)
class RemoveJob(Job):
    """One call of ``remove()``, of a checkpoint at a path."""

    kind = "remove"
    tickets: Sequence[SaveTicket]
    """Tickets of the saves that the removal waits for. If one of them fails, the removal is dropped."""
    done: Milestone[None]
    """Milestone that ``remove()`` returns."""
    freed: Future[None] = field(default_factory=Future)
    """Done once the path is free, or the removal has failed."""

    @property
    def turn_ended(self) -> Future[None]:
        """Future that is done once the commits of later calls may go on: its files need not be deleted by then."""
        return self.freed

    @property
    def path(self) -> Path:
        """Directory of the checkpoint, absolute."""
        assert isinstance(self.target, Path)
        return self.target


@dataclass(slots=True, kw_only=True, eq=False)
class WriteJob(Job):
    """One save between its call and its end: its ticket, its state and its progress.

    The caller's thread makes it, gives it its ticket, sets ``parts``, ``plan_hit``, ``is_submitted`` and ``events``,
    and adds captured chunks until the pipeline is submitted. Whichever thread gets there sets the timer and reaches the
    milestone ``staged``. Every other change is made on the loop.
    """

    place: Path
    """Directory below which the save writes, for messages."""
    deadline: Deadline = NO_DEADLINE
    """Time by which the save must be committed."""
    round: SaveRound
    """State of the save, and its agreement with the other ranks."""
    ticket: SaveTicket = field(init=False)
    earlier: tuple[Future[None], ...] = ()
    """Ends of the turns of all jobs that were pending at the call, as commits keep the order of the calls. The last of
    them alone would not do: it may fail while one before it goes on."""
    timer: SaveTimer
    stall: StallTimer = field(default_factory=StallTimer)
    """Time of the last progress, and the failure of the capture."""
    threads: ThreadTracker = field(default_factory=ThreadTracker)
    """Threads that work for this save."""
    parts: list[Part] = field(default_factory=list)
    """Data files whose capture has begun."""
    has_new_part: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, on the loop, when chunks of a part are captured."""
    is_submitted: bool = False
    """Whether the pipeline was submitted."""
    events: tuple[CopyEvent, ...] = ()
    """Events after the copies from devices; done once all of them are."""
    activity: str = "beginning"
    """Current activity, for messages."""
    stage: Stage = "write"
    """Current stage, for errors: ``write``, ``agree`` or ``commit``."""
    written_bytes: int = 0
    """Bytes of the data files that are written."""
    scope: anyio.CancelScope | None = None
    """Cancels the pipeline; None until the pipeline has begun."""

    @property
    def image_bytes(self) -> int:
        """Length of the data files whose capture has begun."""
        return sum(part.image.nbytes for part in self.parts)

    @property
    def failing_stage(self) -> str:
        """Stage of an error that comes now. In waves, ``save()`` itself raises it while there is more to capture."""
        waves = (part for part in self.parts if not part.image.is_whole)
        return self.stage if all(part.chunks.are_complete for part in waves) else CALL_STAGE

    @property
    def so_far(self) -> Progress:
        """Progress for the ticket. Any thread may read it."""
        is_capturing = self.stage == "write" and not self.ticket.staged.done()
        return Progress(
            stage="capture" if is_capturing else self.stage,
            bytes_done=self.written_bytes,
            bytes_total=self.image_bytes,
        )

    def begin(self, activity: str, *, stage: Stage | None = None) -> None:
        """Note, on the loop, the activity that begins now, and its stage if that changes."""
        self.activity = activity
        self.stage = stage or self.stage
        self.stall.touch()
        if is_logged(logging.DEBUG):
            self.debug(activity)

    def wrote(self, nbytes: int) -> None:
        """Note, on the loop, that ``nbytes`` of a data file were written."""
        self.timer.reached("written")
        self.written_bytes += nbytes
        self.stall.touch()

    def debug(self, text: str) -> None:
        """Log one DEBUG line of this save, with the time since its call."""
        secs, line = self.timer.elapsed(), f"%s, %.3f s after {self.kind}(): %s"
        log_step(logging.DEBUG, self.step, self.round.rank, line, self.title, secs, text)

    def captured(self, part: Part, runs: Sequence[CapturedRun]) -> None:
        """Note, on the loop, that chunks of ``part`` are captured."""
        part.chunks.add(runs)
        self.has_new_part.set()

    async def part(self, index: int) -> Part:
        """Wait, on the loop, until part ``index`` is being captured, and return it."""
        with self.stall.paused():  # the caller's thread plans and waits for memory
            while len(self.parts) <= index:
                self.has_new_part.clear()
                await self.has_new_part.wait()
        return self.parts[index]

    async def wait_for_earlier(self) -> None:
        """Wait until earlier saves have finished: commits keep the order of the calls."""
        with self.stall.paused():
            for finished in self.earlier:
                await asyncio.wrap_future(follow(finished))

    def fence(self, stream: object) -> None:
        """Make ``stream`` wait for the copies from devices."""
        for event in self.events:
            event.fence(stream)

    async def cancel(self) -> bool:
        """Cancel the save, on the loop; False if it is too late."""
        if self.finished.done() or not self.round.cancel():
            return False
        if self.scope is not None:
            self.scope.cancel()
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class SaveJob(WriteJob):
    """One call of ``save()``, of a step or at a path. It has one part, the data file of this rank."""

    kind = "save"
    call: SaveCall
    pending: Path
    """Directory of the save until the commit, the same on every rank."""
    write_dir: Path
    """Directory into which the files are written, but ``.metadata``: the pending one, or, in a store, the final one."""
    final: Path
    """Directory of the checkpoint once it is committed."""
    save_id: str
    """Unique name of the save, the same on every rank."""
    requested: Sequence[str]
    """Names of the leaves of this call's state, not of the cached plan."""
    plan: Plan
    """Items that this rank writes, and their places."""
    plan_hit: bool
    """Whether the plan was reused."""
    fingerprint_hit: bool
    """Whether the copy descriptors were reused."""
    objects: ObjectBytes
    content: ContentSums
    """Checksums by which the leader compares replicas. Those of tensors are left out if the plan message had them."""
    versions: Versions | None = None
    """Versions of the frozen leaves; None if they are not trusted."""
    trusted_file: FrozenFile | None = None
    """Committed file that holds the frozen leaves, which are not captured; None if all are captured."""
    clone_source: FrozenFile | None = None
    """File that the frozen file of this save may be a clone of; None if there is none."""

    @property
    def stored_step(self) -> int:
        """Step in manifests and reports: 0 if the caller named a directory."""
        return self.step or 0


@dataclass(slots=True, kw_only=True, eq=False)
class FileJob(WriteJob):
    """One call of ``save_file()``. It has a part for each file."""

    kind = "save_file"
    temporary: Path
    """Directory in which the files are written."""
    content: FileContent
    plan_hit: bool = True
    """Whether the plan of each file so far was reused."""

    @property
    def path(self) -> Path:
        """Place of the file, or of the index of several."""
        assert isinstance(self.target, Path)
        return self.target
