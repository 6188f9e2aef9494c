"""Copies into the image and out of it, for host memory and devices without streams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from aio_ckpt import _torch
from aio_ckpt.memory.host_copy import CopyVectors, copy_all, memmove

Groups: TypeAlias = Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Pairs of (targets, sources), as :func:`groups_by_address` makes them."""

_OPENMP_PAYS_THREADS = 8
"""From this number of threads on, torch copies faster than one memmove (16 threads: 41 against 12 GB/s). With two
threads, its barriers contend with the threads that write (240 to 440 ms a GiB, against 120 to 260 by memmove)."""


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtype of each element size, in bytes. Integers are copied bit for bit; torch copies float16 and bfloat16 by way of
float32, which changes the bits of a NaN."""
_UNLIMITED_BYTES = 1 << 62


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
        """Copy each target's source to it, within the device."""
        for targets, sources in groups:
            _torch.foreach_copy(targets, sources)

    def contiguous(self, source: torch.Tensor) -> torch.Tensor:
        """Return ``source`` as a contiguous tensor without conj and neg bits, computed in the order of the copies."""
        return source.resolve_conj().resolve_neg().contiguous()

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Allocate bytes on the device for :meth:`copy_groups` and :meth:`fill`; None if there is no room."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes of the device that no process and no caching allocator holds, and all its bytes.

        Host memory counts as without a limit.
        """
        return _UNLIMITED_BYTES, _UNLIMITED_BYTES

    def releases(self) -> int:
        """Return how many times the device's caching allocator has given memory back to the device.

        If the number has not changed, the allocator still holds what it held.
        """
        return 0

    def record_event(self) -> CopyEvent:
        """Return an event after all copies that were issued so far."""
        return CopyEvent()


def groups_by_address(device: torch.device, copies: Iterable[tuple[int, int, int]]) -> Groups:
    """Return the groups of copies within ``device``, each (target address, source address, bytes).

    The tensors of the groups keep no memory allocated. They have the longest elements that the addresses allow, because
    torch launches a kernel for each 20 million elements or so.
    """
    by_size: dict[int, list[tuple[int, int, int]]] = {}
    for target, source, nbytes in copies:
        if nbytes:
            by_size.setdefault(math.gcd(target, source, nbytes, max(_INTEGERS)), []).append((target, source, nbytes))
    with torch.inference_mode(mode=False):  # outside of inference mode, a tensor made inside cannot be written to
        return [
            (
                _unowned_views(device, size, [(target, nbytes) for target, _, nbytes in rows]),
                _unowned_views(device, size, [(source, nbytes) for _, source, nbytes in rows]),
            )
            for size, rows in by_size.items()
        ]


def _unowned_views(device: torch.device, size: int, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the memory of each span (address, bytes) as a flat tensor of integers of ``size`` bytes."""
    first, last = min(address for address, _ in spans), max(address + nbytes for address, nbytes in spans)
    memory = _torch.unowned_bytes(first, last - first, device).view(_INTEGERS[size])
    return [torch.as_strided(memory, (nbytes // size,), (1,), (address - first) // size) for address, nbytes in spans]


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
