"""Capture: the copies of a state into the image, issued on the caller's thread, and their order."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from aio_ckpt.errors import SourceChangedError, StallError
from aio_ckpt.memory.copies import Copies, CopyEvent, pack_part
from aio_ckpt.memory.cuda import CopyStreams
from aio_ckpt.memory.host_copy import copy_all, first_unreadable
from aio_ckpt.plan.chunks import Chunk, Piece
from aio_ckpt.plan.copy_plan import CopyPlan, CopyTable, GatherRun
from aio_ckpt.plan.pointer_fingerprint import fingerprint_of
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage
from aio_ckpt.plan.structure import flat_bytes, has_stored_bytes
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.snapshot.device_copy import DeviceCopier
from aio_ckpt.snapshot.gather_buffers import GatherBuffers
from aio_ckpt.snapshot.image import Image


@dataclass(frozen=True, slots=True, eq=False)
class CopyOrder:
    """Copies from devices, split into phases that are issued one after the other.

    It holds numbers, and no source tensor.
    """

    copies: CopyPlan
    issued: Mapping[torch.device, CopyTable]
    """Copies by address that are split. The sources are device copies where there are any."""
    later: Sequence[Set[int]]
    """Leaves of phase 1 and of each later phase, disjoint. All others belong to phase 0."""
    tables: Sequence[Mapping[torch.device, CopyTable]]
    """Copies by address of each phase."""
    run_phases: Mapping[int, int]
    """Phase of each gather run, by image offset: the first phase of its leaves."""

    @classmethod
    def of(cls, copies: CopyPlan, issued: Mapping[torch.device, CopyTable], later: Sequence[Set[int]]) -> CopyOrder:
        """Split ``issued``, and the gather runs of ``copies``."""
        phases = {leaf: phase for phase, leaves in enumerate(later, 1) for leaf in leaves}
        rows = {
            device: np.array([phases.get(leaf, 0) for leaf in table.leaves.tolist()], dtype=np.int64)
            for device, table in issued.items()
        }
        tables = [
            {device: table.where(rows[device] == phase) for device, table in issued.items()}
            for phase in range(len(later) + 1)
        ]
        runs = (run for chunk in copies.chunks for run in chunk.gathered)
        return cls(
            copies, issued, later, tables, {run.start: min(phases.get(leaf, 0) for leaf in run.leaves) for run in runs}
        )


_BRIEF_BYTES = 1 << 20
"""Longest run from the host that is not reported at once. Only the last chunk can be so short; it is copied before a
woken writer would begin."""
_RUN_GROWTH = 8
"""Factor by which each run of chunks from devices is longer than the one before. A batch and an event for each run cost
the caller tens of microseconds, and a transfer is an order of magnitude faster than a disk."""


class CopyEngines:
    """Streams, buffers and the copy order that the captures of one engine share."""

    def __init__(self, max_copy_bytes: int | None = 0) -> None:
        """``max_copy_bytes``: see :class:`DeviceCopier`."""
        self.streams = CopyStreams()
        self.gathers = GatherBuffers()
        self.device_copier = DeviceCopier(max_copy_bytes)
        self._order: CopyOrder | None = None

    def order(self, copies: CopyPlan, issued: Mapping[torch.device, CopyTable], later: Sequence[Set[int]]) -> CopyOrder:
        """Return the order of these copies. That of the newest save is kept: 10,000 tensors take a millisecond.

        Copies are compared by identity, because a change of them always makes new objects.
        """
        known = self._order
        if known is None or known.copies is not copies or known.issued is not issued or known.later != later:
            known = self._order = CopyOrder.of(copies, issued, later)
        return known

    def prepare(self, plan: ImagePlan) -> None:
        """Make the side streams, the gather buffers and the device copies of a plan before its first capture."""
        for device in set(plan.structure.devices):
            gathered = [run for chunk in plan.copies.chunks for run in chunk.gathered if run.device == device]
            copies = self.streams.begin(device, is_registered=True)
            if gathered:
                self.gathers.target(plan, gathered[0], copies)
        self.device_copier.allocate(plan, lambda device: self.streams.begin(device, is_registered=True))

    def clear(self) -> None:
        """Free all memory of devices."""
        self.gathers.clear()
        self.device_copier.clear()


class Capture:
    """Copies of one save, which :func:`capture` issues and :meth:`finish` waits for.

    It owns the references to the source tensors, from the call of ``save()`` until the last copy is done.
    """

    def __init__(self, planned: PlannedImage, image: Image, copy_engines: CopyEngines, guarded: Set[int]) -> None:
        self._planned = planned
        self._image = image
        self._copy_engines = copy_engines
        # In waves, no copy may be postponed, because the ring needs every chunk in its turn.
        self._guarded = frozenset(guarded) if image.is_whole else frozenset[int]()
        self._copy_order: CopyOrder
        self._last_phase = 0
        self._device_memory: Sequence[torch.Tensor] = ()
        self._sources_free_at: tuple[CopyEvent, ...] | None = None
        self._copies: dict[torch.device, Copies] = {}
        self._without_event: set[Copies] = set()
        self._newest_events: dict[Copies, CopyEvent] = {}
        self._flat: dict[int, torch.Tensor] = {}
        self.events: tuple[CopyEvent, ...] = ()
        """Events after all copies; empty until all are issued."""
        self.source_events: tuple[CopyEvent, ...] = ()
        """Events that must be reached before a source may change."""

    def issue_first(self) -> None:
        """Issue the copies from devices of every phase but the last.

        Device copies come first. A leaf that has one is moved to the host from there in the last phase, as nothing
        changes that copy. Unguarded leaves without one are phase 0: the caller's stream waits for these alone. Guarded
        leaves without one are the phase after it, so that ``step()`` waits for their copies and for no move.
        """
        plan, engines = self._planned.plan, self._copy_engines
        copies, issued = plan.copies, plan.copies.issued
        device_copy = engines.device_copier.allocate(plan, self._copies_from) if self._image.is_whole else None
        copied: Set[int] = frozenset()
        if device_copy is not None:
            found, self._device_memory = device_copy
            for device, groups in found.groups.items():
                self._copies_from(device).copy_groups(groups)
            issued, copied = found.issued, found.leaves
        later = [leaves for leaves in (self._guarded - copied, copied) if leaves]
        self._copy_order, self._last_phase = engines.order(copies, issued, later), len(later)
        if not copies.chunks:
            return
        for phase in range(self._last_phase):
            self._issue_device(self._image.chunks[: len(copies.chunks)], phase)
            events = tuple(copies.record_event() for copies in self._copies.values())
            if phase == 0:
                for event in events:
                    event.fence()
            if copied:
                self._sources_free_at = events

    def issue(self, run: Sequence[Chunk]) -> None:
        """Issue the copies of a run of chunks, except those that :meth:`issue_first` has issued."""
        copies = self._planned.plan.copies
        run = run[: max(len(copies.chunks) - run[0].index, 0)]  # later chunks hold only objects
        for chunk in run:
            if len(copies.moved):
                self._move(chunk)
            if packed := copies.chunks[chunk.index].packed:
                self._copy(chunk, packed)
        if run:
            self._issue_device(run, self._last_phase)

    def events_of(self, run: Sequence[Chunk]) -> tuple[CopyEvent, ...]:
        """Return events after all copies from devices into a run of chunks, once these are issued; none for the host.

        All of them may have been issued by :meth:`issue_first`, and none since the run before.
        """
        self._record_events()
        copies = self._planned.plan.copies.chunks
        from_device = any(copies[chunk.index].comes_from_device for chunk in run if chunk.index < len(copies))
        return tuple(self._newest_events.values()) if from_device else ()

    def _record_events(self) -> None:
        self._newest_events |= {copies: copies.record_event() for copies in self._without_event}
        self._without_event.clear()

    def end(self) -> None:
        """End the issue of copies: if the sources are not guarded, the caller's stream waits for the copies."""
        self._record_events()
        self.events = tuple(self._newest_events.values())
        self.source_events = self.events if self._sources_free_at is None else self._sources_free_at
        self._device_memory = ()  # by stream order, it is free after the moves
        if not self._last_phase:
            for event in self.events:
                event.fence()

    @property
    def is_done(self) -> bool:
        """Whether every copy is done."""
        return all(event.query() for event in self.events)

    def check_sources(self) -> None:
        """Raise SourceChangedError if another thread has freed or resized a source during the capture."""
        planned = self._planned
        if fingerprint_of(planned.tensors) != planned.plan.fingerprint:
            raise SourceChangedError(
                "a tensor was freed, resized or reassigned by another thread while save() captured it: "
                "keep the state still until save() returns"
            )

    def finish(self) -> None:
        """Block until every copy is done, then drop the references to the sources."""
        for event in self.events:
            event.synchronize()
        self._flat.clear()
        self._planned.tensors.clear()
        self._planned.objects.clear()

    def _shift(self, chunk: Chunk) -> int:
        """Return the difference between a chunk's offset in the arena and its offset in the image."""
        return self._image.slot_offset(chunk) - chunk.start

    def _base(self, chunk: Chunk) -> int:
        """Return the address that the first byte of the image would have if the whole image lay around the chunk."""
        return self._image.lease.arena.address + self._shift(chunk)

    def _rows(self, table: CopyTable, run: Sequence[Chunk]) -> CopyTable:
        # The end of the tensors limits the range, as the objects after them grow: each range is cached.
        return table.within(run[0].start, min(run[-1].stop, self._planned.plan.layout.tensor_bytes))

    def _issue_device(self, run: Sequence[Chunk], phase: int) -> None:
        """Issue the copies of one phase from devices, of a run of chunks that hold tensors.

        The chunks lie side by side in the arena, as in the image, so that one base address serves all.
        """
        copy_order = self._copy_order
        for device, table in copy_order.tables[phase].items():
            rows = self._rows(table, run)
            if len(rows):
                self._copies_from(device).copy_vectors(self._base(run[0]), rows.vectors)
        for chunk in run:
            copies = copy_order.copies.chunks[chunk.index]
            for gathered in copies.gathered:
                if copy_order.run_phases[gathered.start] == phase:
                    self._gather(chunk, gathered)
            if copies.converted and phase == 0:
                self._copy(chunk, copies.converted)

    def _move(self, chunk: Chunk) -> None:
        plan, base = self._planned.plan, self._base(chunk)
        rows = self._rows(plan.copies.moved, [chunk])
        try:
            copy_all(base, rows.vectors)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            leaf = int(rows.leaves[first_unreadable(base, rows.vectors)])
            name = next(item.fqns[0] for item in plan.layout.items if item.leaf == leaf)
            raise SourceChangedError(
                f"{name!r}: its memory cannot be read any more ({error.strerror}), as that of a mapped file "
                "that was truncated: keep it until save() returns, or give a clone()"
            ) from error

    def _gather(self, chunk: Chunk, run: GatherRun) -> None:
        copies = self._copies_from(run.device)
        gathered = self._copy_engines.gathers.target(self._planned.plan, run, copies)
        if gathered is None:
            self._copy(chunk, run.pieces)
            return
        start = run.start + self._shift(chunk)
        target = self._image.lease.arena.tensor[start : start + run.stop - run.start]
        copies.copy_groups(gathered.groups)
        copies.copy(target, gathered.memory)

    def _copy(self, chunk: Chunk, pieces: Sequence[Piece]) -> None:
        shift = self._shift(chunk)
        for piece in pieces:
            leaf = self._planned.plan.layout.items[piece.item].leaf
            tensor = self._planned.tensors[leaf].detach()
            start = piece.image_start + shift
            target = self._image.lease.arena.tensor[start : start + piece.nbytes]
            if tensor.device.type == "cpu" and not has_stored_bytes(tensor):
                # The tensor is copied piece by piece, because a contiguous copy of it would exceed the budget.
                pack_part(target.view(tensor.dtype), tensor, piece.raw_start // tensor.itemsize)
                continue
            copies = self._copies_from(tensor.device)
            source = self._flat_bytes(leaf, tensor, copies)
            copies.copy(target, source[piece.raw_start : piece.raw_start + piece.nbytes])

    def _copies_from(self, source: torch.device) -> Copies:
        if source not in self._copies:
            is_registered = self._image.lease.arena.is_registered
            self._copies[source] = self._copy_engines.streams.begin(source, is_registered=is_registered)
        self._without_event.add(self._copies[source])
        return self._copies[source]

    def _flat_bytes(self, leaf: int, tensor: torch.Tensor, copies: Copies) -> torch.Tensor:
        if leaf not in self._flat:
            self._flat[leaf] = flat_bytes(tensor if has_stored_bytes(tensor) else copies.contiguous(tensor))
        return self._flat[leaf]


def capture(
    planned: PlannedImage,
    image: Image,
    copy_engines: CopyEngines,
    *,
    guarded: Set[int],
    on_captured: Callable[[Sequence[CapturedRun]], None],
    on_issued: Callable[[Capture], None] = lambda _: None,
    slot_timeout_secs: float,
) -> Capture:
    """Issue every copy of a save, chunk by chunk, so that the first chunks are written while later ones are captured.

    When it returns, host memory is copied. The caller's stream waits for the copies from devices, except for those of
    the leaves in ``guarded``. So the caller's next work cannot tear the snapshot.

    ``on_captured`` gets each run from the host at once. ``on_issued`` is called when all copies are issued, and runs
    from devices are reported after that. If the loop were woken earlier, it would take the GIL during the next CUDA
    call, which costs about 1 ms.

    Raises:
        SourceChangedError: another thread freed or resized a source meanwhile.
        StallError: a slot of the ring did not become free in time.
    """
    work = Capture(planned, image, copy_engines, guarded)
    unreported: list[CapturedRun] = []

    def report() -> None:
        if unreported:
            on_captured([*unreported])
            unreported.clear()

    try:
        try:
            work.issue_first()
            for run, is_issued in _cut_runs(image, planned.plan):
                is_brief = is_issued or run[-1].stop - run[0].start <= _BRIEF_BYTES
                if not is_brief or run[0].index >= image.slots:  # a slot becomes free only after its chunk is reported
                    report()
                _await_slot(image, run[0], slot_timeout_secs)
                work.issue(run)
                unreported.append(([chunk.index for chunk in run], work.events_of(run)))
                if not is_brief:
                    report()
        except (RuntimeError, OSError):
            work.check_sources()  # a changed source explains why torch or the system refused to copy
            raise
        work.check_sources()
        work.end()
        on_issued(work)
        report()
    except BaseException:
        # The caller gives the arena back when this raises, so no copy may still be in flight.
        try:
            work.end()
        finally:
            work.finish()
        raise
    return work


def _cut_runs(image: Image, plan: ImagePlan) -> Iterator[tuple[Sequence[Chunk], bool]]:
    """Yield each run of chunks that are issued together, and whether the run comes from devices.

    From the host, and in waves, a run is one chunk. From devices, the first run is one chunk, so that its write begins
    soon, and later runs grow.
    """
    copies = plan.copies.chunks if image.is_whole else ()  # those of an image whose chunks stay until the save ends
    first, length = 0, 1
    while first < len(image.chunks):
        stop = min(first + length, len(copies))
        issued = [*takewhile(lambda chunk: copies[chunk.index].is_issued, image.chunks[first:stop])]
        run = issued or image.chunks[first : first + 1]
        yield run, bool(issued)
        first += len(run)
        length *= _RUN_GROWTH


def _await_slot(image: Image, chunk: Chunk, timeout_secs: float) -> None:
    if chunk.index < image.slots:
        return
    try:
        failure = image.written[chunk.index - image.slots].exception(timeout_secs)
    except TimeoutError as error:
        raise StallError(
            f"chunk {chunk.index - image.slots} was not written within {timeout_secs} s, so chunk {chunk.index} "
            "cannot be captured: the disk is stalled"
        ) from error
    if failure is not None:  # raised outside of the try, because a passed deadline is a TimeoutError, too
        raise failure
