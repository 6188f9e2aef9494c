"""Frozen leaves: tensors of a state that stay equal from save to save, which get a data file of their own.

A parameter without ``requires_grad`` counts from the first save on, and any other tensor once two saves in a row have
found the sums of the save before. A frozen tensor that changes never counts again. Where frozen tensors are trusted,
only the parameters count, if there are any: an optimizer leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.leaves.tensor_memory import local_memory
from aio_ckpt.plan.layout import LEAST_FROZEN_BYTES, ImageLayout

_EQUAL_SAVES = 2
"""Number of saves in a row with equal sums after which a tensor counts as frozen."""
_LEAST_SHARE = 20
"""The tensors that are found must make up one part in so many of the state: each change of the frozen ones costs a new
plan and a new frozen file."""


class FrozenLeaves:
    """Names of the frozen tensors of one engine, learned from the sums of its saves."""

    def __init__(self, *, is_trusting: bool = False) -> None:
        """``is_trusting``: whether frozen tensors need not be captured."""
        self._is_trusting = is_trusting
        self._may_find = True
        self._found: frozenset[str] = frozenset()
        self._changing: set[str] = set()
        self._has_news = False
        """Whether plans were made without what is known now."""
        self._layout: ImageLayout | None = None
        self._stops = np.zeros(0, np.int64)
        """Per item of the layout, the number of the block after its last one."""
        self._sums = np.zeros(0, np.uint32)
        self._equal = np.empty(0, np.int64)
        """Per item of the layout, the number of saves in a row with the sums of the save before."""

    def choose(
        self, names: Sequence[str], addresses: Sequence[int], parameters: Iterable[torch.nn.Parameter]
    ) -> frozenset[str]:
        """Return the frozen ones of the tensor leaves ``names``, whose memory begins at ``addresses``.

        These are the leaves that were found, and those that are one of ``parameters`` which needs no gradient.
        """
        without_grad = {address_of_values(parameter) for parameter in parameters if not parameter.requires_grad} - {0}
        given = {name for name, address in zip(names, addresses, strict=True) if address in without_grad}
        given -= self._changing
        self._has_news = False
        self._may_find = not (self._is_trusting and given)
        return frozenset(given | self._found.intersection(names) if self._may_find else given)

    def renew(self, frozen: frozenset[str]) -> frozenset[str] | None:
        """Return the frozen leaves of a plan that took ``frozen`` as such; None if it is as it should be."""
        if not self._has_news:
            return None
        self._has_news = False
        renewed = (frozen | self._found if self._may_find else frozen) - self._changing
        return None if renewed == frozen else renewed

    def learn(self, layout: ImageLayout, sums: bytes, frozen: frozenset[str]) -> None:
        """Compare the ``sums`` of a committed save with those of the save before it.

        Args:
            layout: its layout.
            sums: CRC32 of each block of its items, in the order of ``layout``, u32.
            frozen: names that its plan took as frozen.
        """
        new = np.frombuffer(sums, "<u4")
        if layout is not self._layout:
            blocks = [-(-item.raw_bytes // BLOCK_BYTES) for item in layout.items]
            self._layout, self._stops = layout, np.cumsum(np.array(blocks, np.int64))
            self._sums, self._equal = new, np.zeros(len(blocks), np.int64)
            return
        unequal_blocks = np.append(0, np.cumsum(new != self._sums))[self._stops]
        is_equal = np.diff(unequal_blocks, prepend=0) == 0  # also of an item without bytes
        self._sums, self._equal = new, np.where(is_equal, self._equal + 1, 0)
        changed = [layout.items[index].fqns for index in np.flatnonzero(~is_equal[: layout.frozen_items]).tolist()]
        names = {name for fqns in changed for name in fqns}
        self._changing |= names
        self._found -= names
        self._has_news |= bool(names)
        if self._may_find:
            self._find_unchanged(layout, frozen)

    def _find_unchanged(self, layout: ImageLayout, frozen: frozenset[str]) -> None:
        others = np.flatnonzero(self._equal[layout.frozen_items :] >= _EQUAL_SAVES) + layout.frozen_items
        new = [
            item
            for item in (layout.items[index] for index in others.tolist())
            if frozen.isdisjoint(item.fqns) and self._changing.isdisjoint(item.fqns)
        ]
        nbytes = sum(item.raw_bytes for item in new)
        if nbytes >= max(LEAST_FROZEN_BYTES, layout.raw_bytes // _LEAST_SHARE):
            self._found |= {name for item in new for name in item.fqns}
            self._has_news = True


def address_of_values(parameter: torch.Tensor) -> int:
    """Return the address of the values of a parameter that this rank holds."""
    return (local_memory(parameter) if isinstance(parameter, DTensor) else parameter).data_ptr()
