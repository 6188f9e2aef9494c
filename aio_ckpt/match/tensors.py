"""Tensors of a template, compared with the stored ones: which bytes are filled exactly, and the faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import add, attrgetter, le, mul
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from aio_ckpt.checkpoint.catalog import Catalog, Item, Shards, global_shape
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES, memory_fault, memory_of, overlapping, signature_of
from aio_ckpt.leaves.values import Shard, Target
from aio_ckpt.match.fills import Fills
from aio_ckpt.memory.cuda import is_host_memory
from aio_ckpt.state.flatten import Template

_GROUP_TENSORS = 256
# One pass for each attribute, without a line of Python for each tensor.
_dtype, _sizes, _layout, _is_nested, _itemsize = map(attrgetter, ("dtype", "shape", "layout", "is_nested", "itemsize"))
_stored_stride, _offsets, _raw_bytes, _global_shape = map(
    attrgetter, ("stride", "offsets", "raw_bytes", "global_shape")
)


def exact_addresses(values: Sequence[object], stored: Sequence[Shards | None]) -> list[int]:
    """Return, for each plain host tensor whose bytes are those of the only item stored for it, its address; else 0.

    Tensors are compared in groups, one attribute after the other, which takes half the time.
    """
    found: list[int] = []
    for start in range(0, len(values), _GROUP_TENSORS):
        group, shards = values[start : start + _GROUP_TENSORS], stored[start : start + _GROUP_TENSORS]
        if _are_exact(group, shards):
            found += map(torch.Tensor.data_ptr, group)  # type: ignore[arg-type]
        else:
            pairs = zip(group, shards, strict=True)
            found += [value.data_ptr() if _are_exact([value], [one]) else 0 for value, one in pairs]  # type: ignore[attr-defined]
    return found


def _are_exact(values: Sequence[Any], stored: Sequence[Shards | None]) -> bool:
    """Return whether the values are plain host tensors, each with the bytes of the only item stored for it."""
    items: list[Any] = [shards[0] for shards in stored if shards is not None and len(shards) == 1]
    if len(items) != len(values) or not PLAIN_TYPES.issuperset(map(type, values)) or {*map(type, items)} != {Item}:
        return False
    dtypes = {*map(_dtype, items)}
    starts = map(mul, map(torch.Tensor.storage_offset, values), map(_itemsize, values))
    lengths = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, values))
    return (
        not any(map(_is_nested, values))
        and {*map(_layout, values)} == {torch.strided}
        and all(map(is_host_memory, values))
        and list(map(_dtype, values)) == list(map(_dtype, items))
        and list(map(_sizes, values)) == list(map(_sizes, items))
        and list(map(torch.Tensor.stride, values)) == list(map(_stored_stride, items))
        and not any(map(torch.Tensor.is_neg, values))
        and not (any(dtype.is_complex for dtype in dtypes) and any(map(torch.Tensor.is_conj, values)))
        and not any(map(any, {*map(_offsets, items)}))
        and {*map(_global_shape, items)} == {None}
        and all(map(le, map(add, starts, map(_raw_bytes, items)), lengths))
    )


def fill_fault(tensor: Target, shards: Shards, *, casts: bool) -> str | None:
    """Return why a tensor of the template does not take the stored one; None if it does."""
    bare = tensor.tensor if isinstance(tensor, Shard) else tensor
    if is_lazy(bare) or bare.is_nested or bare.layout is not torch.strided or bare.is_quantized:
        return memory_fault(bare)
    stored = shards[0].dtype
    can_cast = torch.can_cast(stored, bare.dtype)
    if bare.dtype is not stored and not (casts and can_cast):
        remedy = ": cast=True converts it" if can_cast else ", which cast=True does not convert" if casts else ""
        return f"is {bare.dtype} in the template and {stored} in the checkpoint{remedy}"
    return shape_fault(tensor, shards) if full_shape(tensor) != global_shape(shards) else memory_fault(bare)


def shape_fault(tensor: Target, shards: Shards) -> str:
    """Return the fault of a tensor of the template that has another global shape than the stored one."""
    shapes = f"{full_shape(tensor)} in the template and {global_shape(shards)} in the checkpoint"
    return f"has shape {shapes}: skip_mismatched=True leaves it as it is"


def has_other_shape(tensor: Target, shards: Shards) -> bool:
    """Return whether a tensor of the template has another global shape than the stored one."""
    bare = tensor.tensor if isinstance(tensor, Shard) else tensor
    return not (is_lazy(bare) or bare.is_nested) and full_shape(tensor) != global_shape(shards)


def full_shape(tensor: Target) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    return tuple(tensor.global_shape if isinstance(tensor, Shard) else tensor.shape)


# -- shared memory ------------------------------------------------------------------------------------


def leaf_targets(fills: Fills, template: Template, *, but: AbstractSet[str]) -> dict[str, Target]:
    """Return the tensors of the template that ``fills`` fill, by name, without the names ``but``."""
    exact = {id(tensor) for _, tensor, _ in fills.exact}
    rows = zip(template.names, template.values, strict=True)
    found = {name: cast("Target", value) for name, value in rows if id(value) in exact}
    others = [(fill.name, fill.target) for fill in fills.others if fill.name not in but]
    return found | {name: target for name, target in others if target is not None}


def shared_memory(
    catalog: Catalog, leaves: Mapping[str, Target], modules: Sequence[Mapping[str, Target]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Compare tensors that share memory. Names of one tensor may share it if their values may be equal.

    The values of a module are loaded last, and would replace those of the names that share its memory without a word.
    Its tensors that are views of one another are its own affair.

    Args:
        leaves: tensors of the template's leaves by name.
        modules: tensors of each module by name.

    Returns the pairs of names of one tensor whose checksums must be compared once they are read, and the faults.
    """
    owned = [(0, name, memory_of(tensor)) for name, tensor in leaves.items()]
    for number, tensors in enumerate(modules, 1):
        owned += [(number, name, memory_of(tensor)) for name, tensor in tensors.items()]
    owned = [row for row in owned if row[1] in catalog.shards and memory_fault(row[2]) is None]
    unproven: list[tuple[str, str]] = []
    faults: list[str] = []
    for pair in overlapping([memory for _, _, memory in owned]):
        rows = sorted((owned[i] for i in pair), key=lambda row: row[0] == 0)  # modules first
        (owner, first, memory), (other, name, view) = rows
        shards = catalog.shards[first], catalog.shards[name]
        is_tied, is_module = signature_of(memory) == signature_of(view), owner == other > 0
        if is_tied and _may_be_equal(*shards):
            if not is_module and any(type(shard) is not Item for found in shards for shard in found):
                unproven.append((first, name))
        elif is_tied and is_module:
            faults.append(
                f"{name!r} and {first!r} are one tensor in the template (tied weights), and the checkpoint holds "
                "different values for them: load into a module that does not tie them, or read() and choose"
            )
        elif not is_module:
            why = "the checkpoint holds other values for it" if is_tied else "is another view of it"
            remedy = "give a copy of one of both modules" if other else "give it memory of its own (.clone())"
            faults.append(
                f"{name!r} shares memory with {first!r} in the template, and {why}: {remedy}, or leave it out"
            )
    return unproven, faults


def _may_be_equal(one: Shards, other: Shards) -> bool:
    """Return whether two tied names may hold the same values, judged by dtype, shape and the checksums that are known.

    Those of plain DCP are not read yet.
    """
    return len(one) == len(other) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and (type(a) is not Item or type(b) is not Item or a.sums == b.sums)
        for a, b in zip(one, other, strict=True)
    )
