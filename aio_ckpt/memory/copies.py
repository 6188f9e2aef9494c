"""Copies between memories: what a device has to offer, and host memory's own way, which is real and no stub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from aio_ckpt import _torch
from aio_ckpt.memory.host_copy import CopyVectors, copy_all, memmove

__all__ = ["FOREACH_DTYPES", "Copies", "CopyEvent", "DeviceMemory", "Groups", "HostCopies", "foreach_copy", "pack_part"]

FOREACH_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
)
"""What :func:`aio_ckpt._torch.foreach_copy` copies in one launch for many tensors."""

Groups: TypeAlias = Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""(targets, sources): tensors of one dtype, one by one of the same shape."""

_OPENMP_PAYS_THREADS = 8
"""From so many threads on torch copies faster than one memmove (16 threads: 41 against 12 GB/s). With two, its
barriers fight with the threads that write (240 to 440 ms a GiB beside them, against 120 to 260)."""


_HALVES = frozenset((torch.float16, torch.bfloat16))
"""As what they are they would be copied by way of float32, which changes the bits of a NaN."""
_NO_END = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """How much memory of a device is left."""

    free_bytes: int
    """What no process and no cache of an allocator holds."""
    total_bytes: int
    """All memory of the device."""
    releases: int
    """How often the caching allocator has given memory back to the device: equal numbers mean that it still holds what
    it held."""


class CopyEvent(Protocol):
    """A point in a sequence of copies."""

    def query(self) -> bool:
        """Whether every copy before it is done."""
        ...

    def synchronize(self) -> None:
        """Block the thread (GIL released) until every copy before it is done."""
        ...

    def fence(self, stream: object = None) -> None:
        """Make later work of ``stream`` (None: the current one) wait for the copies before it; blocks no thread."""
        ...


class Copies(Protocol):
    """The copies of one save from one device, or of one load to one, in the order of the calls.

    Those of a load are issued by several threads: an event covers what its own thread issued before.
    """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target`` (host memory, same dtype and shape) with the values it has now."""
        ...

    def issue(self, base: int, vectors: CopyVectors) -> None:
        """Copy by address; the offsets of the targets count from ``base``."""
        ...

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` (same dtype and shape, any layout) to ``target``.

        ``source`` is host memory, free then, or made of :meth:`buffer`, free behind the next event.
        """
        ...

    def assemble(self, groups: Groups) -> None:
        """Copy (targets, sources) within the device, group by group."""
        ...

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` without conj and neg bits, contiguous; made in the order of the copies."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """Bytes on the device for :meth:`assemble` and :meth:`fill`; None if they cannot be had."""
        ...

    def memory(self) -> DeviceMemory:
        """What is left on the device."""
        ...

    def record_event(self) -> CopyEvent:
        """An event behind all copies so far."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def fence(self, stream: object = None) -> None:
        return None


class HostCopies:
    """Copies that are done when the call returns: host memory, and devices without streams of their own."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Blocks until copied, GIL released. Both are contiguous."""
        if source.device.type == "cpu" and torch.get_num_threads() < _OPENMP_PAYS_THREADS:
            memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def issue(self, base: int, vectors: CopyVectors) -> None:
        """Blocks until copied."""
        copy_all(base, vectors)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """By torch, whatever the device."""
        with torch.no_grad():
            target.copy_(source)

    def assemble(self, groups: Groups) -> None:
        """Blocks until copied."""
        foreach_copy(groups)

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Allocates unless ``source`` is already plain and contiguous."""
        return source.resolve_conj().resolve_neg().contiguous()

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """Return fresh host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory(self) -> DeviceMemory:
        """Return that of a device on which everything is free."""
        return DeviceMemory(free_bytes=_NO_END, total_bytes=_NO_END, releases=0)

    def record_event(self) -> CopyEvent:
        """Return an event that is reached already."""
        return _Done()


def foreach_copy(groups: Groups) -> None:
    """Copy group by group, each in few launches where torch can."""
    with torch.no_grad():
        for targets, sources in groups:
            if targets and targets[0].dtype in _HALVES:
                _torch.foreach_copy(_as_integers(targets), _as_integers(sources))
            elif targets and targets[0].dtype in FOREACH_DTYPES:
                _torch.foreach_copy(list(targets), list(sources))
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)


def _as_integers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.int16) for tensor in tensors]


def pack_part(target: torch.Tensor, source: torch.Tensor, first: int) -> None:
    """Copy the elements of ``source``, of any layout, from number ``first`` on, to ``target``, which is flat.

    Elements are counted in the order of a contiguous tensor. Both are host memory; nothing is allocated beside it.
    """
    if source.dim() < 2:
        target.copy_(source.reshape(-1)[first : first + len(target)])
        return
    row, last = source[0].numel(), first + len(target)
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:
        pack_part(target, source[end], first - end * row)
        return
    head, tail = begin * row - first, last - end * row
    if head:
        pack_part(target[:head], source[begin - 1], row - head)
    if begin < end:
        rows = source[begin:end]
        target[head : len(target) - tail].view(rows.shape).copy_(rows)
    if tail:
        pack_part(target[len(target) - tail :], source[end], 0)
