"""Frozen leaves that a save need not read: their versions, and the plan of the main data file alone."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from aio_ckpt._torch import StorageWeakRef, storage_reference
from aio_ckpt.plan.frozen_leaves import address_of_values
from aio_ckpt.plan.layout import ImageLayout, lay_out
from aio_ckpt.plan.save_plan import ImagePlan, Plan, plan_layout
from aio_ckpt.plan.structure import has_stored_bytes


@dataclass(frozen=True, slots=True)
class Versions:
    """What torch tells of tensors, from which follows that they have not changed since."""

    tensors: tuple[tuple[StorageWeakRef, int, int], ...]
    """Storage, address and ``_version`` of each. The reference keeps a freed storage from being taken for a new one."""
    parameters: tuple[tuple[weakref.ref[torch.Tensor], int], ...]
    """The parameters at these addresses, and their ``_version``. Another parameter in one memory counts by itself."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor]) -> Self | None:
        """Return the versions of ``tensors``, each of which is the memory of some of ``parameters``.

        None if there are none, or torch does not tell all changes: of a tensor that is no parameter or in inference
        mode, and of a parameter with ``requires_grad``, as fused optimizers do not count what they write.
        """
        if not all(map(has_stored_bytes, tensors)):
            return None
        addresses = {tensor.data_ptr() for tensor in tensors}
        owners = [(address_of_values(parameter), parameter) for parameter in parameters]
        found = [(address, parameter) for address, parameter in owners if address in addresses]
        if {address for address, _ in found} != addresses or any(parameter.requires_grad for _, parameter in found):
            return None
        try:
            return cls(
                tuple((storage_reference(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors),
                tuple((weakref.ref(parameter), parameter._version) for _, parameter in found),
            )
        except RuntimeError:
            return None

    def are(self, other: Versions) -> bool:
        """Return whether both are versions of the same tensors and parameters, and equal."""
        pairs = zip(self.parameters, other.parameters, strict=False)
        return (
            self.tensors == other.tensors
            and len(self.parameters) == len(other.parameters)
            and all(mine() is theirs() is not None and version == known for (mine, version), (theirs, known) in pairs)
        )


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
            layout.items[layout.frozen_items :],
            budget_bytes=sys.maxsize,
            chunk_bytes=layout.chunk_bytes,
        )
        return cls(
            layout=layout,
            leaves=tuple(leaf for leaf, stored in enumerate(plan.aliases) if stored in first),
            main=plan_layout(plan.structure, main, plan.fingerprint, gather_bytes=plan.gather_bytes),
        )
