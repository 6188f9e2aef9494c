"""``diff``: how two checkpoints differ: by their manifests, and in values by reading both."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aio_ckpt.cli.arguments import Directory, json_option, step_dir_option
from aio_ckpt.cli.console import OnProgress, Screen, bytes_progress
from aio_ckpt.cli.inspecting import LeafRow, leaves_of
from aio_ckpt.cli.texts import plural, printable
from aio_ckpt.config import EngineConfig
from aio_ckpt.format.step_names import StepNames

if TYPE_CHECKING:
    import torch

    from aio_ckpt.checkpoint.catalog import StoredObject
    from aio_ckpt.checkpoint.open import Checkpoint
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


_BATCH_BYTES = 256 << 20
"""Bytes of one checkpoint that are read before they are compared, unless one tensor is larger."""
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
    only_in_b: tuple[str, ...]
    kinds: tuple[KindChange, ...]
    values: tuple[ValueChange, ...] | None
    """Leaves of equal kind whose values differ; None if values were not compared."""
    alike: int
    """Leaves in which nothing that was compared differs."""

    @property
    def are_alike(self) -> bool:
        """Whether nothing that was compared differs."""
        return not (self.only_in_a or self.only_in_b or self.kinds or self.values)


@click.command("diff", epilog="Example: aio-ckpt diff runs/ckpt/step_000000100 runs/ckpt --values")
@click.argument("a", type=Directory(may_be_remote=True))
@click.argument("b", type=Directory(may_be_remote=True))
@click.option("--values", is_flag=True, help="Read both, and show which values differ, and how far.")
@step_dir_option
@json_option
def diff_command(a: Path, b: Path, names: StepNames, *, values: bool, as_json: bool) -> int:
    """Compare names, shapes and dtypes of two checkpoints.

    With --values, what they hold, too; objects by their stored bytes. Of a root, it is the newest one. Exit code 1 if
    they differ.
    """
    from aio_ckpt.cli.access import call, use_newest

    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "compare") if values else contextlib.nullcontext() as on_progress:

        async def work(storage: Storage, executor: Executor) -> Comparison:
            async def use(first: Path, second: Path) -> Comparison:
                return await _compare(storage, executor, (first, second), on_progress)

            return await use_newest(
                storage, a, names, lambda first: use_newest(storage, b, names, functools.partial(use, first))
            )

        found = call(work)
    if as_json:
        screen.json(found)
    else:
        _print(found, screen)
    return 0 if found.are_alike else 1


def _print(found: Comparison, screen: Screen) -> None:
    screen.line(f"A  {printable(found.a)}")
    screen.line(f"B  {printable(found.b)}")
    for where, only in (("A", found.only_in_a), ("B", found.only_in_b)):
        for name in only:
            screen.line(f"only in {where}: {printable(name)}", style="bold red")
    if found.kinds:
        rows = [(printable(change.name), change.a, change.b) for change in found.kinds]
        screen.table(("name", "A", "B"), rows)
    if found.values:
        cells = [
            (
                printable(change.name),
                "object" if change.largest is None else f"{change.differing:,} of {change.elements:,}",
                "-" if change.largest is None else f"{change.largest:.3g}",
                "-" if change.relative is None else f"{change.relative:.3g}",
            )
            for change in found.values
        ]
        screen.table(("name", "differ", "by at most", "relative"), cells, numbers=("differ", "by at most", "relative"))
    what = "names, shapes, dtypes and values"
    if found.values is None:
        what = "names, shapes and dtypes; give --values to compare what they hold"
    differ = len(found.only_in_a) + len(found.only_in_b) + len(found.kinds) + len(found.values or ())
    screen.line(f"{plural(found.alike, 'leaf')} alike, {differ:,} not ({what})")


async def _compare(
    storage: Storage, executor: Executor, paths: Sequence[Path], on_progress: OnProgress | None
) -> Comparison:
    """Compare two checkpoints; their values only with ``on_progress``.

    Args:
        on_progress: called with the bytes compared so far, and those to compare in all.

    Raises:
        CorruptCheckpointError, FormatVersionError, ReadError: one of them cannot be read.
    """
    from aio_ckpt.checkpoint.open import open_checkpoint
    from aio_ckpt.runtime.error_notes import naming_checkpoint
    from aio_ckpt.runtime.portal import run_blocking

    opened: list[Checkpoint] = []
    for path in paths:
        with naming_checkpoint(path):
            opened.append(await open_checkpoint(storage, path, executor=executor))
    leaves = [{leaf.name: leaf for leaf in await run_blocking(executor, leaves_of, each)} for each in opened]
    common = [leaf for leaf in leaves[0].values() if leaf.name in leaves[1]]
    kinds = [
        KindChange(name=leaf.name, a=_kind(leaf), b=_kind(leaves[1][leaf.name]))
        for leaf in common
        if _kind(leaf) != _kind(leaves[1][leaf.name])
    ]
    other_kind = {change.name for change in kinds}
    same_kind = [leaf for leaf in common if leaf.name not in other_kind]
    values = None if on_progress is None else await _compare_values(storage, executor, opened, same_kind, on_progress)
    return Comparison(
        a=str(opened[0].path),
        b=str(opened[1].path),
        only_in_a=tuple(name for name in leaves[0] if name not in leaves[1]),
        only_in_b=tuple(name for name in leaves[1] if name not in leaves[0]),
        kinds=tuple(kinds),
        values=values,
        alike=len(same_kind) - len(values or ()),
    )


def _kind(leaf: LeafRow) -> str:
    return leaf.kind if leaf.shape is None else f"{leaf.dtype} ({', '.join(map(str, leaf.shape))})"


async def _compare_values(
    storage: Storage,
    executor: Executor,
    opened: Sequence[Checkpoint],
    leaves: Sequence[LeafRow],
    on_progress: OnProgress,
) -> tuple[ValueChange, ...]:
    from aio_ckpt.checkpoint.catalog import batches
    from aio_ckpt.checkpoint.read_context import ReadContext
    from aio_ckpt.restore.read_state import read_leaves
    from aio_ckpt.runtime.error_notes import naming_checkpoint
    from aio_ckpt.runtime.portal import run_blocking

    ctx = ReadContext(config=EngineConfig(), storage=storage, executor=executor)
    total, done = sum(leaf.nbytes for leaf in leaves), 0
    changes: list[ValueChange] = []
    on_progress(done, total)
    for batch in batches(leaves, _BATCH_BYTES):
        tensors = [leaf.name for leaf in batch if leaf.kind == "tensor"]
        read: list[Mapping[str, Any]] = []
        for checkpoint in opened:
            with naming_checkpoint(checkpoint.path):
                read.append((await read_leaves(ctx, checkpoint, tensors)).values)
        for leaf in batch:
            if leaf.kind == "tensor":
                change = await run_blocking(executor, _tensor_change, leaf.name, *(each[leaf.name] for each in read))
            else:
                change = await object_change(storage, executor, leaf.name, opened)
            if change is not None:
                changes.append(change)
        done += sum(leaf.nbytes for leaf in batch)
        on_progress(done, total)
    return tuple(changes)


async def object_change(
    storage: Storage, executor: Executor, name: str, opened: Sequence[Checkpoint]
) -> ValueChange | None:
    """Compare the stored bytes of an object: to bring it back could run code.

    Raises:
        MismatchError: the object lies outside of its file.
        ReadError: the system failed.
    """
    found = [(checkpoint, checkpoint.catalog.objects[name]) for checkpoint in opened]
    are_alike = len({stored.nbytes for _, stored in found}) == 1
    if are_alike and any(stored.crc32 is None for _, stored in found):  # in plain DCP
        are_alike = len({await _bytes_of(storage, executor, *each) for each in found}) == 1
    elif are_alike:
        are_alike = len({stored.crc32 for _, stored in found}) == 1
    return None if are_alike else ValueChange(name=name, differing=1, elements=1, largest=None, relative=None)


async def _bytes_of(storage: Storage, executor: Executor, checkpoint: Checkpoint, stored: StoredObject) -> bytes:
    from aio_ckpt.checkpoint.data_files import Files
    from aio_ckpt.checkpoint.fetch import fetch
    from aio_ckpt.checkpoint.locate import check_inside
    from aio_ckpt.checkpoint.read_plan import ReadPlan
    from aio_ckpt.cli.access import READERS

    plan = ReadPlan()
    async with Files(storage, checkpoint.path, page_cache="take") as files:
        await files.measure([stored.file], checkpoint.catalog.files)
        check_inside(stored.name, stored.file, stored.offset, stored.nbytes, files.sizes)
        memory = plan.add_objects([stored])
        await fetch(files, plan.requests(READERS), executor=executor, readers=READERS, verify=False)
    return memory.bytes_of(stored)


def _tensor_change(name: str, a: torch.Tensor, b: torch.Tensor) -> ValueChange | None:
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
        differing += int((are_apart.reshape(-1, 2).any(1) if a.is_complex() else are_apart).sum())
        if are_apart.any():
            one, other = part_a[are_apart], part_b[are_apart]
            if one.is_floating_point():
                apart = (one.double() - other.double()).abs()
            else:  # two large integers may be equal as floats
                apart = (one.long().maximum(other.long()) - one.long().minimum(other.long())).double()
                apart[apart < 0] += 2.0**64  # a distance of 2**63 or more has wrapped
            largest = max(largest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        finite = _as_double(part_a[part_a.isfinite()], a.dtype).abs()
        scale = max(scale, float(finite.max()) if finite.numel() else 0.0)
    return differing, largest, largest / scale if scale else math.inf if largest else 0.0


def _as_double(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of :func:`_wide`, of a tensor of ``dtype``, as float64."""
    import torch

    if dtype != torch.uint64:
        return wide.double()
    values = (wide ^ torch.iinfo(torch.int64).min).double()
    values[values < 0] += 2.0**64
    return values


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension and in a dtype that can be compared: real, and of at least 16 bits.

    Those of uint64 are less by 2**63. Of a dtype without arithmetic (float4, bits, integers below 8 bits), the bytes of
    the elements are taken as numbers.
    """
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.to(torch.promote_types(flat.dtype, torch.complex64))).reshape(-1)
    try:
        flat[:1].double()
    except NotImplementedError:
        return flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.uint8)
    if flat.is_floating_point() and flat.dtype.itemsize < 2:
        return flat.to(torch.float32)
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8)
    if flat.dtype in (torch.uint16, torch.uint32):
        return flat.to(torch.int64)
    return flat.view(torch.int64) ^ torch.iinfo(torch.int64).min if flat.dtype == torch.uint64 else flat
