"""The order of the copies out of devices: which come first, and which a guard lets wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from aio_ckpt.plan.copy_descriptors import DeviceCopies
from aio_ckpt.plan.copy_plan import ChunkCopyMethods

__all__ = ["NO_ORDER", "CopyOrder", "KnownCopyOrder"]

_CopiesByDevice = Mapping[torch.device, DeviceCopies]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyOrder:
    """The copies of one layout, by whether all that they read is guarded."""

    first: _CopiesByDevice
    """Of leaves that nobody guards."""
    guarded: _CopiesByDevice
    """Of the others."""
    guarded_runs: Set[int]
    """Where the spans begin all of whose leaves are guarded."""

    def device_copies(self, *, is_guarded: bool) -> _CopiesByDevice:
        """Return the guarded ones or the others."""
        return self.guarded if is_guarded else self.first


NO_ORDER = CopyOrder(first={}, guarded={}, guarded_runs=frozenset())


@dataclass(slots=True, eq=False)
class KnownCopyOrder:
    """The order of the newest save: with 10,000 tensors it takes a millisecond to find, and seldom changes.

    Known by identity: who makes other routes, issues or guarded leaves makes new objects. Holds numbers, no source.
    """

    _copy_methods: Sequence[ChunkCopyMethods] = ()
    _device_copies: _CopiesByDevice = field(default_factory=dict)
    _guarded: Set[int] = frozenset()
    _copy_order: CopyOrder = NO_ORDER

    def of(
        self, copy_methods: Sequence[ChunkCopyMethods], device_copies: _CopiesByDevice, guarded: Set[int]
    ) -> CopyOrder:
        """For these routes and copies by address, with the guarded leaves."""
        if not guarded:
            return CopyOrder(first=device_copies, guarded={}, guarded_runs=frozenset())
        if (
            self._copy_methods is not copy_methods
            or self._device_copies is not device_copies
            or self._guarded is not guarded
        ):
            self._copy_order = _split(copy_methods, device_copies, guarded)
            self._copy_methods, self._device_copies, self._guarded = copy_methods, device_copies, guarded
        return self._copy_order


def _split(copy_methods: Sequence[ChunkCopyMethods], device_copies: _CopiesByDevice, guarded: Set[int]) -> CopyOrder:
    wanted = np.fromiter(guarded, dtype=np.int64, count=len(guarded))
    is_guarded = {device: np.isin(found.leaves, wanted) for device, found in device_copies.items()}
    return CopyOrder(
        first={device: found.only(~is_guarded[device]) for device, found in device_copies.items()},
        guarded={device: found.only(is_guarded[device]) for device, found in device_copies.items()},
        guarded_runs={span.start for route in copy_methods for span in route.gathered if guarded >= {*span.leaves}},
    )
