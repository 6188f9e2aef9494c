"""Memory of tensors: its extent, and what overlaps or cannot be written to. Pure: no element is read or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import local_tensor
from aio_ckpt.leaves.values import Shard, Target

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_DERIVED = frozenset({"_precomputed_scale"})
"""Inner tensors that hold nothing of their own: torchao computes this one anew after each step of the optimizer."""
_MAX_WORK = 100_000
"""Most steps of numpy's exact search for a shared byte. Tensors that need more count as overlapping."""


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor keeps its values at its address. A subclass with its own dispatch may not."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def signature_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return everything that decides which bytes a write to the tensor changes, and how."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def unwrapped(local: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor in a wrapper that only adds behaviour to it; any other tensor itself.

    Such a wrapper has one inner tensor, of its own shape and dtype: torchao's weights for a float8 all-gather.
    """
    kind: Any = type(local)
    if kind in PLAIN_TYPES or not callable(getattr(kind, "__tensor_flatten__", None)):
        return local
    inner = [getattr(local, name) for name in kind.__tensor_flatten__(local)[0] if name not in _DERIVED]
    if len(inner) != 1 or type(inner[0]) not in PLAIN_TYPES:
        return local
    is_same = (inner[0].shape, inner[0].dtype) == (local.shape, local.dtype)
    return inner[0] if is_same else local


def local_memory(tensor: DTensor) -> torch.Tensor:
    """Return the tensor that holds this rank's values of a DTensor."""
    return unwrapped(local_tensor(tensor))


def memory_of(tensor: Target) -> torch.Tensor:
    """Return the tensor that is written to: the local tensor of a DTensor, the tensor of a Shard."""
    if isinstance(tensor, Shard):
        return tensor.tensor
    return local_memory(tensor) if type(tensor) is DTensor else tensor


def memory_fault(tensor: Target) -> str | None:
    """Return why a load cannot fill the memory of a tensor; None if it can."""
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
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout} in the template: give .to_sparse_coo() or .to_dense()"
    if tensor.is_quantized:
        return f"is a quantized tensor of {tensor.dtype} in the template: give .dequantize()"
    if tensor.is_meta:
        return "is a meta tensor in the template, without memory: materialize it first (.to_empty(device=...))"
    needed = needed_bytes(tensor)
    if needed and (not tensor.data_ptr() or needed > tensor.untyped_storage().nbytes()):
        return "has a storage that was freed or resized in the template: allocate it first"
    return None


def are_apart(spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which spans of memory, (address, bytes), share no byte with another one. Empty spans share none."""
    addresses, nbytes = np.array(spans, np.int64).reshape(-1, 2).T
    found = np.ones(len(addresses), np.bool_)
    ascending = np.argsort(addresses, kind="stable")
    ascending = ascending[nbytes[ascending] > 0]
    begins, ends = addresses[ascending], (addresses + nbytes)[ascending]
    found[ascending[1:][begins[1:] < np.maximum.accumulate(ends)[:-1]]] = False
    found[ascending[:-1][begins[1:] < ends[:-1]]] = False
    return found


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and length in bytes of the memory from a tensor's first to its last element."""
    return tensor.data_ptr(), extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())


def extent_bytes(shape: Sequence[int], stride: Sequence[int], element_bytes: int) -> int:
    """Return the length in bytes from the first element to the end of the last; 0 without elements."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * element_bytes


def needed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the tensor's storage must have; 0 for a tensor without elements."""
    _, extent = span_of(tensor)
    return int(tensor.storage_offset()) * tensor.element_size() + extent if extent else 0


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions whose tensors share a byte, at least one pair for each tensor that shares one.

    Tensors over the same elements are paired with the one before, and the first of them stands for all before others:
    a tensor under 4,000 names makes 4,000 pairs, not 8 million.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault(signature_of(tensor), []).append(position)
    for same in alike.values():
        yield from pairwise(same)
    spans = sorted((*span_of(tensors[same[0]]), same) for same in alike.values())
    open_spans: list[tuple[int, list[int]]] = []
    for start, nbytes, same in spans:
        open_spans = [(stop, others) for stop, others in open_spans if stop > start]
        for _, others in open_spans:
            if _share_a_byte(tensors[others[0]], tensors[same[0]]):
                yield from ((others[0], position) for position in same)
                yield from ((position, same[0]) for position in others[1:])
        open_spans.append((start + nbytes, same))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may have the same address. Strides that interleave count."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return bool(tensor.numel())
            reach += (size - 1) * step
    return False


@dataclass(frozen=True, slots=True)
class _ByteSpan:
    """Memory in the form that numpy takes for an array. It is never accessed, as it may be a device's."""

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
    return np.asarray(_ByteSpan(interface))
