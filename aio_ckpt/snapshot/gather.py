"""Gather buffers: device memory in which many small tensors are put together as they will stand in the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies
from aio_ckpt.plan.copy_plan import GatherRun
from aio_ckpt.plan.planner import ImagePlan
from aio_ckpt.plan.values import ImageLayout

__all__ = ["GatherBuffers", "LeafGroups", "Line", "by_dtype", "view_at"]

LeafGroups: TypeAlias = tuple[tuple[tuple[torch.Tensor, ...], tuple[int, ...]], ...]
"""Per dtype: views into memory of a device, and the leaf that is copied to each."""

_LINE_ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """Where one run is gathered."""

    memory: torch.Tensor
    """Its bytes on the device."""
    groups: LeafGroups
    """Views into ``memory``, and the leaf that is copied to each."""


class GatherBuffers:
    """One gather buffer a device, laid out for the newest layout.

    Runs share a buffer, one after the other: all copies of a device are in the order of one stream, so a run is moved
    to the host before the next one that stands in its place is gathered. Holds memory of its own, never a source.
    """

    def __init__(self) -> None:
        self._layout: ImageLayout | None = None
        self._lines: dict[torch.device, dict[GatherRun, Line] | None] = {}

    def line(self, plan: ImagePlan, run: GatherRun, copies: Copies) -> Line | None:
        """Where ``run`` of ``plan`` is gathered; None if device memory for it cannot be had."""
        if self._layout is not plan.layout:
            self._layout, self._lines = plan.layout, {}
        found = self._lines
        if run.device not in found:
            with torch.inference_mode(mode=False):  # a buffer made inside could not be written to outside
                found[run.device] = _lay_out(plan, run.device, copies)
        lines = found[run.device]
        return None if lines is None else lines[run]

    def clear(self) -> None:
        """Let go of the memory: the next save asks for it again. What was issued is done first, by stream order."""
        self._layout, self._lines = None, {}


def _lay_out(plan: ImagePlan, device: torch.device, copies: Copies) -> dict[GatherRun, Line] | None:
    runs = [run for route in plan.copy_methods for run in route.gathered if run.device == device]
    starts, nbytes = _ring_offsets([run.stop - run.start for run in runs], plan.gather_bytes)
    memory = copies.buffer(nbytes)
    if memory is None:
        return None
    return {run: _line(plan.layout, run, memory, start) for run, start in zip(runs, starts, strict=True)}


def _ring_offsets(lengths: Sequence[int], buffer_bytes: int) -> tuple[list[int], int]:
    """Where each run begins in a buffer, one behind the other and round again; and the length of the buffer."""
    starts: list[int] = []
    cursor = end = 0
    for nbytes in lengths:
        if cursor + nbytes > buffer_bytes:
            cursor = 0
        starts.append(cursor)
        cursor = align_up(cursor + nbytes, _LINE_ALIGNMENT)
        end = max(end, cursor)
    return starts, end


def _line(layout: ImageLayout, run: GatherRun, memory: torch.Tensor, start: int) -> Line:
    views: dict[int, torch.Tensor] = {}
    for piece, leaf in zip(run.pieces, run.leaves, strict=True):
        spec = layout.items[piece.item].spec
        views[leaf] = view_at(memory, start + piece.image_start - run.start, spec.dtype, spec.shape, spec.stride)
    return Line(memory=memory[start : start + run.stop - run.start], groups=by_dtype(views))


def view_at(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor of ``memory`` (bytes) that begins at byte ``start``, a multiple of its element."""
    return torch.as_strided(memory.view(dtype), shape, stride, start // dtype.itemsize)


def by_dtype(views: Mapping[int, torch.Tensor]) -> LeafGroups:
    """The views of leaves in the groups that :meth:`Copies.assemble` takes one by one."""
    groups: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for leaf, view in views.items():
        groups.setdefault(view.dtype, {})[leaf] = view
    return tuple((tuple(group.values()), tuple(group)) for group in groups.values())
