"""Turns: which copies out of devices come first, and which a guard lets wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from aio_ckpt.plan.copy_descriptors import Issues
from aio_ckpt.plan.copy_plan import ChunkRoutes

__all__ = ["NO_TURNS", "KnownTurns", "Turns"]

_IssuesByDevice = Mapping[torch.device, Issues]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The copies of one layout, by whether all that they read is guarded."""

    first: _IssuesByDevice
    """Of leaves that nobody guards."""
    guarded: _IssuesByDevice
    """Of the others."""
    guarded_spans: Set[int]
    """Where the spans begin all of whose leaves are guarded."""

    def issues(self, *, is_guarded: bool) -> _IssuesByDevice:
        """Of that turn."""
        return self.guarded if is_guarded else self.first


NO_TURNS = Turns(first={}, guarded={}, guarded_spans=frozenset())


@dataclass(slots=True, eq=False)
class KnownTurns:
    """The turns of the newest save: with 10,000 tensors they take a millisecond to find, and seldom change.

    Known by identity: who makes other routes, issues or guarded leaves makes new objects. Holds numbers, no source.
    """

    _routes: Sequence[ChunkRoutes] = ()
    _issues: _IssuesByDevice = field(default_factory=dict)
    _guarded: Set[int] = frozenset()
    _turns: Turns = NO_TURNS

    def of(self, routes: Sequence[ChunkRoutes], issues: _IssuesByDevice, guarded: Set[int]) -> Turns:
        """For these routes and copies by address, with the guarded leaves."""
        if not guarded:
            return Turns(first=issues, guarded={}, guarded_spans=frozenset())
        if self._routes is not routes or self._issues is not issues or self._guarded is not guarded:
            self._turns = _split(routes, issues, guarded)
            self._routes, self._issues, self._guarded = routes, issues, guarded
        return self._turns


def _split(routes: Sequence[ChunkRoutes], issues: _IssuesByDevice, guarded: Set[int]) -> Turns:
    wanted = np.fromiter(guarded, dtype=np.int64, count=len(guarded))
    is_guarded = {device: np.isin(found.leaves, wanted) for device, found in issues.items()}
    return Turns(
        first={device: found.only(~is_guarded[device]) for device, found in issues.items()},
        guarded={device: found.only(is_guarded[device]) for device, found in issues.items()},
        guarded_spans={span.start for route in routes for span in route.gathered if guarded >= {*span.leaves}},
    )
