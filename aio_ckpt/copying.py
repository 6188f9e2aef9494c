"""Copy a checkpoint into another root, on a disk or in an object store: pending first, read back, then published."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import anyio

from aio_ckpt.checkpoint.verify import verify_files
from aio_ckpt.commit.discovery import checkpoint_at, discover
from aio_ckpt.commit.in_place import LOCK, PENDING
from aio_ckpt.commit.owner import pending_path
from aio_ckpt.commit.publish import publish, publish_over
from aio_ckpt.commit.root_claim import Check, Claim
from aio_ckpt.commit.root_writer import as_writer
from aio_ckpt.commit.step_numbers import check_step_number
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    ReadError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.format.checkpoint_files import METADATA_FILE, save_of_file, save_of_root_manifest
from aio_ckpt.format.root_names import ENGINE_DIR, ENGINE_DIRS, LOCK_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line
from aio_ckpt.remote_path import RemotePath, check_place
from aio_ckpt.reports import CopyReport
from aio_ckpt.runtime.one_call import call_on_own_threads
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.directories import make_dirs
from aio_ckpt.storage.durability import sync_dir, sync_file
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.object_store import AnyStorage, ObjectStorage, Unpublished
from aio_ckpt.storage.os_errors import translate_errors
from aio_ckpt.storage.small_files import read_root, save_of

__all__ = ["copy"]

OnProgress: TypeAlias = Callable[[int, int], object]
"""Function that gets the bytes done so far, and those in all."""
_READERS, _FILES_AT_ONCE = 4, 3
"""Threads, and files that are copied at once: one thread is left for the heartbeat of the claim."""
_PART_BYTES = 8 << 20
"""Bytes that one call of the system copies."""


def copy(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    step_dir: str = EngineConfig().step_dir,
) -> CopyReport:
    """Copy the checkpoint in the directory ``path`` into another root, durably, and read the copy back. Blocks.

    One of both may be the URL of an object store (``s3://``, ``gs://``, ``az://``; needs ``aio-ckpt[remote]``).
    The copy becomes visible as a whole, once every byte of it was verified. It may run in a thread of a trainer.

    Args:
        path: directory of a checkpoint, of an engine or of stock ``dcp.save``; of a root, give one of its steps.
        root: the other root. It is made if it does not exist.
        step: its step there, if neither manifest nor directory tells it.
        step_dir: names of the steps of both roots, as in :class:`EngineConfig`.

    Raises:
        CheckpointNotFoundError: ``path`` holds no checkpoint, or its writer deleted it meanwhile.
        CheckpointExistsError: ``root`` holds the step.
        StepOrderError: nothing tells the step, or the manifest tells another one than ``step``.
        CorruptCheckpointError: the copy does not verify; nothing becomes visible.
        RootError, WriteError, ReadError: the root is held by a writer, or the system failed.
        ConfigError: a path is none, both are in an object store, or ``root`` is a checkpoint or has the name of a step.
    """
    source, target = check_place("path", path), check_place("root", root, of="a root")
    names = StepNames(EngineConfig(step_dir=step_dir).step_dir)
    number = None if step is None else check_step_number(step)

    async def work(executor: Executor) -> CopyReport:
        storage = AnyStorage(executor)
        await checkpoint_at(storage, source, names)
        return await copy_checkpoint(
            storage, executor, source, target, names, step=number, on_progress=lambda done, total: None
        )

    return call_on_own_threads(work, _READERS)


async def copy_checkpoint(
    storage: AnyStorage,
    executor: Executor,
    source: Path,
    root: Path,
    names: StepNames,
    *,
    step: int | None,
    on_progress: OnProgress,
) -> CopyReport:
    """Copy the checkpoint at ``source`` into ``root``, durably and as a whole.

    Args:
        names: of the steps of both.
        step: its step there; None for the one that manifest or directory tell.
        on_progress: called with the bytes done so far, and those in all: each is copied, then verified.

    Raises:
        ConfigError: both are in an object store, or ``root`` is a checkpoint or has the name of a step.
        CheckpointExistsError, StepOrderError, CorruptCheckpointError, RootError, WriteError, ReadError: see
            :func:`copy`.
    """
    if isinstance(source, RemotePath) and isinstance(root, RemotePath):
        raise ConfigError(f"{root}: both are in an object store: copy to a disk first, and from there")
    if isinstance(root, RemotePath) and not root.key:
        raise ConfigError(f"{root}: a whole bucket, which is no root: give a place in it, such as {root}/run")
    await _check_is_root(storage, source, root, names)
    number = await _step_of(storage, source, names, step)
    files = await copied_files(storage, executor, source)
    total, done = 2 * sum(files.values()), 0

    def advance(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        on_progress(done, total)

    advance(0)
    wanted = _CopyRequest(source=source, files=files, step=number, names=names)
    if isinstance(root, RemotePath):
        await _check_free(storage, root, names, number)
        final = await _copy_to_store(storage, executor, wanted, root, _nothing_to_check, advance)
    else:
        final = await _copy_to_disk(storage, executor, wanted, root, advance)
    on_progress(total, total)
    return CopyReport(step=number, source=source, path=final, nbytes=sum(files.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyRequest:
    """What is to be copied."""

    source: Path
    files: Mapping[str, int]
    """Name and length of each of its files."""
    step: int
    names: StepNames
    """Names of the steps of the other root."""
    replacing: str | None = None
    """Id of the copied save, if the copy takes the place of another save of the step."""


async def copy_as_writer(
    storage: AnyStorage,
    executor: Executor,
    source: Path,
    root: Path,
    names: StepNames,
    step: int,
    claim: Claim,
    advance: Callable[[int], None],
    *,
    replaces: bool,
) -> Path:
    """Do :func:`copy_checkpoint` for the holder of the claim of ``root``. Return the copy.

    ``replaces``: whether the copy takes the place of another save of the step, at once when it was verified. Otherwise,
    ``root`` holds no such step.
    """
    files, save_id = await copied_files(storage, executor, source), await save_of(storage, source)
    replacing = save_id if replaces else None
    wanted = _CopyRequest(source=source, files=files, step=step, names=names, replacing=replacing)
    if not isinstance(root, RemotePath):
        return await _copy_into(storage, executor, wanted, root, claim, advance)
    pending = pending_path(root, claim.owner, 1)
    if save_id is not None:
        await storage.begin_dir(pending, root / names.name(step), save_id)  # the next writer clears what a kill leaves
    try:
        return await _copy_to_store(storage, executor, wanted, root, claim.check, advance, pending)
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
            await storage.remove_tree(pending)  # files of the committed save stay


async def _copy_to_disk(
    storage: AnyStorage, executor: Executor, wanted: _CopyRequest, root: Path, advance: Callable[[int], None]
) -> Path:
    """Copy into a directory, as its only writer. Return the copy's directory."""
    is_new = not await storage.exists(root)
    if not is_new:
        await _check_free(storage, root, wanted.names, wanted.step)
    try:
        await make_root(executor, root)
        async with as_writer(storage, root, wanted.names, instead="aio-ckpt cp") as claim:
            await _check_free(storage, root, wanted.names, wanted.step)
            return await _copy_into(storage, executor, wanted, root, claim, advance)
    except BaseException:
        if is_new:
            _remove_if_empty(storage, root)
        raise


async def make_root(executor: Executor, root: Path) -> None:
    """Make a root that does not exist, durably. In a store, it exists once it holds an object."""
    if not isinstance(root, RemotePath):
        await run_blocking(executor, make_dirs, root)


async def _copy_into(
    storage: AnyStorage,
    executor: Executor,
    wanted: _CopyRequest,
    root: Path,
    claim: Claim,
    advance: Callable[[int], None],
) -> Path:
    """Copy into a root that this process has claimed: pending first, and published by the engine's own commit."""
    source, final = wanted.source, root / wanted.names.name(wanted.step)
    pending = pending_path(root, claim.owner, 1)
    await storage.make_dir(pending)
    try:
        if isinstance(source, RemotePath):
            store = storage.store_of(source)
            await _copy_each(wanted.files, lambda name: store.get_file(source / name, pending / name, advance))
        else:
            await _copy_each(
                wanted.files,
                lambda name: run_blocking(executor, _copy_file, source / name, pending / name, advance),
            )
        await run_blocking(executor, _sync_dirs, pending)
        await _check_copy(storage, executor, pending, wanted, advance)
        await claim.check()
        if wanted.replacing is None:
            await publish(storage, pending=pending, final=final)
        else:
            await publish_over(storage, pending=pending, final=final, save_id=wanted.replacing, check=claim.check)
    except BaseException as error:
        if not (isinstance(error, AioCkptError) and error.in_doubt):
            with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
                await storage.remove_tree(pending)
        raise
    return final


async def _nothing_to_check() -> None:
    """Stand in for the check of a claim. A copy by hand needs none in a store: it replaces and deletes nothing."""


async def _copy_to_store(
    storage: AnyStorage,
    executor: Executor,
    wanted: _CopyRequest,
    root: RemotePath,
    check: Check,
    advance: Callable[[int], None],
    pending: Path | None = None,
) -> Path:
    """Copy into an object store. Return the copy's directory.

    Root manifest and ``.metadata`` are put last, once all else was read back, and ``check`` has raised nothing. A copy
    that replaces another save is called ``pending`` until then.

    Raises:
        CheckpointExistsError: another copy was faster.
    """
    store, source, files = storage.store_of(root), wanted.source, wanted.files
    final = root / wanted.names.name(wanted.step)
    last = [*filter(save_of_root_manifest, files), METADATA_FILE]
    small = {name: await storage.read_file(source / name, max_bytes=files.get(name, 0)) for name in last}
    others = [name for name in files if name not in small]
    # Files of the caller have one name in all saves: they must not replace those of a save that is still committed.
    late = [name for name in others if save_of_file(name) is None] if wanted.replacing is not None else []

    async def put(names: Iterable[str]) -> None:
        # One at a time: the parts of a file are sent at once, and share the network.
        await _copy_each(names, lambda name: store.put_file(source / name, final / name, advance), at_once=1)

    try:
        await put(name for name in others if name not in late)
        unpublished = Unpublished(store, {final / name: data for name, data in small.items()})
        await _check_copy(unpublished, executor, final, wanted, advance)
        await check()
        *manifests, (_, metadata) = small.items()
        for name, data in manifests:
            await _put_once(store, final / name, data)
        if wanted.replacing is None:
            await _put_once(store, final / METADATA_FILE, metadata)
            await _check_still_whole(store, final, files)
        else:
            assert pending is not None
            await store.name_files(pending, late)
            await put(late)
            await store.write_file(pending / METADATA_FILE, metadata)
            await publish_over(storage, pending=pending, final=final, save_id=wanted.replacing, check=check)
    except CheckpointExistsError:
        raise  # that one may have files of this name
    except BaseException:
        with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
            for name in (*others, *small):
                if await store.exists(final / METADATA_FILE):  # of another copy; or the answer to the put was lost
                    break
                await store.remove_file(final / name)
        raise
    return final


async def _check_still_whole(store: ObjectStorage, final: RemotePath, files: Mapping[str, int]) -> None:
    """Raise WriteError if files of a copy are gone. It is no checkpoint any more then.

    Another copy of the same save, whose files have the same names, has failed meanwhile and removed its own.
    """
    left = await store.all_lengths(final)
    if gone := sorted(files.keys() - left.keys()):
        await store.remove_file(final / METADATA_FILE)
        text = f"another copy of this step has failed and removed {gone[0]} meanwhile: copy it again"
        raise WriteError(errno.ENOENT, text, str(final))


async def _copy_each(
    names: Iterable[str], copy_one: Callable[[str], Awaitable[None]], *, at_once: int = _FILES_AT_ONCE
) -> None:
    """Copy files, some at once. If one fails, those under way end before its error is raised: all are removed then."""
    left, failed = iter(names), list[Exception]()

    async def copy_some() -> None:
        for name in left:
            try:
                await copy_one(name)
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
            if failed:
                return

    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(copy_some)
    if failed:
        raise failed[0]


async def _put_once(store: ObjectStorage, path: Path, data: bytes) -> None:
    """Put an object. One that holds the same is taken for it: see :meth:`Bucket.create`.

    Raises:
        CheckpointExistsError: it is there and holds something else.
    """
    try:
        await store.write_file(path, data)
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        raise CheckpointExistsError(f"{path.parent}: another checkpoint of this step was faster") from error


def _remove_if_empty(storage: Storage, root: Path) -> None:
    """Remove a root that holds no step and no writer: this process made it."""
    with contextlib.suppress(AioCkptError, OSError):  # what is not empty stays
        if os.listdir(root) in ([], [ENGINE_DIR]):
            with storage.lock(root / LOCK_FILE) as lock:
                for name in ENGINE_DIRS:
                    with contextlib.suppress(FileNotFoundError):
                        (root / name).rmdir()
                lock.discard()
            (root / ENGINE_DIR).rmdir()
            root.rmdir()


async def _check_copy(
    storage: Storage, executor: Executor, copied: Path, wanted: _CopyRequest, advance: Callable[[int], None]
) -> None:
    """Read a copy back. Raises CorruptCheckpointError if it does not verify."""
    faults = await verify_files(
        storage, copied, step=wanted.step, executor=executor, readers=_READERS, on_progress=advance
    )
    if faults:
        raise CorruptCheckpointError(
            f"{wanted.source}: the copy does not verify: {faults[0]}: "
            f"{command_line('verify', wanted.source)} tells whether the source is damaged"
        )


async def _check_is_root(storage: Storage, source: Path, root: Path, names: StepNames) -> None:
    """Raise ConfigError if ``root`` is a checkpoint or shall become one, or lies in the ``source``."""
    if _without_dots(root).is_relative_to(_without_dots(source)) or await storage.exists(root / METADATA_FILE):
        raise ConfigError(f"{root}: is a checkpoint or lies in one: give a root, the directory that holds steps")
    if names.step(root.name) is not None and not (isinstance(root, RemotePath) or await storage.exists(root)):
        raise ConfigError(
            f"{root}: has the name of a step: give a root, the directory that holds steps: {root.parent}, or make "
            "this directory first"
        )


def _without_dots(path: Path) -> Path:
    return path if isinstance(path, RemotePath) else Path(os.path.normpath(path))


async def _step_of(storage: Storage, source: Path, names: StepNames, step: int | None) -> int:
    root = await read_root(storage, source)
    if root is not None and not root.is_of_step(step):
        raise StepOrderError(f"step={step}: {source} is step {root.step} by its manifest, and so is a copy of it")
    stored_step = (root.step if root is not None else 0) or names.step(source.name)  # 0 tells none
    number = stored_step if step is None else step
    if number is None:
        raise StepOrderError(f"{source}: nothing tells its step: give --step, or step=")
    return number


async def _check_free(storage: Storage, root: Path, names: StepNames, step: int) -> None:
    for found in await discover(storage, root, names):
        if found.step == step:
            raise CheckpointExistsError(f"{found.path}: step {step} is there already: delete it, or copy elsewhere")


async def copied_files(storage: AnyStorage, executor: Executor, source: Path) -> dict[str, int]:
    """Return name and length of each file below ``source``, but of those that a save under way there has made.

    Raises:
        ReadError: a directory cannot be listed, or a file cannot be looked at.
        WriteError: a symbolic link, a device, a pipe or a socket lies there; names it.
    """
    if isinstance(source, RemotePath):
        found = await storage.store_of(source).all_lengths(source)
    else:
        found = await run_blocking(executor, _files_below, source)
    return {name: nbytes for name, nbytes in found.items() if not _is_of_save(name)}


def _files_below(source: Path) -> dict[str, int]:
    def fail(error: OSError) -> None:
        raise error

    found: dict[str, int] = {}
    with translate_errors(ReadError, source):
        for directory, below, files in os.walk(source, onerror=fail):
            for name in sorted(below + files):
                path = Path(directory, name)
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[str(path.relative_to(source))] = status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    what = "a symbolic link" if path.is_symlink() else "no regular file"
                    remedy = "cp copies files alone, so that a copy needs nothing beside it: replace it by its file"
                    raise WriteError(errno.EINVAL, f"is {what}, and {remedy}, or move it away", str(path))
    return found


def _is_of_save(name: str) -> bool:
    """Return whether a save under way has made the file ``name`` of a checkpoint."""
    return name == LOCK or name.startswith((PENDING, f"{METADATA_FILE}."))


def _copy_file(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    """Copy and fsync a file, with its permissions and its modification time.

    Raises:
        ReadError: the source cannot be opened, as if its writer has deleted it.
        WriteError: the system failed; names both files, which sendfile and fsync do not.
    """
    with translate_errors(ReadError, source):
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            while part := os.sendfile(file.fileno(), descriptor, None, _PART_BYTES):
                advance(part)
            status = os.fstat(descriptor)
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            sync_file(file.fileno())
    except OSError as error:
        raise WriteError(error.errno, f"{error.strerror}, copying {source}", str(target)) from error
    finally:
        os.close(descriptor)


def _sync_dirs(pending: Path) -> None:
    for directory, _, _ in os.walk(pending, topdown=False):
        sync_dir(Path(directory))
