"""Same metadata: whether a tensor has the type, dtype, device, shape, stride and bits that another had, by one call.

The call is that of ``torch.compile``'s guards, which no public name stands for. So nothing rests on its word but a
proof that was tried: a process in which it overlooks any of these differences, or lacks it, compares one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from aio_ckpt._torch import tensor_guards

__all__ = ["is_nested", "looks_like"]

is_nested: Callable[[torch.Tensor], bool] = torch.Tensor.is_nested.__get__  # type: ignore[attr-defined]
"""Whether it is a nested tensor: given one, the guards end the process (``std::terminate``)."""


def looks_like(tensor: torch.Tensor) -> Callable[[Any], bool]:
    """Tells of one tensor after the other whether it is proven to look like ``tensor``; False proves nothing.

    What it is asked about must not be nested.
    """
    check = _check_of([tensor]) if _tells_all_apart() else None
    return check or _never


def _never(_: torch.Tensor) -> bool:
    return False


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    check, count = _check_of(tensors), len(tensors)
    return None if check is None else lambda *others: len(others) == count and bool(check(*others))


def _check_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """The guards' own check, which must be given as many tensors."""
    make = tensor_guards()
    if make is None:
        return None
    shapes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    try:
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError, SystemError):  # other arguments in another version of torch
        return None
    return check


@functools.cache
def _tells_all_apart() -> bool:
    """Whether the guards pass what is alike and nothing else."""
    for tensor, other in _unlike():
        check = _guards([tensor])
        if check is None or not check(tensor) or check(other) or check(tensor, tensor) or check():
            return False
    return True


def _unlike() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    plain, numbers = torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.complex64)
    yield plain, torch.zeros(2, 3, dtype=torch.int32)
    yield plain, torch.zeros(3, 2)
    yield plain, torch.zeros(2, 3, 1)
    yield plain, torch.zeros(3, 2).t()
    yield plain, torch.empty(2, 3, device="meta")
    yield plain, torch.nn.Parameter(plain.clone(), requires_grad=False)
    yield numbers, numbers.conj()
    yield numbers.conj(), numbers
    yield numbers.imag, numbers.conj().imag
    yield numbers.real, numbers.conj().imag
