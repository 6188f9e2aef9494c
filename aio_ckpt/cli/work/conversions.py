"""Convert between checkpoints and files. Tensors lie in mapped files, never all at once in memory of their own.

A source is a checkpoint (ours or stock DCP's), a ``torch.save`` file, a safetensors file or the index of several.
A checkpoint is read, verified, into an unnamed file beside the result. A file is mapped where it is.
The result is written by an engine within a small budget, and appears as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from aio_ckpt.cli.work.sources import OnProgress, Source, read_source
from aio_ckpt.commit.discovery import discover
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.file_save import file_target
from aio_ckpt.errors import MissingNameError, StepOrderError, UnsupportedLeafError
from aio_ckpt.format.names import StepNames
from aio_ckpt.format.safetensors_file import SUFFIX
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.storage.local import Storage
from aio_ckpt.sync import SyncCheckpointEngine

_BUDGET_BYTES = 256 << 20
"""Memory in which the result is staged. A larger state passes through it in waves."""


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
    trusted: bool = False
    """Whether code of the source may run."""


def convert_to_file(
    source: Path, out: Path, names: StepNames, options: FileOptions, *, on_progress: OnProgress
) -> Converted:
    """Write the state at ``source`` to the file ``out``, in the format of its suffix, verified and durable.

    ``on_progress`` gets the bytes done and those in all, while a checkpoint is read.

    Raises:
        CheckpointNotFoundError: ``source`` is no checkpoint, root or file of a state.
        CorruptCheckpointError: ``source`` does not verify; nothing was written.
        ConfigError: ``out`` is no place of a file.
        UnsafeObjectError: only running code can read an object of ``source``.
        UnsupportedLeafError: a safetensors file cannot hold a value.
        WriteError, ReadError: the system failed. Unless ``in_doubt`` is set, what stood at ``out`` is unchanged.
    """
    file_target(str(out))
    is_safe = out.name.endswith(SUFFIX)

    async def check(_: Storage, __: int | None, objects: Mapping[str, object]) -> None:
        if is_safe:
            flat_tensors(objects)

    only = [options.branch] if options.branch else None
    found = read_source(source, out, names, on_progress, only=only, check=check, trusted=options.trusted)
    state = _branch(found, options.branch) if options.branch else found.state
    obj = flat_tensors(state) if is_safe else state
    with _writer(out.parent, names) as engine:
        report = engine.save_file(obj, out, max_shard_bytes=options.max_shard_bytes, dtype=options.dtype).result()
    assert report is not None
    return Converted(source=str(found.path), path=str(report.path), nbytes=report.raw_bytes, step=found.step)


def convert_to_step(
    source: Path, root: Path, names: StepNames, *, step: int | None, trusted: bool, on_progress: OnProgress
) -> Converted:
    """Save the state at ``source`` as a step of ``root``; ``step``: None for that of the source, or the next one.

    ``trusted``: whether code of the source may run.

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

    found = read_source(source, root, names, on_progress, check=check, trusted=trusted)
    state = found.state if isinstance(found.state, dict) else {"state": found.state}
    with _writer(root, names) as engine:
        report = engine.save(state, step if step is not None else found.step).result()
    assert report is not None
    return Converted(source=str(found.path), path=str(report.path), nbytes=report.raw_bytes, step=report.step)


def _writer(root: Path, names: StepNames) -> SyncCheckpointEngine:
    config = EngineConfig(budget_bytes=_BUDGET_BYTES, step_dir=names.step_dir)
    return SyncCheckpointEngine(root, config, coordinator=SoloCoordinator())


def _branch(found: Source, name: str) -> Any:
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
