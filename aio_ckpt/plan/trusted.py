"""Frozen leaves that a save need not read: their versions, and the plan of the main data file alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch

from aio_ckpt._torch import StorageWeakRef, storage_reference
from aio_ckpt.plan.layout import ImageLayout, lay_out, placement
from aio_ckpt.plan.local_plan import ImagePlan, Plan, plan_layout
from aio_ckpt.plan.structure import has_stored_bytes

Versions: TypeAlias = tuple[tuple[StorageWeakRef, int, int], ...]
"""Storage, address and ``_version`` of each tensor. A weak reference keeps the number of a freed storage from being
used again."""


def versions_of(tensors: Sequence[torch.Tensor]) -> Versions | None:
    """Return the versions of ``tensors``; None if one has none (an inference tensor), or is stored in another form."""
    if not all(map(has_stored_bytes, tensors)):
        return None
    try:
        return tuple((storage_reference(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors)
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedPlan:
    """What a save captures while it trusts the frozen leaves."""

    layout: ImageLayout
    """Layout of both files."""
    leaves: tuple[int, ...]
    """Tensor leaves whose bytes the frozen file holds, tied ones among them."""
    main: ImagePlan
    """Plan of the main data file alone, whose bytes are those that it has beside the frozen file."""

    def at(self, fingerprint: list[int]) -> Self:
        """Return the plan for tensors at other addresses."""
        return replace(self, main=self.main.at(fingerprint))

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Leave the frozen file out of ``plan``."""
        layout = plan.layout
        first = {item.leaf for item in layout.items[: layout.frozen_items]}
        main = lay_out(
            [placement(item) for item in layout.items[layout.frozen_items :]],
            budget_bytes=sys.maxsize,
            chunk_bytes=layout.chunk_bytes,
        )
        return cls(
            layout=layout,
            leaves=tuple(leaf for leaf, stored in enumerate(plan.aliases) if stored in first),
            main=plan_layout(plan.structure, main, plan.fingerprint, gather_bytes=plan.gather_bytes),
        )
