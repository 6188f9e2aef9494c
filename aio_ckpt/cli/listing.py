"""Contents of checkpoints and roots for ``aio-ckpt ls`` and ``inspect``, and the cells of their tables.

Reads manifests, never tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from aio_ckpt.checkpoint.catalog import global_shape
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.cli.console import printable
from aio_ckpt.commit.discovery import MAX_RETRIES, CommittedCheckpoint, discover
from aio_ckpt.commit.retention import protected_steps
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST, decode_root
from aio_ckpt.format.names import ABANDONED_DIR, CORRUPT_DIR, PENDING_DIR, StepNames
from aio_ckpt.reports import amount
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage, names_in, read_small_file

__all__ = [
    "Contents",
    "LeafRow",
    "RootRow",
    "RootTable",
    "bytes_of",
    "checkpoint_table",
    "describe",
    "describe_newest",
    "extra_text",
    "leaf_table",
    "list_root",
    "locate",
    "time_text",
]

_Cells: TypeAlias = tuple[str, ...]
_EXTRA_CHARS = 40
"""Width of the column ``extra`` of ``ls``, in characters."""


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
    is_protected: bool = False
    """Whether retention never deletes it."""
    fault: str | None = None
    """Why its root manifest cannot be read; None if it can."""


class RootTable(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a root."""

    root: str
    """Absolute path of the root."""
    checkpoints: tuple[RootRow, ...]
    """Committed, ascending by step."""
    pending: tuple[str, ...]
    """Directories of saves that are being written, or whose writer died."""
    abandoned: tuple[str, ...]
    """Directories that ``rollback`` set aside."""
    quarantined: tuple[str, ...]
    """Directories of damaged checkpoints that a load set aside."""


class LeafRow(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a checkpoint."""

    name: str
    """Fully qualified name."""
    kind: str
    """``tensor`` or ``object``."""
    dtype: str | None
    """Dtype without ``torch.``; None for an object."""
    shape: tuple[int, ...] | None
    """Global shape; None for an object."""
    nbytes: int
    """Length of the whole tensor, or of the stored object, in bytes."""
    shards: int
    """Number of items that hold it."""
    tied_to: str | None
    """Name under which the same item is stored; None unless this is a second name."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of one checkpoint."""

    path: str
    step: int | None
    """Step; None if neither manifest nor directory name holds one."""
    format: str
    """``aio_ckpt 1.0`` or ``plain DCP``."""
    written_by: dict[str, str]
    """Versions of aio_ckpt, torch and python; empty for plain DCP."""
    created_unix: float | None
    """Seconds since 1970; None for plain DCP."""
    world_size: int | None
    """Ranks that wrote it; None for plain DCP."""
    tensor_bytes: int
    """Of all tensors, tied ones once."""
    object_bytes: int
    """Of all objects as stored."""
    extra: dict[str, Any]
    """What ``save(extra=)`` was given; empty for plain DCP."""
    leaves: tuple[LeafRow, ...]
    """Leaves, sorted by name."""


async def list_root(storage: Storage, executor: Executor, root: Path, names: StepNames) -> RootTable:
    """List every checkpoint under ``root``. The row of a damaged manifest holds its fault.

    Raises:
        ReadError: the root cannot be read.
        ConfigError: ``root`` is a checkpoint, no root.
    """
    await storage.list_dir(root)  # raises for a missing root, which would otherwise look empty
    marked = await protected_steps(storage, root)
    rows = [
        await _root_row(storage, executor, found, is_protected=found.step in marked)
        for found in await discover(storage, root, names)
    ]
    if not rows and await _is_checkpoint(storage, root):
        raise ConfigError(
            f"{root} is a checkpoint, no root: 'aio-ckpt inspect {root}' shows it, 'aio-ckpt ls {root.parent}' lists it"
        )
    return RootTable(
        root=str(root),
        checkpoints=tuple(row for row in rows if row is not None),
        pending=await _below(storage, root, PENDING_DIR),
        abandoned=await _below(storage, root, ABANDONED_DIR),
        quarantined=await _below(storage, root, CORRUPT_DIR),
    )


async def _below(storage: Storage, root: Path, directory: str) -> tuple[str, ...]:
    """Return the entries of one of the engine's own directories, as paths below the root."""
    return tuple(f"{directory}/{name}" for name in await names_in(storage, root / directory))


async def _root_row(
    storage: Storage, executor: Executor, found: CommittedCheckpoint, *, is_protected: bool
) -> RootRow | None:
    """Return the row of one checkpoint; None if its writer has deleted it since it was found."""
    step, path = found.step, str(found.path)
    try:
        nbytes = await run_blocking(executor, bytes_of, found.path)
    except FileNotFoundError:
        return None
    try:
        data = await read_small_file(storage, found.path / ROOT_MANIFEST)
        root = None if data is None else decode_root(data, name=ROOT_MANIFEST)
    except AioCkptError as error:
        return RootRow(step=step, path=path, nbytes=nbytes, is_protected=is_protected, fault=str(error))
    if root is None:
        if not await storage.exists(found.path):
            return None
        return RootRow(step=step, path=path, nbytes=nbytes, is_protected=is_protected)
    return RootRow(
        step=step,
        path=path,
        nbytes=nbytes,
        is_protected=is_protected,
        metrics=root.metrics,
        extra=root.extra,
        world_size=root.world_size,
        torch=root.written_by.get("torch"),
        created_unix=root.created_unix,
    )


def bytes_of(directory: Path) -> int:
    """Return the length of all files in ``directory``, in bytes."""
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))


async def locate(storage: Storage, path: Path, names: StepNames) -> Sequence[Path]:
    """Return the checkpoint at ``path``, or the checkpoints of the root at ``path``, ascending by step.

    Raises:
        CheckpointNotFoundError: ``path`` is neither.
    """
    if await _is_checkpoint(storage, path):
        return [path]
    found: list[Path] = []
    for _ in range(MAX_RETRIES):
        steps = {name: step for name in await storage.list_dir(path) if (step := names.step(name)) is not None}
        paths = [path / name for name in sorted(steps, key=steps.__getitem__)]
        found = [each for each in paths if await _is_checkpoint(storage, each)]
        if all([await storage.exists(each) for each in paths if each not in found]):
            break  # otherwise a writer deleted a listed directory: list again
    if not found:
        raise CheckpointNotFoundError(f"{path}: neither a checkpoint nor a root that holds one")
    return found


async def _is_checkpoint(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` holds ``.metadata`` or a root manifest. If only the latter, verify reports the fault."""
    return await storage.exists(path / METADATA_FILE) or await storage.exists(path / ROOT_MANIFEST)


async def describe_newest(storage: Storage, executor: Executor, path: Path, names: StepNames) -> Contents:
    """Describe the checkpoint at ``path``, or the newest of the root at ``path``. A writer may delete meanwhile.

    Raises:
        CheckpointNotFoundError: ``path`` is neither.
        CorruptCheckpointError, FormatVersionError: the manifests are damaged, or of a newer version.
    """
    for _ in range(MAX_RETRIES):
        newest = (await locate(storage, path, names))[-1]
        before = await storage.status(newest)
        try:
            return await describe(storage, executor, newest, names)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            if before is not None and await storage.status(newest) == before:
                raise  # if it was deleted or replaced, describe the next one
    raise CheckpointNotFoundError(
        f"{path}: each of {MAX_RETRIES} checkpoints was deleted by its writer when it was read"
    )


async def describe(storage: Storage, executor: Executor, path: Path, names: StepNames) -> Contents:
    """Describe the checkpoint at ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint.
        CorruptCheckpointError, FormatVersionError: the manifests are damaged, or of a newer version.
    """
    checkpoint = await open_checkpoint(storage, path, executor=executor)
    leaves = await run_blocking(executor, _leaves, checkpoint)
    root = checkpoint.root
    once = [leaf for leaf in leaves if leaf.tied_to is None]
    return Contents(
        path=str(path),
        step=checkpoint.step if root else names.step(path.name),
        format=f"aio_ckpt {root.format[0]}.{root.format[1]}" if root else "plain DCP",
        written_by=root.written_by if root else {},
        created_unix=root.created_unix if root else None,
        world_size=root.world_size if root else None,
        tensor_bytes=sum(leaf.nbytes for leaf in once if leaf.kind == "tensor"),
        object_bytes=sum(leaf.nbytes for leaf in once if leaf.kind == "object"),
        extra=dict(checkpoint.extra),
        leaves=leaves,
    )


def _leaves(checkpoint: Checkpoint) -> tuple[LeafRow, ...]:
    catalog = checkpoint.catalog
    rows: list[LeafRow] = []
    first_names: dict[tuple[int, ...], str] = {}
    for name, shards in catalog.shards.items():
        first = first_names.setdefault(tuple(map(id, shards)), name)
        shape = global_shape(shards)
        rows.append(
            LeafRow(
                name=name,
                kind="tensor",
                dtype=str(shards[0].dtype).removeprefix("torch."),
                shape=shape,
                nbytes=math.prod(shape) * shards[0].dtype.itemsize,
                shards=len(shards),
                tied_to=first if first != name else None,
            )
        )
    for name, stored in catalog.objects.items():
        first = first_names.setdefault((id(stored),), name)
        tied_to = first if first != name else None
        rows.append(
            LeafRow(name=name, kind="object", dtype=None, shape=None, nbytes=stored.nbytes, shards=1, tied_to=tied_to)
        )
    return tuple(rows)


# -- tables -----------------------------------------------------------------------------------------


def checkpoint_table(rows: Sequence[RootRow]) -> tuple[_Cells, list[_Cells]]:
    """Return the titles and the rows of the table of ``aio-ckpt ls``."""
    titles: _Cells = ("directory", "written", "torch", "step", "bytes", "ranks", "metrics", "kept")
    cells = [*map(_checkpoint_cells, rows)]
    if any(row.extra for row in rows):
        titles = (*titles, "extra")
        cells = [(*shown, _extra_cell(row)) for shown, row in zip(cells, rows, strict=True)]
    return titles, cells


def _checkpoint_cells(row: RootRow) -> _Cells:
    ranks = "-" if row.world_size is None else str(row.world_size)
    written, torch = time_text(row.created_unix), printable(row.torch or "-")
    values = ((name, "not finite" if value is None else f"{value:.6g}") for name, value in row.metrics.items())
    metrics = printable(" ".join(f"{name}={value}" for name, value in values)) or "-"
    kept = "protected" if row.is_protected else "-"
    return printable(Path(row.path).name), written, torch, str(row.step), amount(row.nbytes), ranks, metrics, kept


def _extra_cell(row: RootRow) -> str:
    words = extra_text(row.extra)
    return words if len(words) <= _EXTRA_CHARS else words[: _EXTRA_CHARS - 3] + "..."


def extra_text(extra: Mapping[str, Any]) -> str:
    """Return what ``save(extra=)`` was given as ``loss=1.23 epoch=4``; - if it was given nothing."""
    return printable(" ".join(f"{name}={_extra_value(value)}" for name, value in extra.items())) or "-"


def _extra_value(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


def time_text(unix: float | None) -> str:
    """Return a time in seconds since 1970 as local date and time; - for None."""
    if unix is None:
        return "-"
    try:
        return datetime.fromtimestamp(unix).astimezone().isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):  # a number that no clock ever showed
        return "?"


def leaf_table(leaves: Sequence[LeafRow]) -> tuple[_Cells, list[_Cells]]:
    """Return the titles and the rows of the table of ``aio-ckpt inspect``."""
    return ("name", "dtype", "shape", "bytes", "shards"), [*map(_leaf_cells, leaves)]


def _leaf_cells(leaf: LeafRow) -> _Cells:
    shape = "-" if leaf.shape is None else f"({', '.join(map(str, leaf.shape))})"
    if leaf.tied_to is None:
        name, nbytes = leaf.name, f"{leaf.nbytes:,}"
    else:
        name, nbytes = f"{leaf.name} = {leaf.tied_to}", "-"
    return printable(name), leaf.dtype or leaf.kind, shape, nbytes, str(leaf.shards)
