"""Cache that reuses the plan of the last save.

A cached :class:`Plan` holds names, offsets and rendered bytes; no tensor, storage, handle or memoryview.
Every save resolves its tensors anew. The layout is reused if the structure is equal column by column, the copies by
address if the fingerprint is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from aio_ckpt.config import GATHER_BYTES
from aio_ckpt.plan.frozen_leaves import FrozenLeaves
from aio_ckpt.plan.pointer_fingerprint import check_sources, fingerprint_of, storage_bytes
from aio_ckpt.plan.save_plan import Plan, PlannedSave, collector_paused, laid_out_anew, make_plan
from aio_ckpt.plan.structure import Leaves, Structure, check_whole
from aio_ckpt.plan.tied_tensors import partition
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.flatten import FlatState


class PlanCache:
    """Cache of the plan of the newest save. A failed save drops the plan.

    There is one plan only: a structure that returns after another one is a miss, so that no old plan is kept.
    """

    def __init__(
        self,
        *,
        world_size: int = 1,
        gather_bytes: int = GATHER_BYTES,
        budget_bytes: Callable[[], int] = lambda: sys.maxsize,
        frozen: FrozenLeaves | None = None,
    ) -> None:
        """``budget_bytes`` returns the memory for an image. Each miss calls it.

        ``frozen``: leaves that get a file of their own; None if there is no such file.
        """
        self._world_size = world_size
        self._gather_bytes = gather_bytes
        self._budget_bytes = budget_bytes
        self._frozen = frozen
        self._plan: Plan | None = None
        self.hits = 0
        self.misses = 0

    def clear(self) -> None:
        """Forget the plan: the next save is a miss."""
        self._plan = None

    def resolve(self, flat: FlatState) -> PlannedSave:
        """Plan ``flat``. The cached layout and addresses are reused if they are still valid.

        Raises:
            UnsupportedLeafError: no checkpoint can hold a leaf.
            SourceChangedError: a tensor's memory was freed or is smaller than its shape says.
        """
        try:
            leaves = Leaves.of(flat)
            plan = self._plan  # read once: a save that fails in the background clears it
            cached = plan if plan is not None and plan.structure.is_of(flat, leaves) else None
            structure = Structure.of(flat, leaves) if cached is None else cached.structure
            fingerprint = fingerprint_of(leaves.tensors) if cached is not None else []
        except (RuntimeError, TypeError, NotImplementedError):
            check_leaves(flat)
            raise
        if cached is None:
            check_leaves(flat)
            return self._miss(flat, leaves, structure)
        tensors = leaves.tensors
        if fingerprint == cached.fingerprint and storage_bytes(tensors) == cached.source_bytes:
            return self._hit(cached, leaves, fingerprint_hit=True)
        with collector_paused():
            source_bytes = check_sources(flat, tensors, fingerprint)
            is_same = partition(structure, fingerprint) == cached.aliases
        if not is_same:
            return self._miss(flat, leaves, structure)
        plan = self._plan = replace(cached.at(fingerprint), source_bytes=source_bytes)
        return self._hit(plan, leaves, fingerprint_hit=False)

    def adopt(self, plan: Plan) -> None:
        """Cache ``plan``, as the ranks agreed on it."""
        self._plan = plan

    def _hit(self, plan: Plan, leaves: Leaves, *, fingerprint_hit: bool) -> PlannedSave:
        frozen = None if self._frozen is None else self._frozen.renew(plan.frozen)
        if frozen is None:
            self.hits += 1
        else:
            with collector_paused():
                plan = self._plan = laid_out_anew(plan, frozen)
            self.misses += 1
        return PlannedSave(
            plan=plan,
            tensors=leaves.tensors,
            objects=leaves.objects,
            plan_hit=frozen is None,
            fingerprint_hit=fingerprint_hit and frozen is None,
        )

    def _miss(self, flat: FlatState, leaves: Leaves, structure: Structure) -> PlannedSave:
        self._plan = None
        if self._world_size == 1:
            check_whole(flat, structure)
        fingerprint = fingerprint_of(leaves.tensors)
        source_bytes = check_sources(flat, leaves.tensors, fingerprint)
        with collector_paused():
            plan = make_plan(
                flat,
                structure,
                fingerprint,
                source_bytes,
                world_size=self._world_size,
                gather_bytes=self._gather_bytes,
                budget_bytes=self._budget_bytes(),
                frozen=self._frozen,
            )
        self._plan = plan if self._world_size == 1 else None  # plans of several ranks are cached once they agree
        self.misses += 1
        return PlannedSave(
            plan=plan, tensors=leaves.tensors, objects=leaves.objects, plan_hit=False, fingerprint_hit=False
        )
