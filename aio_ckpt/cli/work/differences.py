"""Differences of two checkpoints: names, shapes and dtypes by their manifests, and values by reading both."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from aio_ckpt.checkpoint.catalog import StoredObject
from aio_ckpt.checkpoint.foreign_items import check_inside
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.cli.work.contents import LeafRow, leaves_of, use_newest
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import ReadError
from aio_ckpt.format.names import StepNames
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.restore.read import read_leaves
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.data_file import translate_errors
from aio_ckpt.storage.local import Storage

_BATCH_BYTES = 256 << 20
"""Bytes of one checkpoint that are read before they are compared, unless one tensor is larger."""
_BLOCK_BYTES = 1 << 20
_BLOCK_ELEMENTS = 1 << 22
"""Elements that are compared at once, so that a comparison takes little memory beside the tensors."""


class KindChange(msgspec.Struct, frozen=True, kw_only=True):
    """Leaf whose dtype, shape or kind differs."""

    name: str
    a: str
    """Dtype and shape in A: ``float32 (3, 4)``, or ``object``."""
    b: str
    """The same in B."""


class ValueChange(msgspec.Struct, frozen=True, kw_only=True):
    """Leaf whose values differ."""

    name: str
    differing: int
    """Elements that differ; for an object 1."""
    elements: int
    """Elements of the tensor; for an object 1."""
    largest: float | None
    """Largest distance of two elements; infinite if only one of them is finite, None for an object."""
    relative: float | None
    """``largest`` divided by the largest finite element of A; None for an object."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of the checkpoints A and B."""

    a: str
    """Directory of A."""
    b: str
    """Directory of B."""
    only_in_a: tuple[str, ...]
    """Names that B lacks."""
    only_in_b: tuple[str, ...]
    """Names that A lacks."""
    kinds: tuple[KindChange, ...]
    """Leaves whose dtype, shape or kind differs."""
    values: tuple[ValueChange, ...] | None
    """Leaves of equal kind whose values differ; None if values were not compared."""
    alike: int
    """Leaves in which nothing that was compared differs."""

    @property
    def are_alike(self) -> bool:
        """Whether nothing that was compared differs."""
        return not (self.only_in_a or self.only_in_b or self.kinds or self.values)


async def compare(
    storage: Storage,
    executor: Executor,
    a: Path,
    b: Path,
    names: StepNames,
    *,
    with_values: bool,
    on_progress: Callable[[int, int], None],
) -> Comparison:
    """Compare the checkpoints at ``a`` and ``b``; of a root, its newest.

    Args:
        on_progress: called with the bytes compared so far, and those to compare in all.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, FormatVersionError, ReadError: one of them cannot be read.
    """

    async def use(first: Path, second: Path) -> Comparison:
        opened = [await _opened(storage, executor, path) for path in (first, second)]
        return await _compare(storage, executor, opened, with_values=with_values, on_progress=on_progress)

    return await use_newest(
        storage, a, names, lambda first: use_newest(storage, b, names, functools.partial(use, first))
    )


async def _compare(
    storage: Storage,
    executor: Executor,
    opened: Sequence[Checkpoint],
    *,
    with_values: bool,
    on_progress: Callable[[int, int], None],
) -> Comparison:
    leaves = [
        {leaf.name: leaf for leaf in await run_blocking(executor, leaves_of, checkpoint)} for checkpoint in opened
    ]
    common = [leaf for leaf in leaves[0].values() if leaf.name in leaves[1]]
    kinds = [
        KindChange(name=leaf.name, a=_kind(leaf), b=_kind(leaves[1][leaf.name]))
        for leaf in common
        if _kind(leaf) != _kind(leaves[1][leaf.name])
    ]
    other_kind = {change.name for change in kinds}
    same_kind = [leaf for leaf in common if leaf.name not in other_kind]
    values = await _compare_values(storage, executor, opened, same_kind, on_progress) if with_values else None
    return Comparison(
        a=str(opened[0].path),
        b=str(opened[1].path),
        only_in_a=tuple(name for name in leaves[0] if name not in leaves[1]),
        only_in_b=tuple(name for name in leaves[1] if name not in leaves[0]),
        kinds=tuple(kinds),
        values=values,
        alike=len(same_kind) - len(values or ()),
    )


async def _opened(storage: Storage, executor: Executor, path: Path) -> Checkpoint:
    with naming_checkpoint(path):
        return await open_checkpoint(storage, path, executor=executor)


async def _values(ctx: ReadContext, checkpoint: Checkpoint, names: list[str]) -> dict[str, object]:
    with naming_checkpoint(checkpoint.path):
        return (await read_leaves(ctx, checkpoint, names)).values


def _kind(leaf: LeafRow) -> str:
    return leaf.kind if leaf.shape is None else f"{leaf.dtype} ({', '.join(map(str, leaf.shape))})"


async def _compare_values(
    storage: Storage,
    executor: Executor,
    opened: Sequence[Checkpoint],
    leaves: Sequence[LeafRow],
    on_progress: Callable[[int, int], None],
) -> tuple[ValueChange, ...]:
    ctx = ReadContext.of(EngineConfig(), storage, executor, rank=0, world_size=1)
    total, done = sum(leaf.nbytes for leaf in leaves), 0
    changes: list[ValueChange] = []
    for batch in _batches(leaves):
        tensors = [leaf.name for leaf in batch if leaf.kind == "tensor"]
        ours, theirs = [await _values(ctx, checkpoint, tensors) for checkpoint in opened]
        for leaf in batch:
            if leaf.kind == "tensor":
                change = await run_blocking(executor, _tensor_change, leaf.name, ours[leaf.name], theirs[leaf.name])
            else:
                change = await run_blocking(executor, object_change, leaf.name, opened)
            if change is not None:
                changes.append(change)
        done += sum(leaf.nbytes for leaf in batch)
        on_progress(done, total)
    return tuple(changes)


def _batches(leaves: Sequence[LeafRow]) -> Iterator[list[LeafRow]]:
    batch: list[LeafRow] = []
    nbytes = 0
    for leaf in leaves:
        if batch and nbytes + leaf.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(leaf)
        nbytes += leaf.nbytes
    if batch:
        yield batch


def object_change(name: str, opened: Sequence[Checkpoint]) -> ValueChange | None:
    """Compare the stored bytes of an object: to bring it back could run code."""
    found = [(checkpoint.path, checkpoint.catalog.objects[name]) for checkpoint in opened]
    lengths = {stored.nbytes for _, stored in found}
    sums = {stored.crc32 for _, stored in found}
    are_alike = len(lengths) == 1 and (len(sums) == 1 if None not in sums else _are_equal(found))
    return None if are_alike else ValueChange(name=name, differing=1, elements=1, largest=None, relative=None)


def _are_equal(found: Sequence[tuple[Path, StoredObject]]) -> bool:
    """Return whether the stored bytes, of one length, are equal."""
    blocks = [_blocks(path / stored.file, stored) for path, stored in found]
    return all(len(set(parts)) == 1 for parts in zip(*blocks, strict=True))


def _blocks(path: Path, stored: StoredObject) -> Iterator[bytes]:
    """Yield the bytes of an object, block by block.

    Raises:
        MismatchError: the object lies outside of its file.
        ReadError: the system failed.
    """
    with translate_errors(ReadError, path), path.open("rb") as file:
        check_inside(stored.name, str(path), stored.offset, stored.nbytes, {str(path): os.fstat(file.fileno()).st_size})
        file.seek(stored.offset)
        for done in range(0, stored.nbytes, _BLOCK_BYTES):
            yield file.read(min(_BLOCK_BYTES, stored.nbytes - done))


def _tensor_change(name: str, a: object, b: object) -> ValueChange | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise TypeError(f"{name!r}: a {type(a).__name__} and a {type(b).__name__} are no tensors")
    differing, largest, relative = distance(a, b)
    if not differing:
        return None
    return ValueChange(name=name, differing=differing, elements=a.numel(), largest=largest, relative=relative)


def distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float]:
    """Return (elements that differ, largest distance, largest distance by largest finite element of ``a``).

    Both have one shape and dtype. Two NaNs are equal; a NaN and a number are infinitely far from each other.
    """
    flat_a, flat_b = _wide(a), _wide(b)
    differing, largest, scale = 0, 0.0, 0.0
    for begin in range(0, flat_a.numel(), _BLOCK_ELEMENTS):
        part_a, part_b = flat_a[begin : begin + _BLOCK_ELEMENTS], flat_b[begin : begin + _BLOCK_ELEMENTS]
        are_apart = (part_a != part_b) & ~(part_a.isnan() & part_b.isnan())
        differing += int(are_apart.sum())
        if are_apart.any():
            apart = (part_a[are_apart].to(_EXACT) - part_b[are_apart].to(_EXACT)).abs()
            largest = max(largest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        finite = part_a[part_a.isfinite()].to(_EXACT).abs()
        scale = max(scale, float(finite.max()) if finite.numel() else 0.0)
    return differing, largest, largest / scale if scale else math.inf if largest else 0.0


_EXACT = torch.float64


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension and in a dtype that can be compared: real, and of at least 16 bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.to(torch.promote_types(flat.dtype, torch.complex64))).reshape(-1)
    if flat.is_floating_point() and flat.dtype.itemsize < 2:
        return flat.to(torch.float32)
    if flat.dtype in (torch.uint16, torch.uint32):
        return flat.to(torch.int64)
    return flat.view(torch.int64) if flat.dtype == torch.uint64 else flat
