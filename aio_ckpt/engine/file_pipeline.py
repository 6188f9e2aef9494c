"""One call of ``save_file()`` on the engine's loop: write beside the place, then rename; and its cleanup.

A file is written into a directory of its own beside its place, and fsynced there. One rename then makes it visible.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from aio_ckpt.commit.owner import owner_by_name
from aio_ckpt.commit.publish_files import only_writer, publish_files
from aio_ckpt.commit.trash import Trash
from aio_ckpt.engine.common_stages import CommonStages
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.failed_save import end_failed_save
from aio_ckpt.engine.job import FileJob
from aio_ckpt.format.safetensors_file import SUFFIX
from aio_ckpt.ranks.save_round import SaveState
from aio_ckpt.reports import SaveReport
from aio_ckpt.storage.local import names_in
from aio_ckpt.write.full_disk import explain_full_disk
from aio_ckpt.write.part import write_part
from aio_ckpt.write.result import WriteResult

TEMPORARY = ".aio_ckpt-file-"
"""Begin of the names of temporary directories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePipeline:
    """Pipeline of the files of one call of ``save_file()``. :meth:`save` shows all of it."""

    ctx: EngineContext
    stages: CommonStages
    trash: Trash
    cleared: set[Path] = field(default_factory=set)
    """Directories in which the leftovers of dead processes were removed."""

    async def save(self, job: FileJob) -> SaveReport:
        """Write all files beside their places, then rename them."""
        storage, folder = self.ctx.storage, job.path.parent
        job.begin("making its directory")
        await storage.make_dirs(folder)
        await self._clear_leftovers(folder)
        await storage.make_dir(job.temporary)
        await storage.set_mode(job.temporary, 0o700)  # until its rename, nobody else may read a private file either
        writer = self.stages.file_writer(job)
        results: list[WriteResult] = []
        for index in range(len(job.content.parts)):
            part = await job.part(index)
            results.append(await write_part(part, job.temporary / part.name, writer))
            part.image.lease.close()
        job.timer.reached("synced")
        job.begin("waiting for the file before")
        await job.wait_for_earlier()
        job.begin(f"waiting for another save that renames files in {folder}")
        job.round.advance(SaveState.VOTED)
        is_plain = job.content.index is None and not job.path.name.endswith(SUFFIX)
        lock = contextlib.nullcontext() if is_plain else only_writer(storage, folder)
        async with self.stages.committing(job, lock):
            written = [part.name for part in job.parts]
            names = await publish_files(storage, job.temporary, job.path, written, index=job.content.index)
            await self.trash.delete(job.temporary)
        return SaveReport(
            step=0,
            path=job.path,
            image_bytes=job.image_bytes,
            raw_bytes=sum(part.layout.raw_bytes for part in job.parts),
            plan_hit=job.plan_hit,
            fingerprint_hit=False,
            mode=results[0].mode,
            timings=job.timer.timings(),
            crc32s={name: result.file_crc32 for name, result in zip(names, results, strict=True)},
        )

    # -- clean up -------------------------------------------------------------------------------------

    async def clean_up(self, job: FileJob, cause: BaseException, stage: str) -> BaseException:
        """Give the memory back once the last thread has ended, and remove the temporary directory."""
        storage, folder = self.ctx.storage, job.path.parent
        await explain_full_disk(cause, storage, folder, job.image_bytes, remedy="save to another disk")
        await end_failed_save(
            self.trash,
            job.temporary,
            [part.image for part in job.parts],
            job.threads,
            title=job.title,
            cause=cause,
        )
        return cause

    async def _clear_leftovers(self, folder: Path) -> None:
        """Remove the temporary directories of dead processes in ``folder``, once for each folder."""
        if folder in self.cleared:
            return
        self.cleared.add(folder)
        here, storage = self.ctx.owner, self.ctx.storage
        for name in await names_in(storage, folder):
            owner = owner_by_name(name, here) if name.startswith(TEMPORARY) else None
            if owner is not None and owner.is_proven_dead(here):
                await self.trash.delete(folder / name)
