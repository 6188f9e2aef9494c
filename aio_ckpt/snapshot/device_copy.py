"""Device copies: copies of a state's large tensors on their own devices, moved to the host while training goes on.

The memory is allocated on the side stream and dropped as soon as the moves out of it are issued, so stream order frees
it. The next save gets the same memory without a call of the driver. If training needs the memory, the caching allocator
gives it back to the device, which waits for the moves, before it raises OutOfMemoryError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies, DeviceMemory
from aio_ckpt.plan.copy_plan import CopyDescriptors, HostTransfers, Places
from aio_ckpt.plan.planner import ImagePlan
from aio_ckpt.snapshot.gather import LeafGroups, by_dtype

_ALIGNMENT = 512
_MIN_LEAF_BYTES = 256 << 10
"""Smallest leaf that gets a copy. To move a smaller one takes no longer than to issue one more copy, about 5 us."""
_MARGIN_SHARE = 1 / 20
_MIN_MARGIN_BYTES = 1 << 30
"""Memory that is left free for NCCL, cuFFT and others that do not use torch's allocator: only that allocator can
reclaim the memory of a copy."""
_log = logging.getLogger("aio_ckpt")

_CopiesFrom = Callable[[torch.device], Copies]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """Memory for the device copies of one save. It is freed when the object is dropped, after its moves are issued."""

    leaves: frozenset[int]
    """Leaves that have a copy."""
    groups: Mapping[torch.device, LeafGroups]
    """Views of the copies on each device, by dtype."""
    host_transfers: Mapping[torch.device, HostTransfers]
    """Transfers of all leaves, as in ``CopyDescriptors``. The source of a leaf that has a copy is that copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placement:
    """Places of the copies of one layout, and the moves from there to the host."""

    descriptors: CopyDescriptors
    """Descriptors for which the placement was made."""
    spans: Mapping[torch.device, tuple[int, int]]
    """Address and length of the memory on each device."""
    starts: Mapping[torch.device, Mapping[int, int]]
    """Per device, the offset in the memory of each leaf that has a copy."""
    leaves: frozenset[int]
    host_transfers: Mapping[torch.device, HostTransfers]

    @property
    def copied_bytes(self) -> int:
        """Memory of the copies on all devices."""
        return sum(nbytes for _, nbytes in self.spans.values())


class DeviceCopier:
    """Allocator of the device copies of one engine. Between two saves it holds no memory, and never a source."""

    def __init__(self, max_bytes: int | None) -> None:
        """Limit the copies to ``max_bytes`` on each device; 0: no copies, None: as much as is free."""
        self._max_bytes = max_bytes
        self._kept: dict[torch.device, tuple[int, int]] = {}
        """Per device, (bytes of the last copy, :attr:`DeviceMemory.releases` at that time). The caching allocator keeps
        these bytes for the next copy."""
        self._wanted: tuple[Places | None, Mapping[torch.device, int]] = None, {}
        """(places of the newest plan, per device the bytes of the copies of all its large tensors)."""
        self._placement: _Placement | None = None

    def allocate(self, plan: ImagePlan, copies_from: _CopiesFrom) -> DeviceCopy | None:
        """Allocate memory for copies of as many large tensors of ``plan`` as fit; None if no tensor gets a copy."""
        if self._max_bytes == 0 or not plan.places.issued:
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
        return DeviceCopy(leaves=placement.leaves, groups=groups, host_transfers=placement.host_transfers)

    def clear(self) -> None:
        """Drop the placement of the newest layout, and its references to the plan."""
        self._wanted, self._placement = (None, {}), None

    def _buffer(self, device: torch.device, wanted_bytes: int, copies: Copies) -> torch.Tensor | None:
        if self._max_bytes is not None:
            wanted_bytes = min(wanted_bytes, self._max_bytes)
        found = copies.memory_info()
        kept_bytes, releases = self._kept.pop(device, (0, 0))
        if releases != found.releases:
            kept_bytes = 0
        nbytes = copy_budget_bytes(wanted_bytes, kept_bytes, found) // _ALIGNMENT * _ALIGNMENT
        with torch.inference_mode(mode=False):  # outside of inference mode, a tensor made inside cannot be written to
            buffer = copies.allocate(nbytes) if nbytes else None
        if buffer is not None:
            self._kept[device] = max(nbytes, kept_bytes), found.releases
        return buffer

    def _placement_of(self, plan: ImagePlan, memory: Mapping[torch.device, torch.Tensor]) -> _Placement:
        """Return the placement of ``plan`` in ``memory``.

        If nothing has moved since the last save, its placement is reused: for 10,000 tensors, a new one takes
        milliseconds.
        """
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
            host_transfers=plan.places.host_transfers(addresses),
        )
        if known is None or known.copied_bytes != placement.copied_bytes:
            _log.info(
                "%d of %d bytes on devices are copied there before they are moved to the host",
                placement.copied_bytes,
                sum(self._wanted[1].values()),
            )
        return placement


def copy_budget_bytes(wanted_bytes: int, kept_bytes: int, memory: DeviceMemory) -> int:
    """Return how many bytes of a device the copies of a save may take.

    The allocator still keeps ``kept_bytes`` of the last copies. They count as free.
    """
    if wanted_bytes <= kept_bytes:
        return wanted_bytes
    margin_bytes = max(int(memory.total_bytes * _MARGIN_SHARE), _MIN_MARGIN_BYTES)
    return max(min(wanted_bytes, memory.free_bytes - margin_bytes), kept_bytes, 0)


def _copy_lengths(plan: ImagePlan, device: torch.device) -> Sequence[int]:
    """Return the bytes of the copy of each tensor on ``device``, in the order of the image; 0 for a small tensor."""
    return [
        align_up(nbytes, _ALIGNMENT) if nbytes >= _MIN_LEAF_BYTES else 0
        for nbytes in plan.places.issued[device].nbytes.tolist()
    ]


def _starts(plan: ImagePlan, device: torch.device, room_bytes: int) -> dict[int, int]:
    """Return the leaves whose copies fit into ``room_bytes`` of ``device``, and the offset of each copy."""
    starts, end = dict[int, int](), 0
    for leaf, nbytes in zip(plan.places.issued[device].leaves.tolist(), _copy_lengths(plan, device), strict=True):
        if nbytes and end + nbytes <= room_bytes:
            starts[leaf] = end
            end += nbytes
    return starts


def _views(plan: ImagePlan, memory: torch.Tensor, starts: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Return, for each leaf, a view of its copy with the leaf's dtype, shape and strides."""
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
