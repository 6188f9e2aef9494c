"""``cp``: copy a checkpoint into another root.

The copy is pending there first, is verified, and then published by the engine's own commit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aio_ckpt.cli.arguments import Directory, MistypedPathError, check_root, json_option, step_dir_option
from aio_ckpt.cli.console import OnProgress, Screen, bytes_progress, printable
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointExistsError,
    CorruptCheckpointError,
    ReadError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.format.checkpoint_files import METADATA_FILE, save_of_root_manifest
from aio_ckpt.format.names import ENGINE_DIR, ENGINE_DIRS, LOCK_FILE, StepNames
from aio_ckpt.remote_path import RemotePath, is_remote
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.checkpoint.verify import Fault
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage
    from aio_ckpt.storage.objects import AnyStorage

_READERS = 4
_PART_BYTES = 64 << 20
"""Bytes that one call of the system copies."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was copied and verified."""

    step: int
    source: str
    """Directory that was copied."""
    path: str
    """Committed directory in the other root."""
    nbytes: int
    """Length of all its files, in bytes."""


@click.command("cp", epilog="Example: aio-ckpt cp runs/ckpt/step_000000100 /backup/ckpt")
@click.argument("path", type=Directory(may_be_remote=True))
@click.argument("root", type=Directory(must_exist=False, may_be_remote=True))
@click.option("--step", type=click.IntRange(0), help="Its step there, if neither manifest nor directory tells it.")
@step_dir_option
@json_option
def cp_command(path: Path, root: Path, step: int | None, names: StepNames, *, as_json: bool) -> None:
    """Copy a checkpoint into another ROOT, and verify the copy.

    If PATH is a root, its newest checkpoint is copied. The copy becomes visible as a whole, once every
    byte is durable and was read back. ROOT is made if its parent exists. One of both may be
    in an object store: s3://BUCKET/RUN, gs://..., az://...
    """
    from aio_ckpt.cli.access import call, use_newest

    if is_remote(root):
        if is_remote(path):
            raise MistypedPathError(f"{root}: both are in an object store: copy to a disk first, and from there")
    elif not root.exists():
        if not root.parent.is_dir():
            raise MistypedPathError(f"{root}: {root.parent} does not exist either: make it first")
    elif os.listdir(root):
        check_root(root, names)
    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "copy and verify") as on_progress:

        async def work(storage: AnyStorage, executor: Executor) -> Copied:
            async def copy(newest: Path) -> Copied:
                copied = _copy_to_store if is_remote(root) else _copy
                return await copied(storage, executor, newest, root, names, step=step, on_progress=on_progress)

            return await use_newest(storage, path, names, copy)

        copied = call(work)
    if as_json:
        screen.json(copied)
    else:
        screen.line(
            f"step {copied.step}: {amount(copied.nbytes)} copied and verified, {printable(copied.path)}", style="green"
        )


async def _copy(
    storage: AnyStorage,
    executor: Executor,
    source: Path,
    root: Path,
    names: StepNames,
    *,
    step: int | None,
    on_progress: OnProgress,
) -> Copied:
    """Copy the checkpoint at ``source`` into ``root``, durably and as a whole.

    Args:
        step: its step there; None for the one that manifest or directory tell.
        on_progress: called with the bytes done so far, and those in all: each is copied, then verified.

    Raises:
        CheckpointExistsError: ``root`` holds the step.
        StepOrderError: nothing tells the step, or the manifest tells another one than ``step``.
        CorruptCheckpointError: the copy does not verify; nothing becomes visible.
        RootError, WriteError, ReadError: the root is held by a writer, the system failed, or something in the
            checkpoint is no regular file.
    """
    import anyio

    from aio_ckpt.checkpoint.verify import verify_checkpoint
    from aio_ckpt.cli.access import as_writer
    from aio_ckpt.commit.owner import pending_path
    from aio_ckpt.commit.publish import publish
    from aio_ckpt.runtime.portal import run_blocking
    from aio_ckpt.storage.paths import make_dirs

    number = await _step_of(storage, source, names, step)
    files = await copied_files(storage, executor, source)
    total, done = 2 * sum(files.values()), 0

    def advance(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        on_progress(done, total)

    is_new = not await storage.exists(root)
    if not is_new:
        await _check_free(storage, root, names, number)

    final = root / names.name(number)
    try:
        await run_blocking(executor, make_dirs, root)
        async with as_writer(storage, root, names, instead="aio-ckpt cp") as here:
            await _check_free(storage, root, names, number)
            pending = pending_path(root, here, 1)
            await storage.make_dir(pending)
            try:
                for name in files:
                    if isinstance(source, RemotePath):
                        await storage.store_of(source).get_file(source / name, pending / name, advance)
                    else:
                        await run_blocking(executor, _copy_file, source / name, pending / name, advance)
                await run_blocking(executor, _sync_dirs, pending)
                faults = await verify_checkpoint(
                    storage, pending, step=number, executor=executor, readers=_READERS, on_progress=advance
                )
                _check_none(faults, source)
                await publish(storage, pending=pending, final=final)
            except BaseException as error:
                if not (isinstance(error, AioCkptError) and error.in_doubt):
                    with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
                        await storage.remove_tree(pending)
                raise
    except BaseException:
        if is_new:
            _remove_if_empty(storage, root)
        raise
    on_progress(total, total)
    return Copied(step=number, source=str(source), path=str(final), nbytes=sum(files.values()))


async def _copy_to_store(
    storage: AnyStorage,
    executor: Executor,
    source: Path,
    root: Path,
    names: StepNames,
    *,
    step: int | None,
    on_progress: OnProgress,
) -> Copied:
    """Do :func:`_copy` into an object store. Root manifest and ``.metadata`` are put last, once all else was read back.

    Raises:
        CheckpointExistsError: ``root`` holds the step, or another copy was faster.
        StepOrderError, CorruptCheckpointError, WriteError, ReadError: see :func:`_copy`.
    """
    import anyio

    from aio_ckpt.checkpoint.verify import verify_checkpoint
    from aio_ckpt.storage.objects import Unpublished

    assert isinstance(root, RemotePath)
    store = storage.store_of(root)
    number = await _step_of(storage, source, names, step)
    files = await copied_files(storage, executor, source)
    total, done = 2 * sum(files.values()), 0

    def advance(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        on_progress(done, total)

    await _check_free(storage, root, names, number)
    final = root / names.name(number)
    last = [*filter(save_of_root_manifest, files), METADATA_FILE]
    small = {name: await storage.read_file(source / name, max_bytes=files.get(name, 0)) for name in last}
    others = [name for name in files if name not in small]
    try:
        for name in others:
            await store.put_file(source / name, final / name, advance)
        unpublished = Unpublished(store, {final / name: data for name, data in small.items()})
        faults = await verify_checkpoint(
            unpublished, final, step=number, executor=executor, readers=_READERS, on_progress=advance
        )
        _check_none(faults, source)
        try:
            for name, data in small.items():
                if name == METADATA_FILE or not await store.exists(final / name):
                    await store.write_file(final / name, data)
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise
            raise CheckpointExistsError(f"{final}: another copy of step {number} was faster") from error
    except CheckpointExistsError:
        raise  # what was put is what the other copy has put, too
    except BaseException:
        with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
            if not await store.exists(final / METADATA_FILE):  # the answer to the last call may be lost
                for name in (*others, *small):
                    await store.remove_file(final / name)
        raise
    on_progress(total, total)
    return Copied(step=number, source=str(source), path=str(final), nbytes=sum(files.values()))


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


def _check_none(faults: Sequence[Fault], source: Path) -> None:
    if faults:
        first = faults[0]
        raise CorruptCheckpointError(
            f"{source}: the copy does not verify: {first.file}: {first.message.removeprefix(f'{first.file}: ')}: "
            f"'aio-ckpt verify {source}' tells whether the source is damaged"
        )


async def _step_of(storage: Storage, source: Path, names: StepNames, step: int | None) -> int:
    from aio_ckpt.storage.small_files import read_root

    root = await read_root(storage, source)
    told = names.step(source.name) if root is None else root.step
    if root is not None and step not in (None, told):
        raise StepOrderError(f"--step={step}: {source} is step {told} by its manifest, and so is a copy of it")
    number = told if step is None else step
    if number is None:
        raise StepOrderError(f"{source}: nothing tells its step: give --step")
    return number


async def _check_free(storage: Storage, root: Path, names: StepNames, step: int) -> None:
    from aio_ckpt.commit.discovery import discover

    for found in await discover(storage, root, names):
        if found.step == step:
            raise CheckpointExistsError(f"{found.path}: step {step} is there already: delete it, or copy elsewhere")


async def copied_files(storage: AnyStorage, executor: Executor, source: Path) -> dict[str, int]:
    """Return name and length of each file below ``source``, but of those that a save under way there has made.

    Raises:
        ReadError: a directory cannot be listed, or a file cannot be looked at.
        WriteError: a symbolic link, a device, a pipe or a socket lies there; names it.
    """
    from aio_ckpt.runtime.portal import run_blocking

    if isinstance(source, RemotePath):
        found = await storage.store_of(source).all_lengths(source)
    else:
        found = await run_blocking(executor, _files_below, source)
    return {name: nbytes for name, nbytes in found.items() if not _is_of_save(name)}


def _files_below(source: Path) -> dict[str, int]:
    from aio_ckpt.storage.data_file import translate_errors

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
    from aio_ckpt.commit.in_place import LOCK, PENDING

    return name == LOCK or name.startswith((PENDING, f"{METADATA_FILE}."))


def _copy_file(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    """Copy and fsync a file, with its permissions and its modification time.

    Raises:
        ReadError: the source cannot be opened, as if its writer has deleted it.
        WriteError: the system failed; names both files, which sendfile and fsync do not.
    """
    from aio_ckpt.storage.data_file import translate_errors
    from aio_ckpt.storage.durability import sync_file

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
    from aio_ckpt.storage.durability import sync_dir

    for directory, _, _ in os.walk(pending, topdown=False):
        sync_dir(Path(directory))
