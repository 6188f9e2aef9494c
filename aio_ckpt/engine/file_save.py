"""Single files through an engine: the caller's half of ``save_file()``.

The second half runs on the loop: :mod:`aio_ckpt.engine.file_pipeline`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from aio_ckpt.argument_checks import MAX_SECS, check_path
from aio_ckpt.commit.path_checkpoints import file_refusal
from aio_ckpt.engine.call_lock import CallLock
from aio_ckpt.engine.capture_job import JobCapturer
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.file_pipeline import TEMPORARY, FilePipeline
from aio_ckpt.engine.job import FileJob, SaveTimer
from aio_ckpt.engine.job_queue import JobQueue, note_failure, raise_failure
from aio_ckpt.errors import ConfigError, WriteError
from aio_ckpt.format.safetensors_file import SUFFIX, index_name
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.message_texts import shown
from aio_ckpt.plan.file_plan import FileContent, FilePlans, torch_content
from aio_ckpt.plan.safetensors_plan import SafetensorsOptions, safetensors_content
from aio_ckpt.plan.save_plan import PlannedImage, collector_paused
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.deadline import NO_DEADLINE
from aio_ckpt.runtime.waiting import call_within
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import lease_image
from aio_ckpt.ticket import SaveTicket
from aio_ckpt.write.part import Part


class FileSaves:
    """Caller's half of the files of one engine."""

    def __init__(
        self, ctx: EngineContext, call_lock: CallLock, queue: JobQueue, capturer: JobCapturer, pipeline: FilePipeline
    ) -> None:
        self._ctx = ctx
        self._call_lock = call_lock
        self._queue = queue
        self._capturer = capturer
        self._lifetime = capturer.resources.lifetime
        # A snapshot that can be rescued belongs to a step, so a file needs no memory with a name.
        staging = "auto" if ctx.config.shm_path is not None else ctx.config.staging
        self._staging = StagingChoice(staging)
        self._pipeline = pipeline
        self._plans = FilePlans(gather_bytes=ctx.config.gather_bytes, budget_bytes=self._lifetime.measure_budget)
        self._calls = 0

    def save_file(self, obj: object, path: object, options: SafetensorsOptions) -> SaveTicket:
        """See ``CheckpointEngine.save_file``."""
        started = time.perf_counter()
        self._call_lock.check("save_file()")
        limit_secs, place = self._ctx.config.stall_timeout_secs, check_path("path", path, of="a file")
        target = call_within(limit_secs, functools.partial(file_target, path), "looking at the file", place)
        with self._call_lock.mutex:
            self._queue.check_open()
            self._lifetime.close_lost(self._queue.leases)
            earlier = self._queue.take_unreported(0)
            try:
                ticket = self._save(obj, target, options, started)
            except BaseException as error:
                if earlier is not None:
                    note_failure(error, earlier)
                raise
        if earlier is not None:
            raise_failure(earlier, made=ticket)
        return ticket

    def _save(self, obj: object, path: Path, options: SafetensorsOptions, started: float) -> SaveTicket:
        """Plan, lease and capture. ``started`` is ``time.perf_counter`` at the call."""
        check, limit_secs = functools.partial(self._check_outside_root, path), self._ctx.config.stall_timeout_secs
        call_within(limit_secs, check, "looking at the file", path)
        with collector_paused():
            content = self._content(obj, path.name, options)
        waited_secs = self._queue.wait_for_room(FileJob, path, "wait", NO_DEADLINE)
        assert waited_secs is not None  # such a call is never skipped
        self._calls += 1
        path = path if content.index is None else path.with_name(index_name(content.index.single))
        job = self._queue.assign_ticket(
            FileJob(
                target=path,
                round=SaveRound(self._ctx.members, self._ctx.executor, topic=Topic("file", self._calls)),
                timer=SaveTimer(started, waited_secs=waited_secs),
                place=path.parent,
                temporary=path.parent / f"{TEMPORARY}{self._ctx.owner.label}-{self._calls}",
                content=content,
            )
        )
        self._capturer.capture(job, self._pipeline, self._parts(job))
        return job.ticket

    def _parts(self, job: FileJob) -> Iterator[tuple[PlannedImage, Part]]:
        """Plan each file and lease its memory, when the file before is captured."""
        for plan_part in job.content.parts:
            with collector_paused():
                planned_file = plan_part()
            planned = planned_file.planned
            job.plan_hit = job.plan_hit and planned_file.plan_hit
            image = lease_image(
                planned,
                planned_file.tail_bytes,
                self._lifetime,
                self._staging,
                timeout_secs=self._capturer.resources.slot_timeout_secs(planned.plan.layout.chunk_bytes),
                limit_secs=MAX_SECS,
            )
            yield (
                planned,
                Part(
                    name=planned_file.name,
                    layout=planned.plan.layout,
                    tail=bytes(planned_file.tail_bytes),
                    render_tail=planned_file.render_tail,
                    image=image,
                    chunks=CapturedChunks(len(image.chunks), job.stall),
                ),
            )

    def _check_outside_root(self, path: Path) -> None:
        root = self._ctx.root
        if isinstance(root, RemotePath):
            remedy = "open an engine whose root is on the disk of the file"
            raise ConfigError(f"path={str(path)!r}: the root {root} is in an object store: {remedy}")
        why = file_refusal(path, Path(os.path.realpath(root)), self._ctx.names)
        for place, finished in self._queue.calls_by_path():
            if not finished.done() and Path(os.path.realpath(place)) in path.parents:
                why = f"the checkpoint at {place} is pending, and takes that directory: await its ticket first"
        if why:
            raise ConfigError(f"path={str(path)!r}: {why}")

    def _content(self, obj: object, name: str, options: SafetensorsOptions) -> FileContent:
        """Return the files of ``obj``, by the suffix of ``name``. Raises what ``save_file()`` says of ``obj``."""
        options.check()
        if name.lower().endswith((SUFFIX, index_name(SUFFIX))) and not name.endswith(SUFFIX):
            raise ConfigError(f"path={name!r}: give a name that ends in {SUFFIX}; an index is written beside its files")
        if name.endswith(SUFFIX):
            return safetensors_content(obj, name, options, self._plans)
        if options != SafetensorsOptions():
            raise ConfigError(f"path={name!r}: these options are for files that end in {SUFFIX}: leave them away")
        return torch_content(obj, name, self._plans)


def _resolved(path: Path) -> Path:
    """Return the place that ``path`` leads to. If a link cannot be looked at, the call fails: it would be replaced.

    Raises:
        WriteError: a link cannot be looked at, or the links are a loop.
    """
    try:
        return Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):  # a new file, or a link to one
        return Path(os.path.realpath(path))
    except OSError as error:
        message = f"cannot tell whether a link lies there ({error.strerror}): call save_file() again"
        raise WriteError(error.errno, message, str(path)) from error


def file_target(path: object) -> Path:
    """Return the place of the file that ``path`` names, absolute.

    If ``path`` is a symbolic link, that is the place of the file that the link names. So the link stays.

    Raises:
        WriteError: a link cannot be looked at.
        ConfigError: ``path`` is no path; or a directory, a device, a pipe or a socket; or a parent of it is a file.
    """
    target = _resolved(check_path("path", path, of="a file"))
    if target.is_dir():
        raise ConfigError(f"path={shown(path)}: is a directory: give the path of a file")
    if target.exists() and not target.is_file():  # a rename would replace the device itself, for every process
        raise ConfigError(f"path={shown(path)}: is a device, a pipe or a socket: give the path of a regular file")
    parent = next(parent for parent in target.parents if parent.exists())
    if not parent.is_dir():
        raise ConfigError(f"path={shown(path)}: {parent} is a file: give a path in a directory")
    return target
