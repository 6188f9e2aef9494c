"""``AsyncStager``: copies a state for ``dcp.async_save`` into memory that is lent until nobody can read it any more."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import staging
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import dtensor_over
from aio_ckpt.checks import MAX_SECS
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.runtime import Face, Runtime
from aio_ckpt.dcp.sources import is_plain, plan_tensors
from aio_ckpt.errors import BudgetExceededError
from aio_ckpt.memory.lifetime import Lease
from aio_ckpt.plan.planner import ImagePlan, PlannedImage
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.capture import capture
from aio_ckpt.snapshot.image import image_bytes_of, lease_image
from aio_ckpt.state.tensor_memory import memory_of
from aio_ckpt.write.trace_file import NO_TRACE

__all__ = ["AsyncStager", "stage_state"]


class AsyncStager(Face, staging.AsyncStager):
    """Stages for ``dcp.async_save(async_stager=...)``, with any storage writer.

    Every tensor is copied, host tensors too, and every other value deep-copied, before :meth:`stage` returns. The
    copies are on the CPU, in memory that is used again by a later call once the last of them is gone: DCP holds them
    until its save has ended, so that calls that overlap get memory of their own. Close it after the last save.

    Args:
        config: ``staging``, ``budget_bytes``, ``gather_bytes``, ``stall_timeout_secs``, ``drain_timeout_secs`` and
            ``debug`` have their meaning.
    """

    _synchronize_after_execute = False

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config, None)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict``; what is not in the copy later is nobody's but the caller's.

        Raises:
            BudgetExceededError: the state alone is larger than ``budget_bytes``.
            StallError: copies of earlier calls hold the budget, for ``stall_timeout_secs``.
            SourceChangedError: a tensor's memory was freed.
        """
        return stage_state(self._keep(), state_dict)

    def synchronize_staging(self) -> None:
        """Nothing: :meth:`stage` returns when everything is copied."""


@dataclass(slots=True)
class _Found:
    """Tensors of a state that are copied by address."""

    owners: dict[int, torch.Tensor] = field(default_factory=dict)
    """What stands in the state, by ``id``."""
    local: list[torch.Tensor] = field(default_factory=list)
    """The part of each that this rank holds."""

    def add_all(self, values: Iterable[object]) -> None:
        """Look through containers, as DCP does when it flattens a state."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._add(value)
            elif isinstance(value, Mapping):
                self.add_all(value.values())
            elif isinstance(value, (list, tuple)):
                self.add_all(value)

    def _add(self, tensor: torch.Tensor) -> None:
        local = memory_of(tensor)
        if id(tensor) not in self.owners and is_plain(local):
            self.owners[id(tensor)] = tensor
            self.local.append(local.detach())


def stage_state(runtime: Runtime, state: dict[str, Any]) -> dict[str, Any]:
    """Copy ``state`` into memory of ``runtime.staging``, which returns there when the last copy is gone."""
    found = _Found()
    found.add_all([state])
    memo: dict[int, Any] = {}
    if found.local:
        boxes = [(tuple(tensor.shape), (0,) * tensor.dim()) for tensor in found.local]
        names = [str(number) for number in range(len(boxes))]
        planned, aliases = plan_tensors(
            names,
            found.local,
            boxes,
            gather_bytes=runtime.config.gather_bytes,
            budget_bytes=runtime.staging.budget_bytes,
        )
        line = _captured(runtime, planned)
        views = _views(planned.plan, line)
        for leaf, (key, owner) in zip(aliases, found.owners.items(), strict=True):
            memo[key] = _like(owner, views[leaf])
    # Every other value is copied with its containers; each tensor is found in the memo, by its id.
    return copy.deepcopy(state, memo)


def _captured(runtime: Runtime, planned: PlannedImage) -> torch.Tensor:
    """The whole image as bytes, for as long as anybody holds the tensor or a view of it."""
    config = runtime.config
    _check_whole(planned.plan, runtime)
    image = lease_image(
        planned,
        0,
        runtime.staging,
        runtime.arena_kind(planned.plan.source),
        timeout_secs=config.stall_timeout_secs,
        limit_secs=MAX_SECS,
    )
    lease = image.lease
    try:
        capture(
            planned,
            image,
            runtime.copy_engines,
            guarded=frozenset(),
            on_captured=lambda _: None,
            stall_timeout_secs=config.stall_timeout_secs,
            trace=NO_TRACE,
        ).finish()
        memory = np.frombuffer(lease.arena.memory, np.uint8)
        holder = object()
        lease.hold(holder)
        # torch keeps the array as long as a tensor needs its bytes.
        ending = weakref.finalize(memory, _release, os.getpid(), runtime.portal, lease, holder)
        ending.atexit = False
        return torch.from_numpy(memory)
    finally:
        lease.close()


def _check_whole(plan: ImagePlan, runtime: Runtime) -> None:
    nbytes, budget_bytes = image_bytes_of(plan, 0), runtime.staging.budget_bytes
    if nbytes > budget_bytes:
        raise BudgetExceededError(
            f"a state of {nbytes} bytes cannot be staged within the {budget_bytes} bytes that budget_bytes leaves for "
            "staging: raise it, or save without async"
        )


def _release(pid: int, portal: Portal, lease: Lease, holder: object) -> None:
    """The last copy is gone. Runs wherever that happened, in the garbage collector even: there no lock may be taken."""
    if os.getpid() != pid:  # a fork, which has the names and none of the memory
        return
    if portal.is_closed:  # nobody leases from this manager any more
        lease.let_go(holder)
    else:
        portal.post(lease.let_go, holder)


def _views(plan: ImagePlan, line: torch.Tensor) -> dict[int, torch.Tensor]:
    """Each stored leaf as a tensor over its bytes in the image."""
    return {
        item.leaf: torch.as_strided(
            line[item.raw_offset : item.trailer_offset].view(item.spec.dtype), item.spec.shape, item.spec.stride
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
