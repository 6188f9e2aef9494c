"""Gather buffers: device memory in which many small tensors are collected, in the order of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.copies import Copies
from aio_ckpt.plan.copy_plan import GatherRun
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.save_plan import ImagePlan

LeafGroups: TypeAlias = tuple[tuple[tuple[torch.Tensor, ...], tuple[int, ...]], ...]
"""Per dtype, views into memory of a device, and the leaf that is copied to each view."""

_RUN_ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherTarget:
    """Device memory in which one run is gathered."""

    memory: torch.Tensor
    """Bytes of the run."""
    groups: LeafGroups
    """Views into ``memory``, and the leaf that is copied to each."""


class GatherBuffers:
    """Gather buffers of one engine, one for each device, laid out for the newest layout.

    Runs take turns in a buffer. All copies of a device are in the order of one stream, so a run is moved to the host
    before a later run is gathered in its place. The object holds its own memory, and never a source.
    """

    def __init__(self) -> None:
        self._layout: ImageLayout | None = None
        self._targets: dict[torch.device, dict[GatherRun, GatherTarget] | None] = {}

    def target(self, plan: ImagePlan, run: GatherRun, copies: Copies) -> GatherTarget | None:
        """Return the memory in which ``run`` of ``plan`` is gathered; None if the device lacks the memory."""
        if self._layout is not plan.layout:
            self._layout, self._targets = plan.layout, {}
        found = self._targets
        if run.device not in found:
            # Outside of inference mode, a tensor that was made inside cannot be written to.
            with torch.inference_mode(mode=False):
                found[run.device] = _lay_out(plan, run.device, copies)
        targets = found[run.device]
        return None if targets is None else targets[run]

    def clear(self) -> None:
        """Drop the memory, which the next save allocates again. By stream order, the issued copies are done first."""
        self._layout, self._targets = None, {}


def _lay_out(plan: ImagePlan, device: torch.device, copies: Copies) -> dict[GatherRun, GatherTarget] | None:
    runs = [run for chunk in plan.copies.chunks for run in chunk.gathered if run.device == device]
    starts, nbytes = _ring_offsets([run.stop - run.start for run in runs], plan.gather_bytes)
    memory = copies.allocate(nbytes)
    if memory is None:
        return None
    return {run: _target(plan.layout, run, memory, start) for run, start in zip(runs, starts, strict=True)}


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


def _target(layout: ImageLayout, run: GatherRun, memory: torch.Tensor, start: int) -> GatherTarget:
    views: dict[int, torch.Tensor] = {}
    for piece, leaf in zip(run.pieces, run.leaves, strict=True):
        spec = layout.items[piece.item].spec
        views[leaf] = view_at(memory, start + piece.image_start - run.start, spec.dtype, spec.shape, spec.stride)
    return GatherTarget(memory=memory[start : start + run.stop - run.start], groups=by_dtype(views))


def view_at(
    memory: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor in ``memory`` (uint8) that begins at byte ``start``, a multiple of the element size."""
    return torch.as_strided(memory.view(dtype), shape, stride, start // dtype.itemsize)


def by_dtype(views: Mapping[int, torch.Tensor]) -> LeafGroups:
    """Return the views of leaves in groups of one dtype, as :meth:`Copies.copy_groups` takes them."""
    groups: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for leaf, view in views.items():
        groups.setdefault(view.dtype, {})[leaf] = view
    return tuple((tuple(group.values()), tuple(group)) for group in groups.values())
