"""Storable: which tensors an item can hold; of the others why it cannot, and what to give instead. Pure."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt.state.objects import type_name

__all__ = ["TENSOR_TYPES", "tensor_fault"]

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, DTensor)
_UNPLANNED_DTYPES = frozenset(dtype for name, dtype in vars(torch).items() if re.fullmatch(r"u?int[1-7]|bits\w+", name))
"""Opaque dtypes of less than a byte, or of no number at all: DCP's planner fails on them."""


def tensor_fault(value: Any) -> str | None:
    """Why no item can hold this tensor, and what to give instead; None if it can."""
    kind = type(value)
    if is_lazy(value):
        return f"a {kind.__name__} has no shape yet; run one forward pass first"
    if kind not in TENSOR_TYPES:
        return f"a {type_name(value)}, a subclass of Tensor that would come back as another type; give a plain tensor"
    tensor = value._local_tensor if kind is DTensor else value
    if tensor.is_nested:
        return "a nested tensor; give its parts with .unbind()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; give .to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor; give .int_repr() with its scale and zero point, or .dequantize()"
    if tensor.dtype in _UNPLANNED_DTYPES:
        return f"a tensor of {tensor.dtype}, which DCP cannot plan; give .view(torch.uint8)"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no values; materialize it first (.to_empty(device=...))"
    if kind is DTensor and any(placement.is_partial() for placement in value.placements):
        return "a DTensor with a Partial placement, whose sum no rank holds; give .redistribute() or .full_tensor()"
    if type(tensor) not in TENSOR_TYPES:
        return f"a DTensor over a {type_name(tensor)}; give a DTensor over a plain tensor"
    return None
