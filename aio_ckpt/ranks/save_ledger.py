"""Messages of one save, and the leader's ledger of all ranks' assignments. Pure but for a log line."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from aio_ckpt.config import DifferingReplicas
from aio_ckpt.errors import DuplicateNameError, EmptyStateError, PeerFailedError, PlanChangedError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.plan.assignment import Assignment, Boxes, assign
from aio_ckpt.plan.differing_replicas import (
    ObjectColumns,
    have_to_be_equal,
    may_differ,
    replicated_items,
    unequal_replicas,
)
from aio_ckpt.plan.global_plan import Stored, are_places, render_global
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.shard_table import Flags, LocalPlan, ShardTable, intern, object_names
from aio_ckpt.reports import title
from aio_ckpt.state.names import listed

Extent: TypeAlias = "tuple[int, int]"
"""(offset in the data file, length)."""

_log = logging.getLogger("aio_ckpt")
_SHARES_KEPT = 4
"""Newest shares of a rank that the leader remembers: saves in flight may still write an older one."""


# -- a rank to the leader ---------------------------------------------------------------------------


class ContentSums(msgspec.Struct, frozen=True, array_like=True):
    """Checksums of the values that a rank holds. Two ranks hold equal replicas if the checksums are equal."""

    objects: bytes
    """CRC32 of the encoded bytes of each object, uint32, little-endian."""
    tensors: bytes = b""
    """int64, little-endian: one for each tensor item, see :func:`aio_ckpt.snapshot.replica_sums.content_sums`. Empty if
    this save does not compare tensors. 0 for an item that no other rank holds."""


class PlanMsg(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """Message of a rank without a plan: all that it holds. The rank then captures what the leader assigns to it."""

    target: int | str
    """Step that the rank saves, or the path as text."""
    local: LocalPlan
    content: ContentSums


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="W"):
    """Vote of a rank to commit: its data file with its share, and its manifest, are durable."""

    target: int | str
    """Step that the rank saves, or the path as text."""
    share_id: bytes
    """Identity of the share that was written, as the leader named it."""
    nbytes: int
    """Length of the rank's manifest."""
    crc32: int
    """CRC32 of the rank's manifest."""
    secs: tuple[float, float, float]
    """``blocked_secs``, ``staged_secs`` and ``written_secs`` of this rank."""
    moved: tuple[tuple[int, int, int], ...]
    """(number, offset, length) of the objects whose place differs from that in the save before."""
    extents_crc32: int
    """CRC32 over the places of all objects, after ``moved``."""
    content: ContentSums
    """Checksums of all that this rank holds, in the order of its plan. A plan that was sent had those of tensors."""
    places: bytes | None = None
    """Places of the tensor items, see :func:`aio_ckpt.plan.global_plan.places`; None if the leader knows them."""


class SentExtents:
    """Places of objects that this rank sent to the leader in the last committed save."""

    def __init__(self) -> None:
        self._layout: ImageLayout | None = None
        self._spans: Sequence[Extent] = ()

    def is_new(self, layout: ImageLayout) -> bool:
        """Return whether the leader may not know the places of the items of this layout of a share."""
        return layout is not self._layout

    def moved(
        self, layout: ImageLayout, spans: Sequence[Extent], *, is_alone: bool
    ) -> tuple[tuple[int, int, int], ...]:
        """Return (number, offset, length) of the objects to send to the leader.

        ``is_alone``: no other save has sent anything since. Then only those that have moved are sent, else all.
        """
        known = self._spans if is_alone and layout is self._layout else ()
        if len(known) != len(spans):
            return tuple((number, *span) for number, span in enumerate(spans))
        return tuple((number, *span) for number, span in enumerate(spans) if span != known[number])

    def forget(self) -> None:
        """Forget all places, after a save failed that the leader may have learned from. The next vote sends all."""
        self._layout, self._spans = None, ()

    def confirm(self, layout: ImageLayout, spans: Sequence[Extent]) -> None:
        """Note that the save is committed: the leader knows the places of ``layout``, and ``spans``."""
        self._layout, self._spans = layout, spans


def extents_crc32(spans: Sequence[Extent]) -> int:
    """Return the CRC32 over offsets and lengths as int64, little-endian."""
    flat = [number for span in spans for number in span]
    return crc32_of(struct.pack(f"<{len(flat)}q", *flat))


# -- the leader to a rank ---------------------------------------------------------------------------


class AssignReply(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """Reply of the leader after a rank planned anew: the share of the rank that reads it."""

    share_id: bytes
    """Identity of the share that the rank is to write."""
    share: Assignment | None
    """None if the rank keeps the share that it has."""
    replicated: bytes = b""
    """Flag for each tensor item of the rank's plan, packed: whether another rank holds it, too."""
    stored_by: tuple[int, ...] | None = None
    """See :class:`~aio_ckpt.plan.assignment.Assigned`."""


class CommitReply(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """Reply of the leader: the step is durable and visible."""

    slowest: dict[str, int]
    """Per stage, the rank that took longest."""
    extra: dict[str, Any]
    """JSON values of the leader's ``save(extra=)``, which are stored with the step."""
    is_comparison_due: bool = False
    """Whether every rank is to send checksums of tensors in its next save: a rank planned anew alone."""


# -- what the leader knows --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _KnownShare:
    """One share of one rank, as the leader knows it."""

    local: LocalPlan
    """All that the rank held when the share was assigned."""
    share: Assignment
    """The part of ``local`` that the rank writes."""
    items: int
    """Number of tensor items of the share."""
    places: bytes = b""
    """Places of the tensor items, as in :class:`Vote`; empty until the share was written once."""
    is_placed: bool = False
    """Whether ``places`` has been checked and holds each item."""
    spans: list[Extent] = field(default_factory=list)
    """Places of the objects in the newest save."""


class Ledger:
    """Shares of every rank, on the leader. The loop's thread calls it; :meth:`template` may run in another thread.

    Invariant: a rank captures exactly its share, until it plans anew.
    """

    def __init__(self, world_size: int, *, differing: DifferingReplicas) -> None:
        """``differing``: what becomes of a save whose replicas differ and have to be equal."""
        self._ranks: list[dict[bytes, _KnownShare]] = [{} for _ in range(world_size)]
        self._differing = differing
        self._shares = 0
        self._rendered: tuple[tuple[bytes, ...], MetadataTemplate] | None = None
        self._objects: tuple[tuple[bytes, ...], ObjectColumns] | None = None
        self._warned: set[str] = set()
        self._equal_in: int | str | None = None
        """Step or path of the newest save in which the tensors of all ranks were compared and were equal."""
        self._of_lowest: set[str] = set()
        """Names of tensors of which the lowest rank writes each part that it holds: those that differ or may differ."""
        self.is_comparison_due = False
        """Whether a rank has planned anew since, without sums of the other ranks."""

    def check_same_target(self, reports: Sequence[PlanMsg | Vote]) -> None:
        """Raise PeerFailedError unless all ranks save one step or path, PlanChangedError if a share is unknown."""
        if len(self._ranks) == 1:
            return  # one rank writes all that it holds; nothing is assigned
        for rank, report in enumerate(reports):
            if report.target != reports[0].target:
                raise PeerFailedError(
                    f"rank {rank} saves {title(report.target)} where rank 0 saves {title(reports[0].target)}: every "
                    "rank has to call save() as often as the others, with the same steps and paths; engines opened "
                    "anew on all ranks begin anew",
                    rank=rank,
                    stage="agree",
                )
            if isinstance(report, Vote) and report.share_id not in self._ranks[rank]:
                raise PlanChangedError(f"rank {rank} wrote what was not agreed; the next save plans anew on all ranks")

    def assign(self, reports: Sequence[PlanMsg | Vote]) -> list[AssignReply]:
        """Assign new shares to the ranks that planned anew; the others keep theirs. Returns a reply for each rank.

        Raises:
            EmptyStateError: no rank holds a leaf.
            DuplicateNameError: two ranks give one name to different things.
            PlanChangedError: see :func:`aio_ckpt.plan.assignment.assign`.
        """
        plans, kept = [], {}
        for rank, report in enumerate(reports):
            if isinstance(report, PlanMsg):
                plans.append(report.local)
            else:
                known = self._ranks[rank][report.share_id]
                plans.append(known.local)
                kept[rank] = known.share
        plans = intern(plans, (known.local for shares in self._ranks for known in shares.values()))
        held = ShardTable.of(plans)
        if not held.names and not any(held.objects):
            raise EmptyStateError("the states of all ranks hold no leaf: give at least one tensor or object")
        boxes = Boxes.of_rows(held)
        self.is_comparison_due = True  # unless all ranks have sent sums
        strict = have_to_be_equal(held, boxes)
        unequal = self._compare(held, boxes, ObjectColumns.of(held.objects), reports, strict)
        of_lowest = unequal | may_differ(held, boxes)
        if self._differing == "rank0":  # they may differ later, and the values of one rank belong together
            of_lowest[:] = True
        self._of_lowest.update(_names_of(held, boxes, of_lowest))
        assigned = assign(held, boxes, kept, _boxes_of(held, boxes, self._of_lowest))
        replies, replicated = [], replicated_items(held, boxes)
        for rank, (given, report) in enumerate(zip(assigned, reports, strict=True)):
            if isinstance(report, Vote):
                replies.append(AssignReply(report.share_id, None))
                continue
            self._shares += 1
            share_id = self._shares.to_bytes(4, "little")
            replies.append(AssignReply(share_id, given.share, replicated[rank], given.stored_by))
            shares = self._ranks[rank]
            shares[share_id] = _KnownShare(local=plans[rank], share=given.share, items=given.items)
            while len(shares) > _SHARES_KEPT:
                del shares[next(iter(shares))]
        return replies

    def compare(self, votes: Sequence[Vote]) -> None:
        """Compare what several ranks hold in one save, by the checksums in their votes.

        Raises:
            DuplicateNameError: replicas differ that have to be equal.
        """
        ids = tuple(vote.share_id for vote in votes)
        plans = [self._ranks[rank][share_id].local for rank, share_id in enumerate(ids)]
        if self._objects is None or self._objects[0] != ids:
            self._objects = ids, ObjectColumns.of(object_names(plans))
        if any(vote.content.tensors for vote in votes):
            held = ShardTable.of(plans)
            boxes = Boxes.of_rows(held)
            # Each of the others is written by any rank, so that those of a mesh that drift apart would be mixed.
            self._compare(held, boxes, self._objects[1], votes, ~_boxes_of(held, boxes, self._of_lowest))
        else:
            self._warn(self._objects[1].unequal({rank: vote.content.objects for rank, vote in enumerate(votes)}))

    def _compare(
        self, held: ShardTable, boxes: Boxes, objects: ObjectColumns, reports: Sequence[PlanMsg | Vote], strict: Flags
    ) -> Flags:
        """Return, per box, whether its replicas differ. Warn of differences that are allowed.

        Raises:
            DuplicateNameError: replicas of a ``strict`` box differ.
        """
        sums = {rank: report.content.tensors for rank, report in enumerate(reports) if report.content.tensors}
        unequal = unequal_replicas(held, boxes, sums)
        if self._differing == "refuse" and (refused := unequal & strict).any():
            raise _differ(_names_of(held, boxes, refused), self._equal_in)
        if all(rank in sums for rank in np.flatnonzero(np.diff(held.starts)).tolist()):
            self._equal_in, self.is_comparison_due = reports[0].target, False
        self._warn(
            set(_names_of(held, boxes, unequal))
            | objects.unequal({rank: report.content.objects for rank, report in enumerate(reports)})
        )
        return unequal

    def _warn(self, names: Set[str]) -> None:
        """Warn, once for each name, that values differ between ranks."""
        new = sorted(names - self._warned)
        self._warned.update(new)
        if new:
            _log.warning(
                "values differ between ranks that hold the same part of them (%s): each part is saved as one rank has "
                "it; PerRank(value) saves one for each rank. Logged once for each name",
                listed(new),
            )

    def learn(self, written: Sequence[Vote]) -> list[Extent]:
        """Learn the places that the ranks have written. Returns those of all objects, in the order of the metadata.

        Raises:
            PlanChangedError: a rank wrote another share than the assigned one.
        """
        spans: list[Extent] = []
        for rank, report in enumerate(written):
            known = self._ranks[rank].get(report.share_id)
            if known is None:
                raise PlanChangedError(f"rank {rank} wrote what was not agreed; the next save plans anew on all ranks")
            if report.places is not None:
                known.places, self._rendered = report.places, None
                known.spans = [(0, 0)] * known.share.count_objects()
                known.is_placed = are_places(report.places, known.items)
            is_whole = known.is_placed
            for number, offset, nbytes in report.moved:
                is_whole = is_whole and number < len(known.spans) and min(number, offset, nbytes) >= 0
                if is_whole:
                    known.spans[number] = (offset, nbytes)
            if not is_whole or extents_crc32(known.spans) != report.extents_crc32:
                raise PlanChangedError(f"rank {rank} lost count of what stands where; the next save plans anew")
            spans += known.spans
        return spans

    def template(self, written: Sequence[Vote]) -> MetadataTemplate:
        """Return ``.metadata`` of these shares. It is rendered again only after a rank planned anew.

        Raises:
            PlanChangedError: the shares do not cover a tensor.
        """
        ids = tuple(report.share_id for report in written)
        if self._rendered is None or self._rendered[0] != ids:
            stored = [
                Stored(local=known.local, share=known.share, places=known.places)
                for known in (self._ranks[rank][share_id] for rank, share_id in enumerate(ids))
            ]
            self._rendered = ids, render_global(stored)
        return self._rendered[1]


def _names_of(held: ShardTable, boxes: Boxes, chosen: Flags) -> list[str]:
    """Return the names of the chosen boxes, sorted."""
    is_chosen = np.zeros(len(held.names), np.bool_)
    is_chosen[held.name[chosen[boxes.of]]] = True  # no line of Python runs per row: there may be millions
    return sorted(held.names[name] for name in np.flatnonzero(is_chosen).tolist())


def _boxes_of(held: ShardTable, boxes: Boxes, names: Set[str]) -> Flags:
    """Return, per box, whether it is a part of a tensor with one of ``names``."""
    is_named = np.array([name in names for name in held.names], np.bool_)
    chosen = np.zeros(boxes.count, np.bool_)
    chosen[boxes.of[is_named[held.name]]] = True
    return chosen


def _differ(names: Sequence[str], equal_in: int | str | None) -> DuplicateNameError:
    """``equal_in``: the save in which the ranks were compared last; None if they never were."""
    doubt = ""
    if equal_in is not None:
        doubt = (
            f" They were equal in the save of {title(equal_in)}. The saves since then were not compared, and may hold "
            "parts of several ranks: do not resume from those."
        )
    return DuplicateNameError(
        f"tensors differ between ranks that give them one name ({listed(names)}): a "
        "load would give the values of one rank to all. Wrap what is of each rank's own in PerRank, as "
        "PerRank(optimizer) if nothing in it is sharded; give parts of one tensor as DTensor or Shard; or give names "
        "that differ, as torch's get_optimizer_state_dict() does. Buffers may differ if the state holds the module "
        "itself. DTensors that a mesh declares replicated (HSDP) may differ from the next save on, which stores those "
        "of the lowest rank. If rank 0's values are meant for all ranks, set "
        'EngineConfig(differing_replicas="rank0").' + doubt
    )


def slowest_ranks(written: Sequence[Vote]) -> Mapping[str, int]:
    """Return, per stage, the rank that took longest; empty for one rank alone."""
    if len(written) < 2:
        return {}
    stages = ("blocked", "staged", "written")
    return {
        stage: max(range(len(written)), key=lambda rank: written[rank].secs[number])
        for number, stage in enumerate(stages)
    }
