"""Targets that share memory, with themselves (expanded, windows) or with each other: filled if what is stored agrees.

Two elements that stand at one address take one value. Whether those that are stored are equal is only known once they
are read. They are therefore read into memory of their own, before any other target is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.state.tensor_memory import overlaps_itself, span_of

__all__ = ["SharedTarget", "can_be_shared", "check_agreement", "write_shared"]

SharedTarget: TypeAlias = tuple[str, torch.Tensor]
"""Name and tensor of the template."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes of an element, the dtype that stands for its bits."""
_ALIGNED_BYTES = 16


def can_be_shared(tensor: object) -> bool:
    """Whether a target can be filled by its bits, together with those that it shares memory with."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(tensor, torch.Tensor):
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.data_ptr() % tensor.itemsize)


def check_agreement(targets: Sequence[SharedTarget], values: Mapping[str, torch.Tensor]) -> None:
    """Write all values to scratch memory that is laid out as the targets are, and look whether each is still there.

    ``values``: host tensors, by name.

    Raises:
        TemplateMismatchError: two values are stored for one place.
    """
    for group in _groups(targets):
        spans = [span_of(tensor) for _, tensor in group]
        start = min(address for address, _ in spans) // _ALIGNED_BYTES * _ALIGNED_BYTES
        nbytes = max(address + length for address, length in spans) - start
        scratch = torch.zeros(-(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES, dtype=torch.uint8)
        views = [
            _over(scratch, tensor, address - start) for (_, tensor), (address, _) in zip(group, spans, strict=True)
        ]
        for (name, _), view in zip(group, views, strict=True):
            _put(view, values[name])
        for (name, tensor), view in zip(group, views, strict=True):
            if not torch.equal(view, _bits(values[name])):
                raise TemplateMismatchError(_fault(name, tensor, [other for other, _ in group if other != name]))


def write_shared(targets: Sequence[SharedTarget], values: Mapping[str, torch.Tensor]) -> None:
    """Fill the targets, of which :func:`check_agreement` has proven that the order does not matter."""
    for name, tensor in targets:
        _put(_bits(tensor.detach()), values[name])


def _fault(name: str, tensor: torch.Tensor, others: Sequence[str]) -> str:
    if not others:
        return (
            f"{name!r} shares memory with itself in the template (stride {tensor.stride()}), and the checkpoint holds "
            "other values for one place: give its .clone()"
        )
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"{name!r} shares memory with {others[0]!r}{more} in the template, and the checkpoint holds other values for "
        "it: give it memory of its own, or leave it out"
    )


def _groups(targets: Sequence[SharedTarget]) -> Iterator[list[SharedTarget]]:
    """Targets whose ranges of memory touch, together."""
    group: list[SharedTarget] = []
    end = 0
    for target in sorted(targets, key=lambda target: span_of(target[1])):
        start, nbytes = span_of(target[1])
        if group and start >= end:
            yield group
            group = []
        group.append(target)
        end = max(end, start + nbytes) if len(group) > 1 else start + nbytes
    if group:
        yield group


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _over(scratch: torch.Tensor, tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """The bits of a tensor that is laid out as ``tensor``, in ``scratch``."""
    return scratch.view(_BITS[tensor.itemsize]).as_strided(
        tensor.shape, tensor.stride(), offset_bytes // tensor.itemsize
    )


def _put(view: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``view``, elements of which may stand at one address. Of those, any one stays."""
    bits = _bits(value)
    for dim, (step, size) in enumerate(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step == 0:  # expanded: its first element stands for all
            view, bits = view.narrow(dim, 0, 1), bits.narrow(dim, 0, 1)
    if not overlaps_itself(view):
        view.copy_(bits)
        return
    extent = span_of(view)[1] // view.itemsize
    places = torch.arange(extent, device=view.device).as_strided(view.shape, view.stride()).reshape(-1)
    line = view.as_strided((extent,), (1,))
    line[places] = bits.reshape(-1).to(view.device)
