"""Plans of single files: tensors at the places that a file format gives them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.safetensors_file import SafetensorsIndex
from aio_ckpt.format.torch_file import ZipTail, pickle_object, storage_envelope
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.plan.copy_plan import image_order
from aio_ckpt.plan.layout import Placement, cut_chunks, lay_out
from aio_ckpt.plan.planner import ImagePlan, PlannedImage, is_gathered, plan_layout
from aio_ckpt.plan.structure import Leaves, Structure, addresses, check_sources
from aio_ckpt.plan.values import ImageLayout, TensorItem
from aio_ckpt.state.flatten import FlatState


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One file that is planned and not yet captured."""

    name: str
    """Name of the file while it is written. Of several files, each gets its name when it becomes visible."""
    planned: PlannedImage
    """Tensors of the file, and their places in it."""
    tail_bytes: int
    """Length of what follows the tensors."""
    seal: Callable[[Sequence[int]], bytes] | None
    """Function from the CRC32 of each tensor to what follows them; None if nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """Files of one call of ``save_file()``. They are planned one by one, so that casts of one alone are in memory."""

    parts: Sequence[Callable[[], FilePart]]
    """Planner of each file."""
    index: SafetensorsIndex | None = None
    """Index of several files; None for one file."""


def torch_content(obj: object, name: str, *, gather_bytes: int, budget_bytes: Callable[[], int]) -> FileContent:
    """Return a ``torch.save`` file of ``obj``, which is pickled now.

    Raises:
        UnsupportedLeafError: two tensors view the same bytes as different dtypes.
        Exception: any error of pickle.
    """
    pickled = pickle_object(obj)

    def plan() -> FilePart:
        planned = plan_storages(pickled.storages, gather_bytes=gather_bytes, budget_bytes=budget_bytes())
        tail = tail_of(planned.plan, pickled.data)
        return FilePart(name=name, planned=planned, tail_bytes=tail.nbytes, seal=tail.render)

    return FileContent(parts=[plan])


def plan_storages(storages: Sequence[torch.UntypedStorage], *, gather_bytes: int, budget_bytes: int) -> PlannedImage:
    """Plan a ``torch.save`` file of ``storages``, whose keys are their positions.

    Args:
        gather_bytes: largest gather buffer of a device.
        budget_bytes: memory for the image.

    Raises:
        SourceChangedError: the memory of a storage was freed.
    """
    lines = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
    structure, fingerprint = structure_of([f"storage {key}" for key in range(len(lines))], lines)
    placements = [
        Placement(key, (name,), (0,), TensorSpec(torch.uint8, (line.nbytes,), (1,)), storage_envelope(key, line.nbytes))
        for key, (name, line) in enumerate(zip(structure.names, lines, strict=True))
    ]

    def order(placed: Placement) -> tuple[bool, str, bool]:
        device = structure.devices[placed.leaf]
        return image_order(device, is_gathered=is_gathered(device, placed.envelope.raw_bytes, gather_bytes))

    layout = _without_gaps(lay_out(sorted(placements, key=order), budget_bytes=budget_bytes))
    return planned_file(structure, layout, fingerprint, lines, gather_bytes)


def tail_of(plan: ImagePlan, pickle: bytes) -> ZipTail:
    """Return what follows the storages of a plan of :func:`plan_storages`."""
    items = plan.layout.items
    return ZipTail(
        pickle=pickle,
        start=plan.layout.tensor_bytes,
        keys=[item.leaf for item in items],
        offsets=[item.item_offset for item in items],
        lengths=[item.raw_bytes for item in items],
    )


def _without_gaps(layout: ImageLayout) -> ImageLayout:
    """Return the layout with headers that begin where the item before ends. No raw byte moves."""
    items: list[TensorItem] = []
    end = 0
    for item in layout.items:
        envelope = storage_envelope(item.leaf, item.raw_bytes, padding=item.item_offset - end)
        items.append(replace(item, envelope=envelope, item_offset=end))
        end = items[-1].item_offset + envelope.item_bytes
    chunks = cut_chunks(items, layout.chunk_bytes, end)
    return replace(layout, items=tuple(items), chunks=chunks, file_alignment=1)


def structure_of(names: list[str], tensors: list[torch.Tensor]) -> tuple[Structure, list[int]]:
    """Return structure and addresses of plain tensors; raises SourceChangedError if the memory of one was freed."""
    flat = FlatState(names, list(tensors), [LeafKind.TENSOR] * len(tensors), int(LeafKind.TENSOR))
    leaves = Leaves(tensors=tensors, types=[torch.Tensor] * len(tensors), shards={}, objects=[])
    fingerprint = addresses(tensors)
    check_sources(flat, tensors, fingerprint)
    return Structure.of(flat, leaves), fingerprint


def planned_file(
    structure: Structure, layout: ImageLayout, fingerprint: list[int], tensors: list[torch.Tensor], gather_bytes: int
) -> PlannedImage:
    """Return the plan of a layout whose leaves are ``tensors``."""
    plan = plan_layout(structure, layout, fingerprint, gather_bytes=gather_bytes)
    return PlannedImage(plan=plan, tensors=tensors, objects=[])
