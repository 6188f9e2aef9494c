"""Convert between checkpoints and files. Tensors lie in mapped files, never all at once in memory of their own.

A source is a checkpoint (ours or stock DCP's), a ``torch.save`` file, a safetensors file or the index of several.
A checkpoint is read, verified, into a file beside the result. A file is mapped where it is.
The result is written by an engine within a small budget, and appears as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.checkpoint.torch_file import check_torch_file
from aio_ckpt.cli.work.contents import Contents, LeafRow, describe_newest
from aio_ckpt.cli.work.loop import call
from aio_ckpt.cli.work.partial import PartialTensors
from aio_ckpt.commit.discovery import discover
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.file_save import file_target
from aio_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingNameError,
    StepOrderError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.format.constants import RAW_ALIGN_BYTES, align_up
from aio_ckpt.format.names import StepNames
from aio_ckpt.format.safetensors_file import LENGTH_BYTES, MAX_HEADER_BYTES, SUFFIX, parse_header
from aio_ckpt.leaves.objects import unsafe_reason
from aio_ckpt.match.rank_names import unexpected_names
from aio_ckpt.ranks.store_coordinator import SoloCoordinator
from aio_ckpt.restore.fetch_values import FetchedValues
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.restore.read import assemble, read_leaves, stored_names
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.state.names import is_selected
from aio_ckpt.storage.local import Storage
from aio_ckpt.sync import SyncCheckpointEngine

__all__ = ["Converted", "FileOptions", "convert_to_file", "convert_to_step"]

_BUDGET_BYTES = 256 << 20
"""Memory in which the result is staged. A larger state passes through it in waves."""
_GROUP_BYTES = 256 << 20
"""Least length of the tensors that are read together. A killed conversion loses as much."""
_ZIP = b"PK\x03\x04"
_OLD_FORMAT = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save files begin with, and those of torch before 1.6: a pickled number."""
_INDEX = SUFFIX + ".index.json"
OnProgress = Callable[[int, int], None]
_Check = Callable[[Storage, int | None, Mapping[str, object]], Awaitable[None]]
"""Gets the step and the objects of a checkpoint before its tensors are read. Raises if no result can be made."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A result that is durable."""

    source: str
    path: str
    """File, index of several files, or directory of the step."""
    nbytes: int
    """Length of the tensors in it, in bytes."""
    step: int | None
    """Step of the result, or of the source if the result is a file; None if nothing tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Options of a conversion to a file."""

    branch: str | None = None
    """Name of the branch that is converted; None: all. Names in the file begin below it."""
    max_shard_bytes: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A state whose tensors are mapped."""

    state: Any
    step: int | None
    path: Path


def convert_to_file(
    source: Path, out: Path, names: StepNames, options: FileOptions, *, on_progress: OnProgress
) -> Converted:
    """Write the state at ``source`` to the file ``out``, in the format of its suffix, verified and durable.

    What was read of a checkpoint stays in :func:`partial_path` of ``out`` if the process is killed or interrupted, and
    the next call takes it from there.

    ``on_progress`` gets the bytes done and those in all, while a checkpoint is read.

    Raises:
        CheckpointNotFoundError: ``source`` is no checkpoint, root or file of a state.
        CorruptCheckpointError: ``source`` does not verify; nothing was written.
        ConfigError: ``out`` is no place of a file.
        UnsafeObjectError: only running code can read an object of ``source``.
        UnsupportedLeafError: a safetensors file cannot hold a value.
        WriteError, ReadError: the system failed. What stood at ``out`` is unchanged.
    """
    file_target(str(out))
    is_safe = out.name.endswith(SUFFIX)

    async def check(_: Storage, __: int | None, objects: Mapping[str, object]) -> None:
        if is_safe:
            flat_tensors(objects)

    only = [options.branch] if options.branch else None
    with _opened(source, out, names, on_progress, only=only, check=check) as found, _writer(out.parent) as engine:
        state = _branch(found, options.branch) if options.branch else found.state
        obj = flat_tensors(state) if is_safe else state
        report = engine.save_file(obj, out, max_shard_bytes=options.max_shard_bytes, dtype=options.dtype).result()
    assert report is not None
    return Converted(source=str(found.path), path=str(report.path), nbytes=report.raw_bytes, step=found.step)


def convert_to_step(
    source: Path, root: Path, names: StepNames, *, step: int | None, on_progress: OnProgress
) -> Converted:
    """Save the state at ``source`` as a step of ``root``; ``step``: None for that of the source, or the next one.

    Raises:
        StepOrderError: the step does not exceed those of ``root``.
        Exception: as :func:`convert_to_file`.
    """

    async def check(storage: Storage, own: int | None, _: Mapping[str, object]) -> None:
        number = own if step is None else step
        there = [found.step for found in await discover(storage, root, names)]
        if number is not None and there and number <= max(there):
            raise StepOrderError(
                f"step {number} does not exceed step {max(there)}, the newest in {root}: give --step {max(there) + 1} "
                "or a higher one, or another root"
            )

    with _opened(source, root, names, on_progress, check=check) as found:
        state = found.state if isinstance(found.state, dict) else {"state": found.state}
        config = EngineConfig(budget_bytes=_BUDGET_BYTES, step_dir=names.step_dir)
        with SyncCheckpointEngine(root, config, coordinator=SoloCoordinator()) as engine:
            report = engine.save(state, step if step is not None else found.step).result()
    assert report is not None
    return Converted(source=str(found.path), path=str(report.path), nbytes=report.raw_bytes, step=report.step)


def _writer(folder: Path) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(folder, EngineConfig(budget_bytes=_BUDGET_BYTES), coordinator=SoloCoordinator())


def _branch(found: _Source, name: str) -> Any:
    """Return the value below the branch ``name``, as ``aio-ckpt inspect`` names it; keys may hold dots."""
    parts = _below(found.state, name)
    if not parts:
        raise MissingNameError(f"{found.path}: holds nothing named or below {name!r}{_known(found.state)}")
    if len(parts) == 1:
        return parts[0]
    merged: dict[Any, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping) or merged.keys() & part.keys():
            raise UnsupportedLeafError(
                f"{found.path}: several values lie at {name!r}: give a longer or shorter --branch"
            )
        merged |= part
    return merged


def _below(value: object, name: str) -> list[Any]:
    """Return what lies below ``name``. The keys of several parts, as of a ``state_dict()``, may begin with it."""
    parts: list[Any] = []
    for key, inner in _children(value):
        if key == name:
            parts.append(inner)
        elif name.startswith(f"{key}."):
            parts += _below(inner, name.removeprefix(f"{key}."))
        elif key.startswith(f"{name}."):
            parts.append({key.removeprefix(f"{name}."): inner})
    return parts


def _known(state: object) -> str:
    names = [key for key, _ in _children(state)]
    more = ", …" if len(names) > 5 else ""
    return f": it holds {', '.join(map(repr, names[:5]))}{more}" if names else ""


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    return [(str(at), inner) for at, inner in enumerate(value)] if isinstance(value, (list, tuple)) else []


def flat_tensors(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors below ``value`` by name, for a safetensors file.

    Raises:
        UnsupportedLeafError: a value is no tensor, or two have one name; names the first one, and how many there are.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []

    def walk(inner: object, name: str) -> None:
        children = _children(inner)
        if isinstance(inner, torch.Tensor):
            if name in tensors:
                raise UnsupportedLeafError(f"two tensors would have the name {name!r} in the file: rename one of them")
            tensors[name] = inner
        elif children or isinstance(inner, (Mapping, list, tuple)):
            for key, child in children:
                walk(child, f"{name}.{key}" if name else key)
        else:
            others.append(name)

    walk(value, "")
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise UnsupportedLeafError(
            f"{others[0]!r}{more} is no tensor, and a safetensors file holds tensors alone: give --branch, such as "
            "--branch model, or an OUT that ends in .pt"
        )
    return tensors


# -- sources --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(
    path: Path, out: Path, names: StepNames, on_progress: OnProgress, *, check: _Check, only: list[str] | None = None
) -> Iterator[_Source]:
    if path.is_dir():
        with PartialTensors(out) as partial:
            yield call(
                lambda storage, executor: _read(storage, executor, path, names, only, partial, check, on_progress)
            )
    elif path.name.endswith(_INDEX):
        yield _Source(state=_mapped_shards(path), step=None, path=path)
    elif path.name.endswith(SUFFIX):
        yield _Source(state=_with_tied(*_mapped(path)), step=None, path=path)
    else:
        yield _Source(state=_mapped_torch(path), step=None, path=path)


async def _read(
    storage: Storage,
    executor: Executor,
    path: Path,
    names: StepNames,
    only: Sequence[str] | None,
    partial: PartialTensors,
    check: _Check,
    on_progress: OnProgress,
) -> _Source:
    """Read a checkpoint into the mapped file. Every byte is verified before it is written anywhere else."""
    contents = await describe_newest(storage, executor, path, names)
    ctx = ReadContext.of(EngineConfig(), storage, executor, rank=0, world_size=1)
    with naming_checkpoint(Path(contents.path)):
        return await _read_leaves(ctx, contents, only, partial, check, on_progress)


async def _read_leaves(
    ctx: ReadContext,
    contents: Contents,
    only: Sequence[str] | None,
    partial: PartialTensors,
    check: _Check,
    on_progress: OnProgress,
) -> _Source:
    executor = ctx.executor
    checkpoint = await open_checkpoint(ctx.storage, Path(contents.path), executor=executor, step=contents.step)
    wanted = await run_blocking(executor, stored_names, ctx, checkpoint, only)
    await run_blocking(executor, _check_ranks, checkpoint, set(wanted), only)
    names = [name for name in wanted if name in checkpoint.catalog.objects]
    objects = await read_leaves(ctx, checkpoint, names, skip_untrusted=True)
    if objects.untrusted:
        first, *others = objects.untrusted
        more = f" (and {len(others)} more)" if others else ""
        raise UnsafeObjectError(
            f"{checkpoint.path}: only running code can read {first!r}{more}, and a conversion runs none: "
            "give --branch, such as --branch model; or, if you trust the checkpoint, load it with "
            "EngineConfig(trusted_objects=True), and save_file() it"
        )
    await check(ctx.storage, contents.step, objects.values)
    groups = _groups(contents.leaves, set(wanted))
    sizes = [group.nbytes for group in groups]
    await run_blocking(executor, partial.open, _identity(checkpoint.path, wanted), sizes)
    values = dict(objects.values)
    for number, group in enumerate(groups):
        on_progress(sum(sizes[:number]), sum(sizes))
        kept = await run_blocking(executor, partial.kept, number)
        if kept is None:
            fetched = await read_leaves(ctx, checkpoint, group.names, memory=partial.memory(number))
            await run_blocking(executor, partial.keep, number, fetched.values)
        values |= fetched.values if kept is None else kept
    on_progress(sum(sizes), sum(sizes))
    rest = await read_leaves(ctx, checkpoint, [name for name in wanted if name not in values])
    state = assemble(ctx, checkpoint, FetchedValues(values=values).joined_with(rest), only=only).state
    return _Source(state=state, step=contents.step, path=checkpoint.path)


def _check_ranks(checkpoint: Checkpoint, wanted: set[str], only: Sequence[str] | None) -> None:
    """Raise MissingNameError if ranks other than 0 alone saved a part of the result, such as a stage of a pipeline."""
    beyond = unexpected_names(checkpoint, wanted, 0, 1)
    lost = sorted(name for name in beyond if only is None or is_selected(name, set(only)))
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise MissingNameError(
            f"{checkpoint.path}: {lost[0]!r}{more} is what another rank saved, and a conversion takes what rank 0 did: "
            "give --branch, or load() a template with all names, and save_file() that"
        )


@dataclass(slots=True)
class _Group:
    """Tensors that are read together. Tied names are in one group, so that they share a tensor."""

    names: list[str] = field(default_factory=list)
    nbytes: int = 0


def _groups(leaves: Sequence[LeafRow], wanted: Set[str]) -> list[_Group]:
    groups = [_Group()]
    by_first: dict[str, _Group] = {}
    for leaf in leaves:
        if leaf.kind != "tensor" or leaf.name not in wanted:
            continue
        first = leaf.tied_to or leaf.name
        if first not in by_first:
            if groups[-1].nbytes >= _GROUP_BYTES:
                groups.append(_Group())
            by_first[first] = groups[-1]
            groups[-1].nbytes += align_up(leaf.nbytes, RAW_ALIGN_BYTES)
        by_first[first].names.append(leaf.name)
    return [group for group in groups if group.names]


def _identity(path: Path, names: Sequence[str]) -> str:
    """Return a text that changes if a file of the checkpoint does, or if other names of it are read."""
    with os.scandir(path) as entries:
        found = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    return f"{path} {hashlib.sha256(json.dumps([found, names]).encode()).hexdigest()}"


def _mapped_torch(path: Path) -> Any:
    """Return the object of a ``torch.save`` file, mapped, once its checksums were compared. Runs no code of it."""
    with path.open("rb") as file:
        begin = file.read(len(_OLD_FORMAT))
    if begin == _OLD_FORMAT:
        raise CheckpointNotFoundError(
            f"{path}: has the format of torch before 1.6: load it by torch.load and save it by torch.save first"
        )
    if not begin.startswith(_ZIP):
        raise CheckpointNotFoundError(f"{path}: no torch.save file")
    check_torch_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if not (reason := unsafe_reason(error)):
            raise CorruptCheckpointError(f"{path}: does not unpickle: {str(error).partition(chr(10))[0]}") from error
        raise UnsafeObjectError(
            f"{path}: only running code can read an object in it ({reason}): if you trust the file, load it by "
            "torch.load(weights_only=False), and save what you need, such as its tensors, by torch.save"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: torch cannot read it: {str(error).partition(chr(10))[0]}") from error


def _mapped(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file, mapped."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_bytes > min(file_bytes, MAX_HEADER_BYTES):
            raise CorruptCheckpointError(f"{path}: no safetensors file: its header has {header_bytes} bytes")
        try:
            stored, metadata = parse_header(file.read(header_bytes), file_bytes)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {error}") from error
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for entry in stored:
        if not entry.nbytes:
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        raw = torch.frombuffer(memory, dtype=torch.uint8, offset=entry.start, count=entry.nbytes)
        aligned = raw if entry.start % entry.dtype.itemsize == 0 else raw.clone()
        tensors[entry.name] = aligned.view(entry.dtype).reshape(entry.shape)
    return tensors, metadata


def _with_tied(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors with the second names that the metadata tells."""
    tied = {name: tensors[first] for name, first in metadata.items() if first in tensors and name not in tensors}
    return tensors | tied


def _mapped_shards(index: Path) -> dict[str, torch.Tensor]:
    try:
        by_name = dict(json.loads(index.read_bytes())["weight_map"])
        files = set(by_name.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{index}: no index of safetensors files: {error}") from error
    if any(not isinstance(name, str) or os.path.basename(name) != name for name in files):
        raise CorruptCheckpointError(f"{index}: names a file elsewhere")
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name in sorted(files):
        found, texts = _mapped(index.parent / name)
        tensors |= found
        metadata |= texts
    tensors = _with_tied(tensors, metadata)
    if lost := sorted(by_name.keys() - tensors):
        raise CorruptCheckpointError(f"{index}: {lost[0]!r} is in none of its files: they are of different saves")
    return tensors
