"""Contents of a root: its checkpoints, which of them are newest, best, protected and damaged, and what was set aside.

Reads manifests, never data, and needs no torch unless a checkpoint looks damaged.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aio_ckpt.cli.access import all_steps, unless_replaced
from aio_ckpt.cli.texts import printable
from aio_ckpt.commit.discovery import CommittedCheckpoint
from aio_ckpt.commit.owner import Owner, owner_by_name
from aio_ckpt.commit.protection import protected_steps
from aio_ckpt.commit.retention import best
from aio_ckpt.commit.root_claim import claim_holder
from aio_ckpt.config import KeepBest
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, MismatchError, ReadError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, root_manifest_name
from aio_ckpt.format.root_manifest import FileEntry, RootManifest, data_files_of
from aio_ckpt.format.root_names import ABANDONED_DIR, CLAIM_FILE, CORRUPT_DIR, ENGINE_DIR, PENDING_DIR, TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.futures import run_all
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.storage.small_files import read_root

_log = logging.getLogger("aio_ckpt")
STEPS_AT_ONCE = 8
"""Steps that are read at a time. A store or a server takes its time for each file."""
_MANIFESTS_AT_ONCE = 8
"""Manifests of one step that are read at a time."""


class RootRow(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint of a root."""

    step: int
    """Step in the name of the directory."""
    path: str
    """Directory of the checkpoint."""
    nbytes: int
    """Length of all its files, in bytes."""
    world_size: int | None = None
    """Ranks that wrote it; None for plain DCP."""
    torch: str | None = None
    """Version of torch that wrote it; None if the manifest does not hold it."""
    created_unix: float | None = None
    """Seconds since 1970; None for plain DCP."""
    metrics: dict[str, float | None] = {}
    """What ``save(metrics=)`` was given; None stands for a value that is not finite."""
    extra: dict[str, Any] = {}
    """What ``save(extra=)`` was given."""
    is_newest: bool = False
    best_of: str | None = None
    """Rule by which it is the best step: ``lowest loss``; None if it is not."""
    is_protected: bool = False
    is_damaged: bool = False
    """Whether its manifests or the lengths of its files are not as written. Data is not read."""
    fault: str | None = None
    """What is damaged, or why its manifests cannot be read; None if nothing is known to be wrong."""


class RootTable(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a root."""

    root: str
    """Absolute path of the root."""
    checkpoints: tuple[RootRow, ...]
    """Committed, ascending by step."""
    pending: tuple[str, ...]
    """Directories of saves that are being written, or whose writer died."""
    pending_owners: tuple[str, ...]
    """Of each of ``pending``, in words: who writes it, whether that process lives, what becomes of the directory."""
    abandoned: tuple[str, ...]
    """Directories that ``rollback`` set aside."""
    quarantined: tuple[str, ...]
    """Directories of damaged checkpoints that a load set aside."""
    nbytes: int
    """Length of all checkpoints, in bytes."""


def metric_fault(metric: str, rows: Iterable[RootRow]) -> str:
    """Return which metrics the steps that can be read have if none has ``metric``; '' if one has it."""
    known = sorted({name for row in rows for name in row.metrics})
    if metric in known:
        return ""
    remedy = f": give one of {', '.join(map(printable, known))}" if known else ""
    return f"no step has the metric {printable(metric)}{remedy}"


async def list_root(
    storage: Storage, executor: Executor, root: Path, names: StepNames, *, rule: KeepBest | None
) -> RootTable:
    """List every checkpoint under ``root``, with its faults.

    Args:
        rule: how the best step is found; None for the lowest value of the first metric that a step has.

    Raises:
        ReadError: the root cannot be read.
    """
    rows = await rows_of(storage, executor, root, names)
    listed = await _below(storage, root, PENDING_DIR)
    pending = tuple([name for name in listed if await storage.has_begun(root / name)])  # some stores list empty ones
    here, holder = Owner.of_this_process(), await claim_holder(storage, root) if pending else None
    claim = None if holder is None else await storage.status(root / CLAIM_FILE)
    heartbeat = "" if claim is None else f", {max(0.0, time.time() - claim.modified_unix):.0f} s since its heartbeat"
    return RootTable(
        root=str(root),
        checkpoints=_marked(rows, rule),
        pending=pending,
        pending_owners=tuple(_owner_words(Path(name).name, holder, here, heartbeat) for name in pending),
        abandoned=await _below(storage, root, ABANDONED_DIR),
        quarantined=await _below(storage, root, CORRUPT_DIR),
        nbytes=sum(row.nbytes for row in rows),
    )


async def rows_of(storage: Storage, executor: Executor, root: Path, names: StepNames) -> list[RootRow]:
    """Return a row for each committed checkpoint, and for each that has lost its ``.metadata``, ascending by step."""
    marked = await protected_steps(storage, root)
    found = await all_steps(storage, root, names)
    works = [functools.partial(_row, storage, executor, each, is_protected=each.step in marked) for each in found]
    return [row for row in await run_all(works, at_once=STEPS_AT_ONCE) if row is not None]


async def _below(storage: Storage, root: Path, directory: str) -> tuple[str, ...]:
    """Return the entries of one of the engine's own directories, as paths below the root."""
    return tuple(f"{directory}/{name}" for name in await names_in(storage, root / directory))


def _owner_words(pending: str, holder: Owner | None, here: Owner, heartbeat: str) -> str:
    """Return what is known of the writer of a pending directory.

    ``holder`` is the one that claims the root, and ``heartbeat`` tells when it last did so, by this host's clock.
    """
    is_holder = holder is not None and pending.startswith(f"{holder.session}-")
    owner = holder if is_holder else owner_by_name(pending, here)
    if owner is None:
        return "its writer is unknown: the next engine that saves clears it"
    whose = f"its writer, {owner.process}"
    if owner.runs_here(here):
        return f"{whose}, runs"
    if owner.is_proven_dead(here):
        return f"{whose}, is dead: the next engine that saves clears it"
    if is_holder:
        return f"{whose}, claims the root{heartbeat}"
    return f"{whose}, has lost the root: the next engine that saves clears it"


async def _row(
    storage: Storage, executor: Executor, found: CommittedCheckpoint, *, is_protected: bool
) -> RootRow | None:
    """Return the row of one checkpoint; None if its writer has deleted it since it was found."""

    async def row() -> RootRow | None:
        try:
            return await _row_now(storage, executor, found, is_protected=is_protected)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            # Another user's checkpoint must not hide the others.
            return RootRow(step=found.step, path=str(found.path), nbytes=0, is_protected=is_protected, fault=str(error))

    return await unless_replaced(storage, found.path, row, lambda row: row is not None and row.fault is None)


async def _row_now(
    storage: Storage, executor: Executor, found: CommittedCheckpoint, *, is_protected: bool
) -> RootRow | None:
    lengths = await storage.lengths(found.path)
    root: RootManifest | None = None
    fault, is_damaged = None, False
    try:
        root = await read_root(storage, found.path)
        if root is not None:
            await check_files(storage, found.path, root, found.step, lengths)
        elif not await storage.exists(found.path):
            return None
        else:
            fault = await _plain_fault(storage, executor, found.path, lengths)
            is_damaged = bool(fault)
    except ReadError:
        raise
    except AioCkptError as error:
        fault, is_damaged = str(error).removeprefix(f"{found.path}/"), isinstance(error, CorruptCheckpointError)
    return RootRow(
        step=found.step,
        path=str(found.path),
        nbytes=sum(lengths.values()),
        world_size=root.world_size if root else None,
        torch=root.written_by.get("torch") if root else None,
        created_unix=root.created_unix if root else None,
        metrics=root.metrics if root else {},
        extra=root.extra if root else {},
        is_protected=is_protected,
        is_damaged=is_damaged,
        fault=fault or None,
    )


async def _plain_fault(storage: Storage, executor: Executor, path: Path, lengths: Mapping[str, int]) -> str:
    """Return the first file of plain DCP that is missing or shorter than ``.metadata`` tells, in words.

    Returns '' if there is none.

    Raises:
        CorruptCheckpointError: ``.metadata`` is damaged, or a manifest is missing; names the file.
        FormatVersionError: a newer torch wrote ``.metadata``.
    """
    from aio_ckpt.checkpoint.open import open_checkpoint  # needs torch

    checkpoint = await open_checkpoint(storage, path, executor=executor)
    metadata = await run_blocking(executor, lambda: checkpoint.metadata)
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, nbytes in sorted(needed.items()):
        there = lengths.get(name)
        if there is None:  # below a directory, or a link
            there = await _length(storage, path / name)
        if there is None:
            return f"{name}: missing, although {METADATA_FILE} names it"
        if there < nbytes:
            return f"{name}: {there} bytes long, and {METADATA_FILE} names {nbytes}"
    return ""


async def _length(storage: Storage, path: Path) -> int | None:
    try:
        file = await storage.open_data_file(path)
    except ReadError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    await file.close()
    return file.nbytes


# -- marks ------------------------------------------------------------------------------------------


def _marked(rows: Sequence[RootRow], rule: KeepBest | None) -> tuple[RootRow, ...]:
    if rule is None:
        metric = next((name for row in rows for name in row.metrics), None)
        rule = None if metric is None else KeepBest(metric=metric)
    ranked = (
        []
        if rule is None
        else best({row.step: row.metrics.get(rule.metric) for row in rows if row.fault is None}, rule)
    )
    newest = max((row.step for row in rows), default=None)
    words = "" if rule is None else f"{'lowest' if rule.mode == 'min' else 'highest'} {rule.metric}"
    return tuple(
        msgspec.structs.replace(row, is_newest=row.step == newest, best_of=words if row.step in ranked else None)
        for row in rows
    )


# -- disk usage -------------------------------------------------------------------------------------


class RootUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a root holds. All numbers are lengths of files, in bytes. What steps share counts once."""

    root: str
    """Absolute path of the root."""
    checkpoints: int
    """Committed steps."""
    protected: int
    """Those of them that are protected."""
    pending: int
    """Saves that are being written, or whose writer died; the next writer clears the dead ones."""
    abandoned: int
    """What ``rollback`` set aside. Nothing deletes it."""
    quarantined: int
    """Damaged checkpoints that a load set aside. Nothing deletes them."""
    trash: int
    """What is being deleted; the next writer deletes the rest."""
    other: int
    """Everything else in the root."""
    nbytes: int
    """All of these."""
    free: int | None
    """Bytes that the file system has free for this user; None in an object store."""


async def use_of(storage: AnyStorage, executor: Executor, root: Path, names: StepNames) -> RootUsage:
    """Return what ``root`` holds.

    In an object store, the files of a pending save and of what was set aside lie in the directories of their steps.
    """
    marked = await protected_steps(storage, root)
    steps = {found.path.name: found.step for found in await all_steps(storage, root, names)}
    if isinstance(root, RemotePath):
        lengths, free = _sums((await storage.store_of(root).all_lengths(root)).items()), None
    else:
        lengths = await run_blocking(executor, lambda: _sums(_lengths_below(root)))
        free = await storage.free_bytes(root)
    checkpoints = sum(lengths[name] for name in steps)
    set_aside = [lengths[name] for name in (PENDING_DIR, ABANDONED_DIR, CORRUPT_DIR, TRASH_DIR)]
    pending, abandoned, quarantined, trash = set_aside
    return RootUsage(
        root=str(root),
        checkpoints=checkpoints,
        protected=sum(lengths[name] for name, step in steps.items() if step in marked),
        pending=pending,
        abandoned=abandoned,
        quarantined=quarantined,
        trash=trash,
        other=lengths.total() - checkpoints - sum(set_aside),
        nbytes=lengths.total(),
        free=free,
    )


def _sums(lengths: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the bytes of each directory of a root and of the engine, by its name below the root."""
    sums: Counter[str] = Counter()
    for name, nbytes in lengths:
        first, _, rest = name.partition("/")
        sums[f"{first}/{rest.partition('/')[0]}" if first == ENGINE_DIR else first] += nbytes
    return sums


def _lengths_below(root: Path) -> Iterator[tuple[str, int]]:
    """Return name and length of each file below a directory. What is deleted meanwhile counts as far as it was seen.

    A file with several names, which steps share, counts under the first of them alone, in the order of the names.
    A directory of another user that cannot be listed counts as empty. The log names it.
    """

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            _log.warning("%s is not counted, because it cannot be listed: %s", error.filename, error.strerror)

    seen: set[tuple[int, int]] = set()
    for directory, below, files in os.walk(root, onerror=note):
        below.sort()
        links = [name for name in below if os.path.islink(os.path.join(directory, name))]
        for name in (*files, *links):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(path)
                inode = found.st_dev, found.st_ino
                if found.st_nlink == 1 or inode not in seen:
                    seen.add(inode)
                    yield os.path.relpath(path, root), found.st_size


# -- quick check ------------------------------------------------------------------------------------
# What it finds is damage. What it does not find may still be damaged: only ``verify`` reads every byte.


async def check_files(storage: Storage, path: Path, root: RootManifest, step: int, lengths: Mapping[str, int]) -> None:
    """Check the files of the checkpoint at ``path`` against its root manifest and its rank manifests.

    Args:
        step: step in the name of the directory.
        lengths: from :meth:`Storage.lengths`.

    Raises:
        CorruptCheckpointError: a file is missing, has another length, or a manifest has another CRC32; names the file.
        FormatVersionError: a newer version wrote a rank's manifest.
        ReadError: a file cannot be read.
    """
    if not root.is_of_step(step):
        raise MismatchError(
            f"{root_manifest_name(root.save_id)}: holds step {root.step}: the directory was renamed or swapped"
        )
    await _read(storage, path, root.metadata, lengths)

    async def data_files(entry: FileEntry) -> Sequence[FileEntry]:
        return data_files_of(await _read(storage, path, entry, lengths), name=entry.name)

    manifests = [functools.partial(data_files, entry) for entry in root.ranks]
    for files in await run_all(manifests, at_once=_MANIFESTS_AT_ONCE):
        for file in files:
            _check_length(file, lengths)


def _check_length(entry: FileEntry, lengths: Mapping[str, int]) -> None:
    nbytes = lengths.get(entry.name)
    if nbytes is None:
        beside = "" if entry.name == METADATA_FILE else ", although the manifests name it"
        raise MismatchError(f"{entry.name}: missing{beside}")
    if nbytes != entry.nbytes:
        raise MismatchError(f"{entry.name}: {nbytes} bytes long, {entry.nbytes} were written")


async def _read(storage: Storage, path: Path, entry: FileEntry, lengths: Mapping[str, int]) -> bytes:
    _check_length(entry, lengths)
    data = await storage.read_file(path / entry.name, max_bytes=entry.nbytes)
    if not entry.vouches_for(data):
        raise MismatchError(f"{entry.name}: does not match its CRC32 in the root manifest")
    return data
