"""``AsyncStager``: copies a state for ``dcp.async_save`` into staging memory, leased until no copy is left."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import staging
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import dtensor_over
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import CallResources
from aio_ckpt.dcp.item_sources import is_plain, plan_tensors
from aio_ckpt.dcp.replacement import Replacement
from aio_ckpt.dcp.uncopied_state import UncopiedState
from aio_ckpt.errors import BudgetExceededError
from aio_ckpt.leaves.tensor_memory import memory_of
from aio_ckpt.memory.arena_lifetimes import Lease
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.image import image_bytes_of


class AsyncStager(Replacement, staging.AsyncStager):
    """Stager for ``dcp.async_save(async_stager=...)``, with any storage writer.

    Before :meth:`stage` returns, every tensor is copied to host memory, host tensors too, and every other value is
    deep-copied. A later call uses the memory again once the last copy in it is gone. DCP holds the copies until its
    save has ended, so overlapping calls get different memory. Close the stager after the last save.

    Args:
        config: only ``staging``, ``budget_bytes``, ``gather_bytes``, ``workers``, ``thread_nice``, ``thread_ioprio``,
            ``stall_timeout_secs`` and ``debug`` are used.
    """

    _synchronize_after_execute = False

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config, None)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state_dict``. The caller may change ``state_dict`` at once.

        Raises:
            BudgetExceededError: the state is larger than the staging memory of ``budget_bytes``. This stager cannot
                stage in waves, as it does not know when the writer has captured; ``Writer`` as the stager can.
            StallError: copies of earlier calls have held the memory for ``stall_timeout_secs``.
            SourceChangedError: a tensor's memory was freed.
        """
        return stage_copy(self._keep(), state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: :meth:`stage` returns once everything is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """State to be staged, and the layout of its tensors in staging memory."""

    state: dict[str, Any]
    owners: Mapping[int, torch.Tensor]
    """Tensors that are copied by address, by ``id``."""
    planned: PlannedImage
    aliases: Sequence[int]
    """Per tensor, the leaf of the image that holds its bytes."""
    budget_bytes: int
    """Staging memory, in bytes."""

    @property
    def nbytes(self) -> int:
        """Length of the image, in bytes."""
        return image_bytes_of(self.planned.plan, 0) if self.owners else 0

    @property
    def fits(self) -> bool:
        """Whether staging memory can hold a copy."""
        return self.nbytes <= self.budget_bytes

    def copied(self, resources: CallResources) -> dict[str, Any]:
        """Copy the state into memory of ``resources.staging``. The memory is free again once the last copy is gone."""
        memo: dict[int, Any] = {}
        if self.owners:
            views = _views(self.planned.plan, _captured(resources, self.planned))
            for leaf, (key, owner) in zip(self.aliases, self.owners.items(), strict=True):
                memo[key] = _like(owner, views[leaf])
        # deepcopy finds each of these tensors in the memo by its id, and copies every other value.
        return copy.deepcopy(self.state, memo)

    def uncopied(self) -> UncopiedState:
        """Return the state with its own tensors, and copies of all other values."""
        memo: dict[int, Any] = dict(self.owners)
        return UncopiedState(copy.deepcopy(self.state, memo), self.budget_bytes)


def plan_staging(resources: CallResources, state: dict[str, Any]) -> Staging:
    """Find the tensors of ``state`` and lay them out. Nothing is copied yet."""
    budget_bytes = resources.staging.budget_bytes
    memory = {id(tensor): (tensor, memory_of(tensor)) for tensor in _tensors_in([state])}
    plain = {key: (tensor, local.detach()) for key, (tensor, local) in memory.items() if is_plain(local)}
    tensors = [local for _, local in plain.values()]
    planned, aliases = plan_tensors(
        [str(number) for number in range(len(tensors))],
        tensors,
        [(tuple(tensor.shape), (0,) * tensor.dim()) for tensor in tensors],
        gather_bytes=resources.config.gather_bytes,
        budget_bytes=budget_bytes,
    )
    owners = {key: tensor for key, (tensor, _) in plain.items()}
    return Staging(state=state, owners=owners, planned=planned, aliases=aliases, budget_bytes=budget_bytes)


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``values`` and in their containers, as DCP finds them when it flattens a state."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def stage_copy(resources: CallResources, state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` in memory of ``resources.staging``.

    Raises:
        BudgetExceededError: the staging memory cannot hold a copy.
    """
    staging = plan_staging(resources, state)
    if not staging.fits:
        raise BudgetExceededError(
            f"a state of {staging.nbytes} bytes cannot be staged within the {staging.budget_bytes} bytes that "
            "budget_bytes leaves for staging: raise it, or let Writer stage, which needs no whole copy"
        )
    return staging.copied(resources)


def _captured(resources: CallResources, planned: PlannedImage) -> torch.Tensor:
    """Capture the image and return its bytes as a tensor. The lease ends with the last view of the tensor."""
    image = resources.lease(planned, 0, resources.staging)
    lease = image.lease
    try:
        resources.capture(planned, image, lambda _: None)
        memory = np.frombuffer(lease.arena.memory, np.uint8)
        holder = object()
        lease.hold(holder)
        # torch keeps the array as long as a tensor needs its bytes.
        ending = weakref.finalize(memory, _release, os.getpid(), resources.portal, lease, holder)
        ending.atexit = False
        return torch.from_numpy(memory)
    finally:
        lease.close()


def _release(pid: int, portal: Portal, lease: Lease, holder: object) -> None:
    """End the lease, as the last copy is gone. May run in the garbage collector, so it waits for no thread."""
    if os.getpid() != pid:  # a forked child does not own the memory
        return
    if portal.is_closed:  # nobody leases from this manager any more
        lease.release(holder)
    else:
        portal.post(lease.release, holder)


def _views(plan: ImagePlan, image: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return each stored leaf as a view of its bytes in the image."""
    return {
        item.leaf: torch.as_strided(
            image[item.raw_offset : item.trailer_offset].view(item.spec.dtype), item.spec.shape, item.spec.stride
        )
        if item.raw_bytes
        else torch.empty(item.spec.shape, dtype=item.spec.dtype)
        for item in plan.layout.items
    }


def _like(owner: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    if not isinstance(owner, DTensor):
        return view
    # from_local() would move the copy to the mesh's device.
    return dtensor_over(view, owner)
