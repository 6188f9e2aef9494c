"""Sources of a conversion: a checkpoint that is read into a mapped file, and files that are mapped where they are."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from aio_ckpt.argument_checks import is_path
from aio_ckpt.checkpoint.load_progress import metered
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.checkpoint.torch_file import TorchFile, check_is_torch_file, check_torch_file
from aio_ckpt.cli.access import call, use_newest
from aio_ckpt.cli.console import OnProgress
from aio_ckpt.cli.inspecting import leaves_of
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import (
    AioCkptError,
    CorruptCheckpointError,
    UnsafeObjectError,
    WriteError,
)
from aio_ckpt.format.constants import RAW_ALIGN_BYTES, align_up
from aio_ckpt.format.restricted_unpickler import RefusedError
from aio_ckpt.format.safetensors_file import LENGTH_BYTES, MAX_HEADER_BYTES, SUFFIX, StoredTensor, parse_header
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.object_unpickler import read_object_pickle
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.reports import amount
from aio_ckpt.restore.plan_fills import HostMemory
from aio_ckpt.restore.read_state import assemble, read_leaves, stored_names
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.os_errors import DISK_FULL, with_remedy

_INDEX = ".index.json"
Check = Callable[[Storage, int | None, Mapping[str, object]], Awaitable[None]]
"""Gets the step and the objects of a checkpoint before its tensors are read. Raises if no result can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A state whose tensors are mapped."""

    state: Any
    step: int | None
    path: Path
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts of a safetensors file, without those that tell the names of tied tensors."""


def read_source(
    path: Path,
    out: Path,
    names: StepNames,
    on_progress: OnProgress,
    *,
    check: Check,
    trusted: bool,
    only: list[str] | None = None,
) -> Source:
    """Return the state at ``path``. A checkpoint is read into a file beside ``out``, or where temporary files are.

    ``only``: the branches that are read. ``trusted``: whether code of the source may run.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, root or file of a state.
        CorruptCheckpointError: it does not verify.
        UnsafeObjectError: only running code can read an object of it.
        MissingNameError: one of ``only`` selects nothing.
        WriteError, ReadError: the system failed.
        Exception: any error of ``check``.
    """
    if not isinstance(path, RemotePath) and not path.is_dir():
        state, metadata = mapped_state(path, trusted=trusted)
        return Source(state=state, step=None, path=path, metadata=metadata)

    beside = Path(tempfile.gettempdir()) if isinstance(out, RemotePath) else out.parent

    async def work(storage: Storage, executor: Executor) -> Source:
        ctx = ReadContext(config=EngineConfig(trusted_objects=trusted), storage=storage, executor=executor)

        async def read(newest: Path) -> Source:
            with naming_checkpoint(newest):
                return await _read_leaves(ctx, newest, names, only, beside, check, on_progress)

        return await use_newest(storage, path, names, read)

    return call(work)


def mapped_state(path: Path, *, trusted: bool) -> tuple[Any, dict[str, str]]:
    """Return the state of a file, or of the index of several, by the end of its name. Its tensors are mapped.

    Also returns the metadata of safetensors files, without what tells second names of tensors.

    Raises:
        Exception: see :func:`read_source`.
    """
    with _reading(path):
        if path.name.endswith(_INDEX):
            return _mapped_shards(path, trusted=trusted)
        if path.name.endswith(SUFFIX):
            return _with_tied(*_mapped(path))
        return _mapped_torch(path, trusted=trusted), {}


def files_of(path: Path) -> list[Path]:
    """Return the files of a source that is no checkpoint: an index and those that it names, or ``path`` alone.

    Raises:
        CorruptCheckpointError: the index is none.
    """
    if not path.name.endswith(_INDEX):
        return [path]
    with _reading(path):
        return [path, *(path.with_name(name) for name in sorted(set(_files_by_name(path).values())))]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Translate the errors of many types that json, torch and numpy raise for crafted bytes, and name the file."""
    try:
        yield
    except (AioCkptError, OSError, MemoryError):
        raise
    except Exception as error:
        text = str(error).partition("\n")[0][:200]
        raise CorruptCheckpointError(f"{path}: cannot be read: {text or type(error).__name__}") from error


async def _read_leaves(
    ctx: ReadContext,
    path: Path,
    step_names: StepNames,
    only: Sequence[str] | None,
    directory: Path,
    check: Check,
    on_progress: OnProgress,
) -> Source:
    """Read a checkpoint into a mapped file in ``directory``. Every byte is verified before it is written elsewhere."""
    executor = ctx.executor
    checkpoint = await ctx.open(path, step=None)
    step = step_names.step(path.name) if checkpoint.is_plain_dcp else checkpoint.step
    names = await run_blocking(executor, stored_names, ctx, checkpoint, only)
    objects = await read_leaves(
        ctx, checkpoint, [name for name in names if name in checkpoint.catalog.objects], skip_untrusted=True
    )
    if objects.untrusted:
        first, *others = objects.untrusted
        more = f" (and {len(others)} more)" if others else ""
        raise UnsafeObjectError(
            f"{checkpoint.path}: only running code can read {first!r}{more}: give --branch, such as --branch model, "
            "or --trusted if you trust whoever wrote the checkpoint"
        )
    await check(ctx.storage, step, objects.values)
    tensors = {name for name in names if name in checkpoint.catalog.shards}
    leaves = await run_blocking(executor, leaves_of, checkpoint)
    sizes = {leaf.tied_to or leaf.name: leaf.nbytes for leaf in leaves if leaf.name in tensors}
    nbytes = sum(align_up(size, RAW_ALIGN_BYTES) for size in sizes.values())
    memory = await run_blocking(executor, _mapped_memory, directory, nbytes)
    async with metered(lambda now: on_progress(now.bytes_done, now.bytes_total), executor) as meter:
        chosen = [name for name in names if name in tensors]
        fetched = await read_leaves(replace(ctx, meter=meter), checkpoint, chosen, memory=memory)
    fetched.values |= objects.values
    state = assemble(ctx, checkpoint, fetched, only=only).state
    return Source(state=state, step=step, path=path)


def _mapped_memory(directory: Path, nbytes: int) -> HostMemory:
    """Return a function that gives tensors memory, ``nbytes`` in all, of a mapped file in ``directory`` without a name.

    The file is gone with the last tensor, also if the process is killed.

    Raises:
        WriteError: the file cannot be made, or the disk has no room.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes) if nbytes else None
    except OSError as error:
        message = with_remedy(error, writes=True)
        if error.errno in DISK_FULL:
            message += (
                f": a conversion needs room for its tensors, {amount(nbytes)}, and as much for its result: free space, "
                "or give a place on another disk"
            )
        raise WriteError(error.errno, message, str(directory)) from error
    end = 0

    def take(count: int) -> torch.Tensor:
        nonlocal end
        start, end = end, end + align_up(count, RAW_ALIGN_BYTES)
        assert end <= nbytes, "tensors need the bytes that the manifests tell"
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count)

    return take


def _mapped_torch(path: Path, *, trusted: bool) -> Any:
    """Return the object of a ``torch.save`` file, mapped, once its checksums were compared.

    Runs code of the file only if ``trusted``.
    """
    check_is_torch_file(path)
    stored = check_torch_file(path)
    try:
        if trusted:
            return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        with path.open("rb") as file:
            memory = _mapped_bytes(file.fileno(), os.fstat(file.fileno()).st_size)
        return read_object_pickle(stored.pickle, functools.partial(_mapped_record, memory, stored))
    except RefusedError as error:
        raise UnsafeObjectError(
            f"{path}: only running code can read an object in it ({error}): give --trusted if you trust whoever wrote "
            "the file"
        ) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from error
    except (ImportError, AttributeError) as error:
        raise UnsafeObjectError(
            f"{path}: an object in it needs a module or class that is not found here: {error}: give the directory of "
            "its module in PYTHONPATH"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises errors of many types
        raise CorruptCheckpointError(f"{path}: does not unpickle: {error or type(error).__name__}") from error


def _mapped_record(memory: torch.UntypedStorage, stored: TorchFile, key: str) -> torch.UntypedStorage:
    """Return the mapped elements of a storage."""
    if f"data/{key}" not in stored.places:
        raise CorruptCheckpointError(f"it has no record data/{key[:40]!r}")
    if stored.byteorder != sys.byteorder.encode():
        raise CorruptCheckpointError("its tensors are in another byte order: save it anew on this machine")
    start, nbytes = stored.places[f"data/{key}"]
    found: torch.UntypedStorage = memory[start : start + nbytes]
    return found


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
        memory = _mapped_bytes(file.fileno(), file_bytes)
    return {entry.name: _mapped_tensor(memory, entry) for entry in stored}, metadata


def _mapped_tensor(memory: torch.UntypedStorage, entry: StoredTensor) -> torch.Tensor:
    """Return a mapped tensor. Its storage holds its bytes alone, because torch.save writes storages whole."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw: Any = memory[entry.start : entry.start + entry.nbytes]
    aligned = raw.clone() if entry.start % entry.dtype.itemsize else raw
    return torch.empty(0, dtype=entry.dtype).set_(aligned).reshape(entry.shape)


def _mapped_bytes(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Return the bytes of an open file, mapped privately.

    An ``mmap.mmap`` would keep a descriptor of its own, so that a model of many files would run out of them.
    """
    found: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", False, nbytes)
    return found  # type: ignore[no-any-return]


def _with_tied(
    tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors with the second names that the metadata tells, and the rest of the metadata."""
    tied = {name: tensors[first] for name, first in metadata.items() if first in tensors and name not in tensors}
    return tensors | tied, {name: text for name, text in metadata.items() if name not in tied}


def _mapped_shard(path: Path, *, trusted: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of one of several files."""
    if path.name.endswith(SUFFIX):
        return _mapped(path)
    state = _mapped_torch(path, trusted=trusted)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{path}: holds a {type(state).__name__}, where its index tells a dict of tensors")
    return dict(state), {}


class _Index(msgspec.Struct):
    """Index of several files of one model. It may have more fields."""

    weight_map: dict[str, str]
    """File of each tensor, by name."""


_INDEX_DECODER = msgspec.json.Decoder(_Index)


def _files_by_name(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor."""
    try:
        by_name = _INDEX_DECODER.decode(index.read_bytes()).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{index}: no index of files: {error}") from error
    if not by_name:
        raise CorruptCheckpointError(f"{index}: no index of files: its weight_map names none")
    if any(os.path.basename(name) != name or not is_path(name) for name in by_name.values()):
        raise CorruptCheckpointError(f"{index}: names a file elsewhere")
    return by_name


def _mapped_shards(index: Path, *, trusted: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what :func:`_with_tied` returns, of several files."""
    by_name = _files_by_name(index)
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for name in sorted(set(by_name.values())):
        with _reading(index.parent / name):
            found, texts = _mapped_shard(index.parent / name, trusted=trusted)
        tensors |= {each: tensor for each, tensor in found.items() if by_name.get(each, name) == name}
        metadata |= texts
    tensors, metadata = _with_tied(tensors, metadata)
    if lost := sorted(by_name.keys() - tensors):
        raise CorruptCheckpointError(
            f"{index}: {lost[0]!r} is not in {by_name[lost[0]]!r}: the files are of different saves"
        )
    return tensors, metadata
