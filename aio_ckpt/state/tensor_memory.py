"""Targets: whether the memory of a template's tensors is there, and each other's. Pure: nothing is read or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import local_tensor
from aio_ckpt.format.manifests import IntArray
from aio_ckpt.state.values import Shard, Target

__all__ = [
    "are_apart",
    "extent_bytes",
    "has_own_memory",
    "look_of",
    "memory_fault",
    "memory_of",
    "needed_bytes",
    "overlapping",
    "overlaps_itself",
    "span_of",
]

_MAX_WORK = 100_000
"""Of numpy's exact search for a shared byte; what is harder counts as shared."""


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether its values stand at its address: a subclass that dispatches for itself may keep them elsewhere."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def look_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that decides which bytes a tensor writes, and what."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def memory_of(tensor: Target) -> torch.Tensor:
    """The tensor that is written to: a DTensor's local one, that of a Shard."""
    if isinstance(tensor, Shard):
        return tensor.tensor
    return local_tensor(tensor) if type(tensor) is DTensor else tensor


def memory_fault(tensor: Target) -> str | None:
    """Why nothing can be read into the memory of a tensor; None if it can."""
    if isinstance(tensor, Shard):
        tensor = tensor.tensor
    if is_lazy(tensor):
        return "has no shape yet in the template: run one forward pass first"
    if tensor.is_nested:
        return "is a nested tensor in the template: give its parts, with .unbind()"
    if type(tensor) is DTensor and any(placement.is_partial() for placement in tensor.placements):
        return "has a Partial placement in the template, which no shard of a checkpoint fits: give .redistribute()"
    tensor = memory_of(tensor)
    if not has_own_memory(tensor):
        kind = type(tensor).__name__
        return f"is a {kind} in the template, whose values need not be in its own memory: give a plain tensor"
    if tensor.is_meta or tensor.layout is not torch.strided:
        return f"is a {tensor.device} tensor of layout {tensor.layout} in the template: nothing can be read into it"
    needed = needed_bytes(tensor)
    if needed and (not tensor.data_ptr() or needed > tensor.untyped_storage().nbytes()):
        return "has a storage that was freed or resized in the template: allocate it first"
    return None


def are_apart(addresses: IntArray, nbytes: IntArray) -> npt.NDArray[np.bool_]:
    """For ranges of memory, which of them have no byte in common with any other. Empty ones have none."""
    found = np.ones(len(addresses), np.bool_)
    ascending = np.argsort(addresses, kind="stable")
    ascending = ascending[nbytes[ascending] > 0]
    begins, ends = addresses[ascending], (addresses + nbytes)[ascending]
    found[ascending[1:][begins[1:] < np.maximum.accumulate(ends)[:-1]]] = False
    found[ascending[:-1][begins[1:] < ends[:-1]]] = False
    return found


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length in bytes of the memory between its first and its last element."""
    return tensor.data_ptr(), extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())


def extent_bytes(shape: Sequence[int], stride: Sequence[int], element_bytes: int) -> int:
    """Length in bytes from the first element to behind the last; 0 without elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * element_bytes


def needed_bytes(tensor: torch.Tensor) -> int:
    """How long its storage must be, 0 for a tensor without elements."""
    _, extent = span_of(tensor)
    return int(tensor.storage_offset()) * tensor.element_size() + extent if extent else 0


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of positions whose tensors have a byte in common."""
    spans = sorted((*span_of(tensor), position) for position, tensor in enumerate(tensors))
    open_spans: list[tuple[int, int]] = []
    for start, nbytes, position in spans:
        open_spans = [(stop, other) for stop, other in open_spans if stop > start]
        for _, other in open_spans:
            if nbytes and _share_a_byte(tensors[other], tensors[position]):
                yield other, position
        open_spans.append((start + nbytes, position))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements stand at one address, or may: strides that interleave count."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return bool(tensor.numel())
            reach += (size - 1) * step
    return False


@dataclass(frozen=True, slots=True)
class _Place:
    """What numpy takes for an array. Its memory is never touched: it may be a device's."""

    __array_interface__: dict[str, Any]


def _share_a_byte(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(np.shares_memory(_place(one), _place(other), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _place(tensor: torch.Tensor) -> npt.NDArray[Any]:
    size = tensor.element_size()
    interface = {
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(step * size for step in tensor.stride()),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return np.asarray(_Place(interface))
