"""Arrays and scalars of numpy as tensors of the same bytes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.leaves.objects import type_name
from aio_ckpt.leaves.values import LeafKind, Shard

TORCH_ARRAY_DTYPES: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""numpy dtypes (native byte order) whose elements a tensor holds bit for bit."""


def as_tensor(value: object, kind: LeafKind) -> torch.Tensor:
    """Return the tensor that stores a TENSOR, ARRAY or SCALAR_ARRAY leaf, with equal shape and elements.

    An array shares its memory with the result. It is copied if it is read-only or unaligned, or if torch lacks its
    strides (negative, or no multiple of the element). A scalar is copied. For a Shard, the result is its tensor.
    """
    if kind is LeafKind.TENSOR and isinstance(value, (torch.Tensor, Shard)):
        return value.tensor if isinstance(value, Shard) else value
    if kind is LeafKind.SCALAR_ARRAY and isinstance(value, np.generic):
        return torch.from_numpy(np.array(value))
    if kind is LeafKind.ARRAY and isinstance(value, np.ndarray):
        odd = any(stride < 0 or stride % value.itemsize for stride in value.strides)
        return torch.from_numpy(value.copy() if odd or not value.flags.behaved else value)
    raise UnsupportedLeafError(f"a {type_name(value)} is no {kind.name} leaf")


def from_tensor(tensor: torch.Tensor, kind: LeafKind) -> object:
    """Return the leaf that a tensor stores: the tensor itself, an array over its memory, or a numpy scalar."""
    if kind is LeafKind.TENSOR:
        return tensor
    array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array if kind is LeafKind.ARRAY else array[()]
