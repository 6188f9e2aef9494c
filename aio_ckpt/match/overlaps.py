"""Targets that share memory with themselves (expanded, windows) or with each other. Filled if their values agree.

Two elements at one address can hold one value only. Whether their stored values are equal is known once these are read.
Therefore they are read into memory of their own, before any other target is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from aio_ckpt.checkpoint.catalog import Item
from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.leaves.tensor_memory import overlaps_itself, span_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Length of an element in bytes -> a dtype of that length, in which its bits are copied; see :func:`_equal_bits`."""
_ALIGNED_BYTES = 16


class SharedTarget(NamedTuple):
    """A tensor of the template that shares memory."""

    name: str
    tensor: torch.Tensor


def can_be_shared(tensor: object) -> bool:
    """Return whether a target that shares memory can be filled.

    It must be a plain tensor, aligned to its elements. It must not be conjugated or negated, because its bits are
    written as stored.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(tensor, torch.Tensor):
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.data_ptr() % tensor.itemsize)


def check_agreement(targets: Sequence[SharedTarget], values: Mapping[str, torch.Tensor]) -> None:
    """Check that values for the same memory are equal: write all to scratch memory laid out as the targets, read back.

    ``values``: host tensors, by name.

    Raises:
        TemplateMismatchError: different values are stored for the same memory.
    """
    for group in _groups(targets):
        spans = [span_of(target.tensor) for target in group]
        start = min(address for address, _ in spans) // _ALIGNED_BYTES * _ALIGNED_BYTES
        nbytes = max(address + length for address, length in spans) - start
        scratch = torch.zeros(-(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES, dtype=torch.uint8)
        views = [
            _bits_at(scratch, address - start, like=target.tensor)
            for target, (address, _) in zip(group, spans, strict=True)
        ]
        for target, view in zip(group, views, strict=True):
            _write(view, values[target.name])
        for target, view in zip(group, views, strict=True):
            if not _equal_bits(view, _bits(values[target.name])):
                raise TemplateMismatchError(
                    _fault(target, [other.name for other in group if other.name != target.name])
                )


def check_tied(pairs: Iterable[tuple[str, str]], items: Mapping[str, Sequence[Item]]) -> None:
    """Check that the two values that plain DCP stores for one tensor of the template have the same checksums.

    Raises:
        TemplateMismatchError: the values differ, or have no checksums.
    """
    for before, later in pairs:
        one, other = ({item.offsets: _content(item) for item in items.get(name, ())} for name in (before, later))
        if one and one == other and all(item.record_crc32 is not None for item in items[later]):
            continue
        holds = "holds other values for it" if one != other else "has no checksums that tell whether their values agree"
        raise TemplateMismatchError(
            f"{later!r} shares memory with {before!r} in the template, and the checkpoint {holds}: give it memory of "
            "its own, or leave it out"
        )


def _content(item: Item) -> tuple[object, ...]:
    return item.record_crc32, item.raw_bytes, item.storage_offset, item.stride, item.is_conj, item.is_neg


def write_shared(targets: Sequence[SharedTarget], values: Mapping[str, torch.Tensor]) -> None:
    """Fill the targets, in any order: :func:`check_agreement` has proven that their values agree."""
    for target in targets:
        _write(_bits(target.tensor.detach()), values[target.name])


def _fault(target: SharedTarget, others: Sequence[str]) -> str:
    name, tensor = target
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
    """Yield the targets in groups: the memory of targets of different groups does not overlap."""
    group: list[SharedTarget] = []
    end = 0
    for target in sorted(targets, key=lambda target: span_of(target.tensor)):
        start, nbytes = span_of(target.tensor)
        if group and start >= end:
            yield group
            group = []
        group.append(target)
        end = max(end, start + nbytes) if len(group) > 1 else start + nbytes
    if group:
        yield group


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results of :func:`_bits` are equal bit by bit.

    No integer is 16 bytes long, and complex numbers are compared by value: NaN differs from itself, and -0.0 is 0.0.
    """
    if one.dtype is torch.complex128:
        one, other = (torch.view_as_real(values).view(torch.int64) for values in (one, other))
    return torch.equal(one, other)


def _bits_at(scratch: torch.Tensor, offset_bytes: int, *, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``scratch`` with the shape and stride of ``like``, as bits."""
    return scratch.view(_BITS[like.itemsize]).as_strided(like.shape, like.stride(), offset_bytes // like.itemsize)


def _write(view: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``view``. If several elements of ``view`` have one address, any of their values is written."""
    bits = _bits(value)
    for dim, (step, size) in enumerate(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step == 0:  # all elements of an expanded dimension are the first one
            view, bits = view.narrow(dim, 0, 1), bits.narrow(dim, 0, 1)
    if not overlaps_itself(view):
        view.copy_(bits)
        return
    extent = span_of(view)[1] // view.itemsize
    places = torch.arange(extent, device=view.device).as_strided(view.shape, view.stride()).reshape(-1)
    line = view.as_strided((extent,), (1,))
    line[places] = bits.reshape(-1).to(view.device)
