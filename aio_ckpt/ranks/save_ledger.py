"""Agreement of one save: what the ranks tell the leader, and what the leader knows of them. Pure but for a log line."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
from isal import isal_zlib

from aio_ckpt.errors import PeerFailedError, PlanChangedError
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.tensor_table import are_sizes
from aio_ckpt.plan.assignment import Assignment, Boxes, assign, unequal_objects, unequal_replicas
from aio_ckpt.plan.global_plan import Stored, render_global
from aio_ckpt.plan.shard_table import LocalPlan, ShardTable, intern

__all__ = [
    "AssignReply",
    "CommitReply",
    "ContentSums",
    "Extent",
    "Ledger",
    "PlanMsg",
    "SentExtents",
    "Vote",
    "extents_crc32",
    "slowest_ranks",
]

Extent: TypeAlias = "tuple[int, int]"
"""(offset in the data file, length)."""

_log = logging.getLogger("aio_ckpt")
_SHOWN = 5
_SHARES_KEPT = 4
"""Shares that the leader remembers of a rank: saves in flight may still write an older one."""


# -- a rank to the leader ---------------------------------------------------------------------------


class ContentSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums of the contents of all that a rank holds: what two ranks hold alike is equal if its sums are."""

    tensors: bytes
    """int64, little-endian: one for each tensor item, see :func:`aio_ckpt.snapshot.replica_sums.content_sums`."""
    objects: bytes
    """CRC32 of the encoded bytes of each object, uint32, little-endian."""


class PlanMsg(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """A miss: this rank holds all of this, and captures what it is told to write."""

    step: int
    """Step of the save."""
    local: LocalPlan
    """What the rank holds."""
    content: ContentSums | None = None
    """Sums of what it holds, by which replicas are compared."""


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="W"):
    """A rank's vote to commit: its share stands in its data file, its manifest beside it, both durable."""

    step: int
    """Step of the save."""
    share_id: bytes
    """What was written."""
    nbytes: int
    """Length of the rank's manifest."""
    crc32: int
    """CRC32 of it."""
    secs: tuple[float, float, float]
    """``blocked_secs``, ``staged_secs`` and ``written_secs`` of this rank."""
    moved: tuple[tuple[int, int, int], ...]
    """(number, offset, length) of objects that do not stand where they stood in the save before."""
    extents_crc32: int
    """CRC32 over the places of all objects, after ``moved``."""
    places: bytes | None = None
    """The first time that this share is written: offset and length of every item, int64, little-endian."""


class SentExtents:
    """Places of objects that the leader was told in the last save that was committed."""

    def __init__(self) -> None:
        self._share_id = b""
        self._spans: Sequence[Extent] = ()

    def is_new(self, share_id: bytes) -> bool:
        """Whether the leader may not know where the items of this share stand."""
        return share_id != self._share_id

    def moved(self, share_id: bytes, spans: Sequence[Extent], *, is_alone: bool) -> tuple[tuple[int, int, int], ...]:
        """What to tell of ``spans``: all, unless no other save can have told anything since."""
        known = self._spans if is_alone and share_id == self._share_id else ()
        if len(known) != len(spans):
            return tuple((number, *span) for number, span in enumerate(spans))
        return tuple((number, *span) for number, span in enumerate(spans) if span != known[number])

    def confirm(self, share_id: bytes, spans: Sequence[Extent]) -> None:
        """The save was committed: the leader knows."""
        self._share_id, self._spans = share_id, spans


def extents_crc32(spans: Sequence[Extent]) -> int:
    """CRC32 over places."""
    flat = [number for span in spans for number in span]
    return isal_zlib.crc32(struct.pack(f"<{len(flat)}q", *flat))


# -- the leader to a rank ---------------------------------------------------------------------------


class AssignReply(msgspec.Struct, frozen=True, array_like=True, tag="A"):
    """Some rank planned anew: this is what each writes."""

    share_id: bytes
    """Its name; that of the share which the rank has, if it keeps it."""
    share: Assignment | None
    """None: the rank keeps what it has."""


class CommitReply(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """Durable and visible."""

    slowest: dict[str, int]
    """Per stage, the rank that took longest."""


# -- what the leader knows --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Known:
    """One share of one rank."""

    local: LocalPlan
    """All that the rank held."""
    share: Assignment
    """What of it the rank writes."""
    items: int
    """How many tensor items that are."""
    places: bytes = b""
    """Where its items stand; empty until it was written once."""
    spans: list[Extent] = field(default_factory=list)
    """Where its objects stand."""


class Ledger:
    """What the leader knows of every rank. On the loop's thread; :meth:`template` may run in another.

    Invariant: a share is what its rank captures, until the rank plans anew.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks: list[dict[bytes, _Known]] = [{} for _ in range(world_size)]
        self._shares = 0
        self._rendered: tuple[tuple[bytes, ...], MetadataTemplate] | None = None

    def check(self, reports: Sequence[PlanMsg | Vote]) -> None:
        """Raise PeerFailedError unless all ranks save one step, PlanChangedError for a share that is not known."""
        if len(self._ranks) == 1:
            return  # one rank writes all that it holds: nothing was assigned
        for rank, report in enumerate(reports):
            if report.step != reports[0].step:
                raise PeerFailedError(
                    f"rank {rank} saves step {report.step} where rank 0 saves step {reports[0].step}: every rank has "
                    "to call save() as often as the others, with the same steps; engines opened anew on all ranks "
                    "begin anew",
                    rank=rank,
                    stage="agree",
                )
            if isinstance(report, Vote) and report.share_id not in self._ranks[rank]:
                raise PlanChangedError(f"rank {rank} wrote what was not agreed; the next save plans anew on all ranks")

    def assign(self, reports: Sequence[PlanMsg | Vote]) -> list[AssignReply]:
        """New shares for the ranks that planned anew; the others keep theirs.

        Raises:
            DuplicateNameError, PlanChangedError: see :func:`aio_ckpt.plan.assignment.assign`.
        """
        plans, kept, contents = [], {}, {}
        for rank, report in enumerate(reports):
            if isinstance(report, PlanMsg):
                plans.append(report.local)
                if report.content is not None:
                    contents[rank] = report.content
            else:
                known = self._ranks[rank][report.share_id]
                plans.append(known.local)
                kept[rank] = known.share
        plans = intern(plans, (known.local for shares in self._ranks for known in shares.values()))
        held = ShardTable.of(plans)
        boxes = Boxes.of_rows(held)
        unequal = unequal_replicas(held, boxes, {rank: found.tensors for rank, found in contents.items()})
        _warn_of(
            {held.names[name] for name in held.name[unequal[boxes.of]].tolist()}
            | unequal_objects(held, {rank: found.objects for rank, found in contents.items()})
        )
        shares, items = assign(held, boxes, kept, unequal)
        replies = []
        for rank, (share, count) in enumerate(zip(shares, items, strict=True)):
            report = reports[rank]
            if isinstance(report, Vote):
                replies.append(AssignReply(report.share_id, None))
                continue
            self._shares += 1
            replies.append(AssignReply(self._shares.to_bytes(4, "little"), share))
            self._remember(rank, replies[-1].share_id, _Known(local=plans[rank], share=share, items=count))
        return replies

    def _remember(self, rank: int, share_id: bytes, known: _Known) -> None:
        shares = self._ranks[rank]
        shares[share_id] = known
        while len(shares) > _SHARES_KEPT:
            del shares[next(iter(shares))]

    def learn(self, written: Sequence[Vote]) -> list[Extent]:
        """Every rank has written: the places of all objects, in the order of the metadata.

        Raises:
            PlanChangedError: a rank wrote something else than its share.
        """
        spans: list[Extent] = []
        for rank, report in enumerate(written):
            known = self._ranks[rank].get(report.share_id)
            if known is None:
                raise PlanChangedError(f"rank {rank} wrote what was not agreed; the next save plans anew on all ranks")
            if report.places is not None:
                known.places = report.places
                known.spans = [(0, 0)] * known.share.count_objects()
            is_whole = len(known.places) == 16 * known.items and (
                report.places is None or are_sizes(np.frombuffer(report.places, "<i8"))
            )
            for number, offset, nbytes in report.moved:
                is_whole = is_whole and number < len(known.spans) and min(number, offset, nbytes) >= 0
                if is_whole:
                    known.spans[number] = (offset, nbytes)
            if not is_whole or extents_crc32(known.spans) != report.extents_crc32:
                raise PlanChangedError(f"rank {rank} lost count of what stands where; the next save plans anew")
            spans += known.spans
        return spans

    def template(self, written: Sequence[Vote]) -> MetadataTemplate:
        """``.metadata`` of these shares: rendered once, as long as no rank plans anew.

        Raises:
            PlanChangedError: the shares leave a part of a tensor out.
        """
        ids = tuple(report.share_id for report in written)
        if self._rendered is None or self._rendered[0] != ids:
            stored = [
                Stored(local=known.local, share=known.share, places=known.places)
                for known in (self._ranks[rank][share_id] for rank, share_id in enumerate(ids))
            ]
            self._rendered = ids, render_global(stored)
        return self._rendered[1]


def _warn_of(names: Set[str]) -> None:
    if names:
        _log.warning(
            "%d values differ between ranks that hold the same part of them, %s for example: the lowest rank's are "
            "saved; PerRank(value) saves one for each rank",
            len(names),
            sorted(names)[:_SHOWN],
        )


def slowest_ranks(written: Sequence[Vote]) -> Mapping[str, int]:
    """Per stage, the rank that took longest; empty for one rank alone."""
    if len(written) < 2:
        return {}
    stages = ("blocked", "staged", "written")
    return {
        stage: max(range(len(written)), key=lambda rank: written[rank].secs[number])
        for number, stage in enumerate(stages)
    }
