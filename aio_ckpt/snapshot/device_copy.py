"""Device copies: copies of a state's large tensors on their own devices, moved to the host while training goes on.

The memory is allocated on the side stream and freed as soon as the moves out of it are issued, so it is free by stream
order: the next save gets the same memory without asking the driver, and where training needs it, the caching allocator
gives it back to the device (which waits for the moves) before it says that memory is out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies, DeviceMemory
from aio_ckpt.plan.copy_plan import CopyDescriptors, DeviceCopies, Places
from aio_ckpt.plan.planner import ImagePlan
from aio_ckpt.snapshot.gather import LeafGroups, by_dtype

__all__ = ["DeviceCopier", "DeviceCopy", "copy_bytes"]

_ALIGNMENT = 512
_LEAST_LEAF_BYTES = 256 << 10
"""To move less takes no longer than to issue one copy more, about 5 us."""
_MARGIN_SHARE = 1 / 20
_LEAST_MARGIN_BYTES = 1 << 30
"""Left free for what does not ask torch's allocator, which alone can have a copy's memory back: NCCL, cuFFT, others."""
_log = logging.getLogger("aio_ckpt")

_CopiesFrom = Callable[[torch.device], Copies]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """The copies of one save. Whoever drops it behind the last move that was issued frees their memory."""

    leaves: frozenset[int]
    """Leaves that have a copy."""
    groups: Mapping[torch.device, LeafGroups]
    """Views of the copies on each device, by dtype."""
    device_copies: Mapping[torch.device, DeviceCopies]
    """``CopyDescriptors.device_copies`` with the addresses of the copies, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placement:
    """Where the copies of one layout lie, and what is moved from there."""

    descriptors: CopyDescriptors
    """What it was made for."""
    spans: Mapping[torch.device, tuple[int, int]]
    """Address and length of the memory on each device."""
    starts: Mapping[torch.device, Mapping[int, int]]
    """Per device, the leaves that have a copy and where in the memory."""
    leaves: frozenset[int]
    device_copies: Mapping[torch.device, DeviceCopies]

    @property
    def copied_bytes(self) -> int:
        """Memory of the copies on all devices."""
        return sum(nbytes for _, nbytes in self.spans.values())


class DeviceCopier:
    """Makes the device copies of one engine. Holds no memory between two saves, and never a source."""

    def __init__(self, most_bytes: int | None) -> None:
        """``most_bytes`` of each device; 0 for no copy, None for as much as is free."""
        self._most_bytes = most_bytes
        self._kept: dict[torch.device, tuple[int, int]] = {}
        """Bytes of the last copy, which the allocator keeps for the next, and :attr:`DeviceMemory.releases` then."""
        self._wanted: tuple[Places | None, Mapping[torch.device, int]] = None, {}
        """Per device, what the copies of all large tensors take."""
        self._placement: _Placement | None = None

    def of(self, plan: ImagePlan, copies_from: _CopiesFrom) -> DeviceCopy | None:
        """Memory for copies of as many large tensors of ``plan`` as there is room for; None if there is none."""
        if self._most_bytes == 0 or not plan.places.issued:
            return None
        if self._wanted[0] is not plan.places:
            self._wanted = plan.places, {device: sum(_copy_lengths(plan, device)) for device in plan.places.issued}
        memory = dict[torch.device, torch.Tensor]()
        for device, wanted_bytes in self._wanted[1].items():
            buffer = self._buffer(device, wanted_bytes, copies_from(device)) if wanted_bytes else None
            if buffer is not None:
                memory[device] = buffer
        placement = self._placement_of(plan, memory)
        if not placement.leaves:
            return None
        groups = {device: by_dtype(_views(plan, buffer, placement.starts[device])) for device, buffer in memory.items()}
        return DeviceCopy(leaves=placement.leaves, groups=groups, device_copies=placement.device_copies)

    def clear(self) -> None:
        """Forget the newest layout."""
        self._wanted, self._placement = (None, {}), None

    def _buffer(self, device: torch.device, wanted_bytes: int, copies: Copies) -> torch.Tensor | None:
        if self._most_bytes is not None:
            wanted_bytes = min(wanted_bytes, self._most_bytes)
        found = copies.memory()
        kept_bytes, releases = self._kept.pop(device, (0, 0))
        if releases != found.releases:
            kept_bytes = 0
        nbytes = copy_bytes(wanted_bytes, kept_bytes, found) // _ALIGNMENT * _ALIGNMENT
        with torch.inference_mode(mode=False):  # memory made inside could not be written to outside
            buffer = copies.buffer(nbytes) if nbytes else None
        if buffer is not None:
            self._kept[device] = max(nbytes, kept_bytes), found.releases
        return buffer

    def _placement_of(self, plan: ImagePlan, memory: Mapping[torch.device, torch.Tensor]) -> _Placement:
        """That of the save before if nothing has moved since: to make it takes milliseconds for 10,000 tensors."""
        spans = {device: (buffer.data_ptr(), buffer.nbytes) for device, buffer in memory.items()}
        known = self._placement
        if known is not None and known.descriptors is plan.descriptors and known.spans == spans:
            return known
        starts = {device: _starts(plan, device, nbytes) for device, (_, nbytes) in spans.items()}
        addresses = np.array(plan.descriptors.fingerprint, dtype=np.uint64)
        for device, begun in starts.items():
            for leaf, start in begun.items():
                addresses[leaf] = spans[device][0] + start
        placement = self._placement = _Placement(
            descriptors=plan.descriptors,
            spans=spans,
            starts=starts,
            leaves=frozenset(leaf for begun in starts.values() for leaf in begun),
            device_copies=plan.places.device_copies(addresses),
        )
        if known is None or known.copied_bytes != placement.copied_bytes:
            _log.info(
                "%d of %d bytes on devices are copied there before they are moved to the host",
                placement.copied_bytes,
                sum(self._wanted[1].values()),
            )
        return placement


def copy_bytes(wanted_bytes: int, kept_bytes: int, memory: DeviceMemory) -> int:
    """How much memory of a device the copies of a save may take.

    ``kept_bytes``: what the allocator keeps of the copies before, which nobody has to be asked for.
    """
    if wanted_bytes <= kept_bytes:
        return wanted_bytes
    margin_bytes = max(int(memory.total_bytes * _MARGIN_SHARE), _LEAST_MARGIN_BYTES)
    return max(min(wanted_bytes, memory.free_bytes - margin_bytes), kept_bytes, 0)


def _copy_lengths(plan: ImagePlan, device: torch.device) -> Sequence[int]:
    """What the copy of each large tensor on ``device`` takes, in the order of the image; 0 for one that gets none."""
    return [
        align_up(nbytes, _ALIGNMENT) if nbytes >= _LEAST_LEAF_BYTES else 0
        for nbytes in plan.places.issued[device].nbytes.tolist()
    ]


def _starts(plan: ImagePlan, device: torch.device, room_bytes: int) -> dict[int, int]:
    """Leaves that have a copy in so much memory of ``device``, and where it begins there."""
    starts, end = dict[int, int](), 0
    for leaf, nbytes in zip(plan.places.issued[device].leaves.tolist(), _copy_lengths(plan, device), strict=True):
        if nbytes and end + nbytes <= room_bytes:
            starts[leaf] = end
            end += nbytes
    return starts


def _views(plan: ImagePlan, memory: torch.Tensor, starts: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """The copy of each leaf as the tensor that it is."""
    structure = plan.structure
    typed = {dtype: memory.view(dtype) for dtype in {structure.dtypes[leaf] for leaf in starts}}
    return {
        leaf: torch.as_strided(
            typed[structure.dtypes[leaf]],
            structure.shapes[leaf],
            structure.strides[leaf],
            start // structure.dtypes[leaf].itemsize,
        )
        for leaf, start in starts.items()
    }
