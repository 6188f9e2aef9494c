"""Contents of a checkpoint for ``aio-ckpt inspect``, and the filters of its table. Reads manifests, never tensors."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aio_ckpt.checkpoint.catalog import global_shape
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.commit.discovery import MAX_RETRIES, check_any_readable, has_vanished, passing_by_unreadable
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, MissingNameError, ReadError
from aio_ckpt.format.names import StepNames
from aio_ckpt.format.root_manifest import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage

T = TypeVar("T")


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
    metrics: dict[str, float | None]
    """What ``save(metrics=)`` was given; None stands for a value that is not finite."""
    extra: dict[str, Any]
    """What ``save(extra=)`` was given; empty for plain DCP."""
    leaves: tuple[LeafRow, ...]
    """Leaves, sorted by name."""

    def as_document(self) -> dict[str, Any]:
        """Return the fields by their names."""
        return msgspec.structs.asdict(self)


async def locate(storage: Storage, path: Path, names: StepNames) -> Sequence[Path]:
    """Return the checkpoint at ``path``, or the checkpoints of the root at ``path``, ascending by step.

    Raises:
        CheckpointNotFoundError: ``path`` is neither.
    """
    if await _is_checkpoint(storage, path):
        return [path]
    found: list[Path] = []
    passed: list[ReadError] = []
    for _ in range(MAX_RETRIES):
        steps = {name: step for name in await storage.list_dir(path) if (step := names.step(name)) is not None}
        found.clear()
        passed.clear()
        is_stale = False
        for each in (path / name for name in sorted(steps, key=steps.__getitem__)):
            with passing_by_unreadable(each, passed):
                if await _is_checkpoint(storage, each):
                    found.append(each)
                elif await has_vanished(storage, each):
                    is_stale = True
        if not is_stale:
            break  # otherwise a writer deleted a listed directory: list again
    check_any_readable(found, passed)
    if not found:
        raise CheckpointNotFoundError(f"{path}: neither a checkpoint nor a root that holds one")
    return found


async def _is_checkpoint(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` holds ``.metadata`` or a root manifest. If only the latter, verify reports the fault."""
    return await storage.exists(path / METADATA_FILE) or await storage.exists(path / ROOT_MANIFEST)


async def use_newest(storage: Storage, path: Path, names: StepNames, use: Callable[[Path], Awaitable[T]]) -> T:
    """Return the result of ``use`` with the checkpoint at ``path``, or with the newest of the root at ``path``.

    If its writer deletes or replaces it while ``use`` reads it, the newest one is looked for and used anew.

    Raises:
        CheckpointNotFoundError: ``path`` is neither; or it is a checkpoint, and its writer deleted it meanwhile.
        Exception: any other error of ``use``.
    """
    is_given = await _is_checkpoint(storage, path)
    for _ in range(MAX_RETRIES):
        newest = path if is_given else (await locate(storage, path, names))[-1]
        before = await storage.status(newest)
        try:
            return await use(newest)
        except (CheckpointNotFoundError, CorruptCheckpointError, ReadError) as error:
            after = await storage.status(newest)
            if is_given and after is None:
                raise CheckpointNotFoundError(f"{path}: was deleted by its writer while it was read") from error
            if before is not None and after == before:
                raise
    raise CheckpointNotFoundError(
        f"{path}: each of {MAX_RETRIES} checkpoints was deleted by its writer while it was read: protect a step first, "
        f"by 'aio-ckpt protect {path} STEP', and give its directory"
    )


async def describe_newest(storage: Storage, executor: Executor, path: Path, names: StepNames) -> Contents:
    """Describe the checkpoint at ``path``, or the newest of the root at ``path``. A writer may delete meanwhile.

    Raises:
        CheckpointNotFoundError: ``path`` is neither.
        CorruptCheckpointError, FormatVersionError: the manifests are damaged, or of a newer version.
    """
    return await use_newest(storage, path, names, lambda newest: describe(storage, executor, newest, names))


async def describe(storage: Storage, executor: Executor, path: Path, names: StepNames) -> Contents:
    """Describe the checkpoint at ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint.
        CorruptCheckpointError, FormatVersionError: the manifests are damaged, or of a newer version.
    """
    with naming_checkpoint(path):
        checkpoint = await open_checkpoint(storage, path, executor=executor)
        leaves = await run_blocking(executor, leaves_of, checkpoint)
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
        metrics=root.metrics if root else {},
        extra=dict(checkpoint.extra),
        leaves=leaves,
    )


def leaves_of(checkpoint: Checkpoint) -> tuple[LeafRow, ...]:
    """Return a row for each name of a checkpoint."""
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


# -- filters ----------------------------------------------------------------------------------------


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """All leaves whose names begin alike."""

    name: str
    """First parts of their names."""
    leaves: int
    """Number of leaves."""
    nbytes: int
    """Length of all of them, tied ones once, in bytes."""


def selected(leaves: Sequence[LeafRow], only: Sequence[str]) -> tuple[LeafRow, ...]:
    """Return the leaves that ``only`` names: leaves, branches above them, or patterns with ``*``. Empty: all.

    Raises:
        MissingNameError: one of ``only`` selects nothing.
    """
    kept = set[str]()
    for wanted in only:
        found = {leaf.name for leaf in leaves if _is_selected(leaf.name, wanted)}
        if not found:
            close = difflib.get_close_matches(wanted, {part for leaf in leaves for part in _above(leaf.name)}, n=3)
            hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise MissingNameError(f"{wanted!r} is no leaf and no branch of the checkpoint{hint}")
        kept |= found
    return tuple(leaf for leaf in leaves if leaf.name in kept) if only else tuple(leaves)


def _is_selected(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.") or ("*" in wanted and fnmatch.fnmatchcase(name, wanted))


def _above(name: str) -> list[str]:
    """Return a name and the branches above it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def branches_of(leaves: Sequence[LeafRow], depth: int) -> tuple[Branch, ...]:
    """Return the leaves summed by the first ``depth`` parts of their names, in their order."""
    found: dict[str, list[LeafRow]] = {}
    for leaf in leaves:
        found.setdefault(_above(leaf.name)[:depth][-1], []).append(leaf)
    return tuple(
        Branch(name=name, leaves=len(below), nbytes=sum(leaf.nbytes for leaf in below if leaf.tied_to is None))
        for name, below in found.items()
    )
