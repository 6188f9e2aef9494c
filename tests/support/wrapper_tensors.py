"""Subclasses of Tensor as libraries have them: with inner tensors, nested ones, and with attributes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Blockwise", "Casting", "Nested", "Settings", "Tagged", "Token", "blockwise", "nested"]


class Blockwise(torch.Tensor):
    """As torchao's optimizer states: codes and a scale for each row."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["codes", "scale"], [self.signed, torch.float32, self.codes.device]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].signed)
        if func is torch.ops.aten.clone.default:
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].signed)
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(func)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Settings:
    """Part of a context that only running code brings back."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.bits == other.bits

    __hash__ = None  # type: ignore[assignment]


class Token(Blockwise):
    """Its context needs trust."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.signed, Settings(8))


class Nested(torch.Tensor):
    """A wrapper around a wrapper, and a sparse tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, mask: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, mask: torch.Tensor) -> None:
        self.inner, self.mask = inner, mask

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "mask"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"], inner["mask"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Tagged(torch.Tensor):
    """As images of torchvision and fastai: values of its own, and attributes."""


def blockwise(number: float, kind: type[Blockwise] = Blockwise, *, signed: bool = True) -> Any:
    """4 x 8 codes; every part holds the number."""
    return kind(torch.full((4, 8), int(number), dtype=torch.uint8), torch.full((4,), float(number)), signed)


def nested(number: float) -> Any:
    """One of each kind inside another."""
    return Nested(blockwise(number), (number * torch.eye(4)).to_sparse())


class Casting(torch.Tensor):
    """As torchao's weights that FSDP2 gathers in float8: one plain tensor, and behaviour around it."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )

    def __init__(self, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self._tensor, self._precomputed_scale = tensor, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"] if self._precomputed_scale is None else ["_tensor", "_precomputed_scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_tensor"], inner.get("_precomputed_scale"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*[arg._tensor if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))
        keeps = (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default)
        return cls(made, args[0]._precomputed_scale) if func in keeps else made

    __torch_function__ = torch._C._disabled_torch_function_impl
