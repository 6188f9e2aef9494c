"""Gather buffers: device memory in which many small tensors are collected, in the order of the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies, Groups, groups_by_address
from aio_ckpt.plan.copy_plan import CopyPlan, GatherRun
from aio_ckpt.plan.save_plan import ImagePlan

_RUN_ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherTarget:
    """Device memory in which one run is gathered."""

    memory: torch.Tensor
    groups: Groups
    """Copies of the pieces to ``memory``, valid as long as the sources are allocated."""


class GatherBuffers:
    """Gather buffers of one engine, one for each device, for the copies of the newest save.

    Runs take turns in a buffer. All copies of a device are in the order of one stream, so a run is moved to the host
    before a later run is gathered in its place. The object holds its own memory, and never a source.
    """

    def __init__(self) -> None:
        self._copies: CopyPlan | None = None
        self._targets: dict[torch.device, dict[GatherRun, GatherTarget] | None] = {}

    def target(self, plan: ImagePlan, run: GatherRun, copies: Copies) -> GatherTarget | None:
        """Return the memory in which ``run`` of ``plan`` is gathered; None if the device lacks the memory."""
        if self._copies is not plan.copies:
            self._copies, self._targets = plan.copies, {}
        found = self._targets
        if run.device not in found:
            found[run.device] = _lay_out(plan, run.device, copies)
        targets = found[run.device]
        return None if targets is None else targets[run]

    def clear(self) -> None:
        """Drop the memory, which the next save allocates again. By stream order, the issued copies are done first."""
        self._copies, self._targets = None, {}


def _lay_out(plan: ImagePlan, device: torch.device, copies: Copies) -> dict[GatherRun, GatherTarget] | None:
    runs = [run for chunk in plan.copies.chunks for run in chunk.gathered if run.device == device]
    starts, nbytes = _ring_offsets([run.stop - run.start for run in runs], plan.gather_bytes)
    memory = copies.allocate(nbytes)
    if memory is None:
        return None
    return {run: _target(plan.fingerprint, run, memory, start) for run, start in zip(runs, starts, strict=True)}


def _ring_offsets(lengths: Sequence[int], buffer_bytes: int) -> tuple[list[int], int]:
    """Return the offset of each run in a ring buffer of at most ``buffer_bytes``, and the bytes that the runs use."""
    starts: list[int] = []
    cursor = end = 0
    for nbytes in lengths:
        if cursor + nbytes > buffer_bytes:
            cursor = 0
        starts.append(cursor)
        cursor = align_up(cursor + nbytes, _RUN_ALIGNMENT)
        end = max(end, cursor)
    return starts, end


def _target(fingerprint: Sequence[int], run: GatherRun, memory: torch.Tensor, start: int) -> GatherTarget:
    part = memory[start : start + run.stop - run.start]
    first = part.data_ptr() - run.start
    pieces = zip(run.pieces, run.leaves, strict=True)
    copies = [(first + piece.image_start, fingerprint[leaf], piece.nbytes) for piece, leaf in pieces]
    return GatherTarget(memory=part, groups=groups_by_address(run.device, copies))
