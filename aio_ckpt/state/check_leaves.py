"""Refuse leaves that no item can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import AsyncCollectiveTensor
from aio_ckpt.errors import UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.format.dtypes import UNPLANNED
from aio_ckpt.leaves.objects import encode_object, type_name
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES, local_memory
from aio_ckpt.leaves.values import LeafKind, Shard
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.flatten import FlatState
from aio_ckpt.state.leaf_or_container import TENSOR_TYPES

_SHOWN = 10
"""Most leaves that one error names."""


def check_leaves(flat: FlatState) -> None:
    """Refuse tensors that no item can hold, and names that are no UTF-8. Only a changed structure needs this check.

    Raises:
        UnsupportedLeafError: names the leaf and the remedy.
    """
    for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True):
        fault = leaf_fault(name, value, kind)
        if fault is not None:
            raise UnsupportedLeafError(f"{name!r}: {fault}")


def leaf_fault(name: str, value: object, kind: LeafKind) -> str | None:
    """Return why no item can hold this leaf under this name, and what to give instead; None if an item can."""
    fault = tensor_fault(value) if kind is LeafKind.TENSOR else None
    if fault is None and not name.isascii() and name != name.encode(errors="ignore").decode():
        return "its name has a lone surrogate, which no UTF-8 file holds; rename it"
    return fault


def tensor_fault(value: Any) -> str | None:
    """Return why no item can hold this tensor, and what to give instead; None if an item can."""
    kind = type(value)
    if isinstance(value, Shard):
        kind, value = type(value.tensor), value.tensor
        if kind not in PLAIN_TYPES:
            return f"a Shard over a {type_name(value)}; give a Shard over a plain tensor"
    if is_lazy(value):
        return f"a {kind.__name__} has no shape yet; run one forward pass first"
    if issubclass(kind, AsyncCollectiveTensor):
        return "an AsyncCollectiveTensor, whose values may not be there yet; give its .wait()"
    if kind not in TENSOR_TYPES:
        return (
            f"a {type_name(value)}, a subclass of Tensor that does not tell where its values are; give a plain tensor"
        )
    tensor = local_memory(value) if kind is DTensor else value
    if tensor.is_nested:
        return "a nested tensor; give its parts with .unbind()"
    if tensor.layout is not torch.strided:
        is_part = isinstance(value, Shard) or kind is DTensor or tensor.layout is torch.sparse_coo
        remedy = ".to_dense()" if is_part else ".to_sparse_coo() or .to_dense()"
        return f"a tensor of layout {tensor.layout}, which no checkpoint holds; give {remedy}"
    if tensor.is_quantized:
        return f"a quantized tensor of {tensor.dtype}, which no checkpoint holds; give .dequantize()"
    if tensor.dtype in UNPLANNED:
        return f"a tensor of {tensor.dtype}, which DCP cannot plan; give .view(torch.uint8)"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no values; materialize it first (.to_empty(device=...))"
    if kind is DTensor and any(placement.is_partial() for placement in value.placements):
        return "a DTensor with a Partial placement, whose sum no rank holds; give .redistribute() or .full_tensor()"
    if type(tensor) not in TENSOR_TYPES:
        return (
            f"a DTensor over a {type_name(tensor)}; give PerRank(tensor.to_local()), which as many ranks load again, "
            "or a DTensor over a plain tensor"
        )
    return None


@contextlib.contextmanager
def naming_all_faults(flat: FlatState) -> Iterator[None]:
    """If a leaf of ``flat`` is refused inside, raise an error of the same type that names all leaves to refuse."""
    try:
        yield
    except (UnsupportedLeafError, UnsafeObjectError) as error:
        faults = _faults(flat)
        if len(faults) < 2:
            raise
        named = first_of(faults, between="; ", most=_SHOWN)
        raise type(error)(f"{len(faults)} leaves cannot be stored: {named}") from error


def _faults(flat: FlatState) -> list[str]:
    """Return, for each leaf that cannot be stored, its name, why, and what to give instead."""
    faults = []
    for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True):
        fault = leaf_fault(name, value, kind)
        if fault is not None:
            faults.append(f"{name!r}: {fault}")
        elif kind is LeafKind.OBJECT:
            try:
                encode_object(name, value)
            except (UnsupportedLeafError, UnsafeObjectError) as error:
                faults.append(str(error))
    return faults
