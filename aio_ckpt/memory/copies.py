"""Copies into the image and out of it, for host memory and devices without streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aio_ckpt import _torch
from aio_ckpt.memory.host_copy import CopyVectors, copy_all, memmove

FOREACH_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
)
"""Dtypes of which :func:`aio_ckpt._torch.foreach_copy` copies many tensors in one launch."""

Groups: TypeAlias = Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""Pairs of (targets, sources). All tensors of a pair have one dtype; a target has the shape of its source."""

_OPENMP_PAYS_THREADS = 8
"""From this number of threads on, torch copies faster than one memmove (16 threads: 41 against 12 GB/s). With two
threads, its barriers contend with the threads that write (240 to 440 ms a GiB, against 120 to 260 by memmove)."""


_HALVES = frozenset((torch.float16, torch.bfloat16))
"""Dtypes copied as int16: torch copies them by way of float32, which changes the bits of a NaN."""
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device, free and in total."""

    free_bytes: int
    """Memory that no process and no caching allocator holds."""
    total_bytes: int
    """All memory of the device."""
    releases: int
    """Number of times that the caching allocator has given memory back to the device. If the number has not changed,
    the allocator still holds what it held."""


class CopyEvent:
    """A point in a sequence of copies. The event of copies in host memory is reached when it is recorded."""

    def query(self) -> bool:
        """Return whether every copy before the event is done."""
        return True

    def synchronize(self) -> None:
        """Block the thread, with the GIL released, until every copy before the event is done."""

    def fence(self, stream: object = None) -> None:
        """Make later work of ``stream`` (None: the current one) wait for the copies before the event.

        No thread blocks.
        """


class Copies:
    """Ordered copies of one save from one device, or of one load to one device.

    The copies run in the order of the calls. Those of this class, from host memory and from devices without streams,
    are done when the call returns; :class:`aio_ckpt.memory.cuda.CudaCopies` issues them. Several threads issue the
    copies of a load. An event then covers only what its own thread issued before it.
    """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the present values of ``source`` to ``target``, host memory of the same dtype and shape.

        Both tensors are contiguous. The GIL is released.
        """
        if source.device.type == "cpu" and torch.get_num_threads() < _OPENMP_PAYS_THREADS:
            memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def copy_vectors(self, base: int, vectors: CopyVectors) -> None:
        """Copy by address. The offsets of the targets count from the address ``base``."""
        copy_all(base, vectors)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``, of the same dtype and shape, of any layout and on any device.

        If ``source`` is host memory, it may be reused when the call returns. If it is a view of :meth:`allocate`,
        the caller may reuse it after the next event.
        """
        with torch.no_grad():
            target.copy_(source)

    def copy_groups(self, groups: Groups) -> None:
        """Copy each group of (targets, sources) within the device."""
        foreach_copy(groups)

    def contiguous(self, source: torch.Tensor) -> torch.Tensor:
        """Return ``source`` as a contiguous tensor without conj and neg bits, computed in the order of the copies."""
        return source.resolve_conj().resolve_neg().contiguous()

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Allocate bytes on the device for :meth:`copy_groups` and :meth:`fill`; None if there is no room."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory_info(self) -> DeviceMemory:
        """Return how much memory of the device is free. Host memory counts as without a limit."""
        return DeviceMemory(free_bytes=_UNLIMITED_BYTES, total_bytes=_UNLIMITED_BYTES, releases=0)

    def record_event(self) -> CopyEvent:
        """Return an event after all copies that were issued so far."""
        return CopyEvent()


def foreach_copy(groups: Groups) -> None:
    """Copy each group, in few launches where torch can."""
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
    """Fill the flat ``target`` with consecutive elements of ``source``, of any layout, from element ``first`` on.

    Elements count in the order of a contiguous tensor. Both tensors are host memory, and no other memory is allocated.
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
