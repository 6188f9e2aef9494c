"""One checkpoint of DeepSpeed: written in a draft beside the tags, made visible by rank 0, or removed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from aio_ckpt.commit.owner import Owner, owner_by_name
from aio_ckpt.errors import AioCkptError, ConfigError, CorruptCheckpointError, PeerFailedError, RootError, WriteError
from aio_ckpt.integrations import checkpoint_folder
from aio_ckpt.ranks.failure import Failure, work_failure
from aio_ckpt.ranks.polls import AgreedWork, Work
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.durability import sync_parents
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.os_errors import translate_errors
from aio_ckpt.storage.small_files import read_small_file

_log = logging.getLogger("aio_ckpt")

_LATEST = "latest"
"""File that names the newest checkpoint."""
_FILES = "_states.pt"
"""End of the names of DeepSpeed's files in the directory of a tag."""
DRAFTS = ".aio_ckpt-draft-"
"""Begin of the names of the directories beside the tags, in which checkpoints are written. Their names tell the owner.
"""
_REPLACED = "replaced"
"""Directory of a draft that holds what was in the place of the checkpoint. Such a draft is not removed."""
_IN_THE_WAY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


@dataclass(kw_only=True, eq=False)
class Draft:
    """Checkpoint that is not visible yet."""

    tag: str
    save_dir: Path
    name: str
    """Name of the directory in which it is written, which no other checkpoint has."""
    is_latest: bool
    """Whether ``latest`` is to name it."""
    stale: list[Path]
    """Directories of earlier checkpoints that failed. No rank writes there once this one has ended."""
    what: str = ""
    """What the ranks call it: the path at which rank 0 makes it visible."""
    refusal: Exception | None = None
    """Why no file of this rank can be a part of it."""
    works: list[Work] = field(default_factory=list)
    """Files of this rank."""
    agreed: AgreedWork | None = None
    """Agreement that all files are durable. None: more files may come."""

    @property
    def drafts_dir(self) -> Path:
        return self.save_dir / self.name

    @property
    def folder(self) -> Path:
        """Directory that stands for that of the tag until the commit."""
        return self.drafts_dir / "tag"

    @property
    def final(self) -> Path:
        return self.save_dir / self.tag

    def begin(self) -> OSError | None:
        """On rank 0: make its directory, by which the other ranks know that they write to the same place."""
        try:
            self.drafts_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return error
        return None

    def why_not_of(self, tag: str) -> ConfigError | None:
        """Tell why files of this rank are lost in the checkpoint of rank 0, which saves as ``tag``, and has begun."""
        if self.tag == tag and self.drafts_dir.is_dir():
            return None
        if str(self.final) != self.what:
            return ConfigError(
                f"this rank saves {self.final}, and rank 0 saves {self.what}: give all ranks the same directory and tag"
            )
        return ConfigError(
            f"{self.drafts_dir}, which rank 0 has made, is not on this rank: save to a directory that all ranks share, "
            "or set checkpoint.use_node_local_storage, with which DeepSpeed itself saves"
        )

    def place_of(self, path: str) -> Path:
        """Return where the file ``path`` is written."""
        place = Path(os.path.abspath(path))
        return self.folder / place.relative_to(self.final) if place.is_relative_to(self.final) else place

    async def publish_or_remove(self, executor: Executor, storage: Storage, failure: Failure | None) -> None:
        """On the leader: make the checkpoint visible, or remove what was written of it."""
        error: Exception | None = None
        try:
            if failure is None:
                await self._show(executor, storage)
        except (AioCkptError, OSError) as found:
            error, failure = found, work_failure(found, rank=0)
        if failure is not None:
            await self._log_failure(storage, failure)
            await run_blocking(executor, _remove_if_empty, self.final)
        for path in (*self.stale, self.drafts_dir):
            await run_blocking(executor, remove_draft, path)
        if error is not None:
            raise error

    async def _show(self, executor: Executor, storage: Storage) -> None:
        is_file_of_tag = await run_blocking(executor, self._check_files)
        if is_file_of_tag:
            await _publish(executor, storage, self.folder, self.final)
        if self.is_latest:
            await _replace_file(storage, self.save_dir / _LATEST, self.drafts_dir, self.tag.encode())
            _log.info("%s is durable, and %s names it", self.final, self.save_dir / _LATEST)

    def _check_files(self) -> bool:
        """Check that the files of this rank are still in the draft, once they are written. Return whether it has any.

        Raises:
            CorruptCheckpointError: another program has removed or changed one.
        """
        found = self.folder.exists()
        for report in (work.result() for work in self.works):
            if isinstance(report, SaveReport) and report.path is not None and report.path.is_relative_to(self.folder):
                nbytes = report.path.stat().st_size if report.path.exists() else None
                if nbytes != report.image_bytes:
                    there = "is missing" if nbytes is None else f"has {nbytes} bytes"
                    raise CorruptCheckpointError(
                        f"{report.path} {there}, {report.image_bytes} bytes were written: another program changes "
                        f"{self.drafts_dir}"
                    )
        return found

    async def _log_failure(self, storage: Storage, failure: Failure) -> None:
        """Log which checkpoint is lost, and which is the newest: the script may end without another call."""
        try:
            latest = await read_small_file(storage, self.save_dir / _LATEST)
        except (AioCkptError, OSError):
            latest = b"(unreadable)"
        names = "there is none" if latest is None else f"it names {latest.decode(errors='replace')!r}"
        text = "the checkpoint %s was not saved: rank %d failed: %s; %s is unchanged: %s"
        _log.error(text, self.final, failure.rank, failure.cause, self.save_dir / _LATEST, names)

    def check(self) -> None:
        """Raise the failure of any rank, once the ranks have agreed."""
        assert self.agreed is not None
        # All of them: the next save would raise a failure that nobody took.
        errors = [work.exception() for work in self.works if work.done()]
        failure = self.agreed.failure()
        if failure is None:
            return
        own = next(filter(None, errors), None)
        raise PeerFailedError(
            f"the checkpoint {self.final} was not saved: rank {failure.rank} failed: {failure.cause}; "
            f"{self.save_dir / _LATEST} is unchanged",
            rank=failure.rank,
            stage=failure.stage,
            cause=failure.cause,
        ) from own or self.agreed.leaders_error


async def _publish(executor: Executor, storage: Storage, draft: Path, final: Path) -> None:
    """Put ``draft`` in the place of ``final``. Files there that are not DeepSpeed's stay.

    If ``final`` is missing or empty, or holds a checkpoint, it changes in one step. If it holds only files of others,
    the files of the draft are moved into it: ``latest`` does not name it yet, and a writer of those files goes on.
    """
    await storage.make_dirs(final.parent)
    try:
        await storage.replace(draft, final)
    except WriteError as error:
        if error.errno not in _IN_THE_WAY:
            raise
    else:
        await sync_parents(storage, draft, final)
        return
    if any(name.endswith(_FILES) for name in await names_in(storage, final)):
        await _exchange(executor, storage, draft, final)
        return
    for name in await names_in(storage, draft):
        await storage.replace(draft / name, final / name)
    await storage.sync_dir(final)


async def _exchange(executor: Executor, storage: Storage, draft: Path, final: Path) -> None:
    """Exchange a checkpoint for a newer one of the same tag. Files of others are in both before the exchange."""
    await run_blocking(executor, _link_others, final, draft)
    kept = draft.with_name(_REPLACED)
    replaced = draft
    try:
        await storage.exchange(draft, final)
    except RootError:  # this file system cannot: the older checkpoint is hidden for a moment
        replaced = kept
        await storage.rename(final, replaced)
        await storage.rename(draft, final)
    await sync_parents(storage, draft, final)
    try:
        await run_blocking(executor, _link_others, replaced, final)  # what was made in the meantime
    except OSError:
        if replaced != kept:
            await storage.rename(replaced, kept)
        raise
    if replaced == kept:
        await storage.rename(kept, draft)


def _is_file_of_deepspeed(path: Path) -> bool:
    return path.parent == Path() and path.name.endswith(_FILES)


def _link_others(source: Path, target: Path) -> None:
    """Give ``target`` the files of ``source`` that are not DeepSpeed's, if it has none of that name, durably.

    Raises:
        WriteError: the disk failed.
    """
    with translate_errors(WriteError, target):
        checkpoint_folder.link_missing(source, target, but=_is_file_of_deepspeed)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def remove_draft(path: Path) -> None:
    """Remove a draft, unless it holds what a checkpoint has replaced. A failure is only logged."""
    try:
        if (path / _REPLACED).exists():
            _log.warning("%s stays: it holds what was in the place of a checkpoint when its save ended", path)
        else:
            with translate_errors(WriteError, path):
                if path.exists():
                    shutil.rmtree(path)
    except (AioCkptError, OSError) as error:
        _log.warning("%s stays: it could not be removed: %s", path, error)


def clear_leftovers(save_dir: Path, here: Owner) -> None:
    """Remove the drafts of processes that are proven dead."""
    for path in save_dir.glob(f"{DRAFTS}*"):
        owner = owner_by_name(path.name, here)
        if owner is not None and owner.is_proven_dead(here):
            remove_draft(path)
        elif owner is None:
            _log.warning("%s stays: its process was not on this machine; delete it if no job writes there", path)


async def _replace_file(storage: Storage, path: Path, folder: Path, data: bytes) -> None:
    """Replace a file in one step, durably. ``folder`` holds the new one until then."""
    await storage.make_dirs(folder)
    await storage.write_file(folder / path.name, data)
    await storage.replace(folder / path.name, path)
    await storage.sync_dir(path.parent)
