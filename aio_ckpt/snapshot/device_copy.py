"""Device copies: copies of a state's large tensors on their own devices, moved to the host while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies
from aio_ckpt.plan.copy_plan import DeviceCopies
from aio_ckpt.plan.planner import ImagePlan
from aio_ckpt.plan.values import ImageLayout
from aio_ckpt.snapshot.gather import LeafGroups, by_dtype, view_at

__all__ = ["DeviceCopier", "DeviceCopy"]

_ALIGNMENT = 512
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCopy:
    """Where each large tensor of one layout is copied to, on its device."""

    leaves: frozenset[int]
    """Leaves that have a copy."""
    groups: Mapping[torch.device, LeafGroups]
    """Views of the copies on each device, by dtype."""
    device_copies: Mapping[torch.device, DeviceCopies]
    """``CopyDescriptors.device_copies`` with the addresses of the copies."""


class DeviceCopier:
    """The device copy of the newest layout. Holds memory of its own, never a source.

    One copy serves save after save: all copies of a device are in the order of one stream, so it was moved to the
    host before the next save's values come.
    """

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` of each device; 0 for no copy."""
        self._most_bytes = most_bytes
        self._layout: ImageLayout | None = None
        self._device_copy: DeviceCopy | None = None

    def of(self, plan: ImagePlan, copies_from: Callable[[torch.device], Copies]) -> DeviceCopy | None:
        """The device copy of ``plan``; None if it has no large tensors on devices, or a device has no room for them."""
        if self._most_bytes and self._layout is not plan.layout:
            self.clear()
            with torch.inference_mode(mode=False):  # memory made inside could not be written to outside
                self._layout, self._device_copy = plan.layout, self._lay_out(plan, copies_from)
        return self._device_copy

    def clear(self) -> None:
        """Let go of the memory. What was issued is done first, by stream order."""
        self._layout = self._device_copy = None

    def _lay_out(self, plan: ImagePlan, copies_from: Callable[[torch.device], Copies]) -> DeviceCopy | None:
        structure, places = plan.structure, _places(plan)
        memory: dict[torch.device, torch.Tensor] = {}
        for device, nbytes in _ends(places).items():
            buffer = copies_from(device).buffer(nbytes) if nbytes <= self._most_bytes else None
            if buffer is None:
                _log.info("no copy of the state on %s: it needs %d bytes there", device, nbytes)
                return None
            memory[device] = buffer
        copies = {
            leaf: view_at(
                memory[device], start, structure.dtypes[leaf], structure.shapes[leaf], structure.strides[leaf]
            )
            for leaf, (device, start, _) in places.items()
        }
        addresses = np.array(plan.descriptors.fingerprint, dtype=np.uint64)
        for leaf, copy in copies.items():
            addresses[leaf] = copy.data_ptr()
        groups = {
            device: by_dtype({leaf: copy for leaf, copy in copies.items() if places[leaf][0] == device})
            for device in memory
        }
        device_copies = plan.places.device_copies(addresses)
        return DeviceCopy(leaves=frozenset(copies), groups=groups, device_copies=device_copies) if copies else None


def _places(plan: ImagePlan) -> dict[int, tuple[torch.device, int, int]]:
    """Per large tensor on a device: the device, where its copy begins and ends there."""
    places, ends = dict[int, tuple[torch.device, int, int]](), dict[torch.device, int]()
    for device, rows in plan.places.issued.items():
        for leaf, nbytes in zip(rows.leaves.tolist(), rows.nbytes.tolist(), strict=True):
            start = ends.get(device, 0)
            ends[device] = align_up(start + nbytes, _ALIGNMENT)
            places[leaf] = (device, start, ends[device])
    return places


def _ends(places: Mapping[int, tuple[torch.device, int, int]]) -> dict[torch.device, int]:
    return {device: stop for device, _, stop in places.values()}  # ascending on each device
