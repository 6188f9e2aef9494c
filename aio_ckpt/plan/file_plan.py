"""Plans of single files: tensors at the places that a file format gives them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.safetensors_file import SafetensorsIndex
from aio_ckpt.format.torch_file_write import ZipTail, pickle_object, storage_envelope
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.plan.chunks import cut_chunks
from aio_ckpt.plan.copy_plan import image_order
from aio_ckpt.plan.layout import ImageLayout, lay_out
from aio_ckpt.plan.pointer_fingerprint import check_sources, fingerprint_of
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage, plan_layout
from aio_ckpt.plan.structure import Leaves, Structure
from aio_ckpt.plan.tensor_item import Placement, TensorItem
from aio_ckpt.state.flatten import FlatState


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One file that is planned and not yet captured."""

    name: str
    """Name of the file while it is written. Of several files, each gets its name when it becomes visible."""
    planned: PlannedImage
    """Tensors of the file, and their places in it."""
    plan_hit: bool
    tail_bytes: int
    """Length of what follows the tensors."""
    render_tail: Callable[[Sequence[int]], bytes] | None
    """Function from the CRC32 of each tensor to what follows them; None if nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """Files of one call of ``save_file()``. They are planned one by one, so that casts of one alone are in memory."""

    parts: Sequence[Callable[[], FilePart]]
    """Planner of each file."""
    index: SafetensorsIndex | None = None
    """Index of several files; None for one file."""


class FilePlans:
    """Cache of the plans of the last call of ``save_file()``. A file of the same structure reuses the plan."""

    def __init__(self, *, gather_bytes: int, budget_bytes: Callable[[], int]) -> None:
        """``gather_bytes``: largest gather buffer of a device. ``budget_bytes``: memory for an image, for each miss."""
        self._gather_bytes = gather_bytes
        self._budget_bytes = budget_bytes
        self._kept: dict[tuple[str, int], tuple[object, ImagePlan]] = {}

    def plan(
        self,
        slot: tuple[str, int],
        names: list[str],
        tensors: list[torch.Tensor],
        lay_out: Callable[[Structure, int], ImageLayout],
        *,
        header: object = None,
    ) -> tuple[PlannedImage, bool]:
        """Plan a file of plain tensors, and return whether the plan was reused.

        Args:
            slot: kind of the file, and its number among the files of the call.
            names: name of each tensor.
            tensors: tensors of the file.
            lay_out: returns the layout, from the structure and the memory for an image.
            header: whatever else the layout depends on.

        Raises:
            SourceChangedError: the memory of a tensor was freed.
        """
        flat = FlatState(names, list(tensors), [LeafKind.TENSOR] * len(tensors), int(LeafKind.TENSOR))
        leaves = Leaves(tensors=tensors, types=[torch.Tensor] * len(tensors), shards={}, objects=[])
        fingerprint = fingerprint_of(tensors)
        check_sources(flat, tensors, fingerprint)
        kept_header, kept = self._kept.get(slot, (None, None))
        is_hit = kept is not None and kept_header == header and kept.structure.is_of(flat, leaves)
        if kept is not None and is_hit:
            plan = kept.at(fingerprint)
        else:
            structure = Structure.of(flat, leaves)
            layout = lay_out(structure, self._budget_bytes())
            plan = plan_layout(structure, layout, fingerprint, gather_bytes=self._gather_bytes)
        self._kept[slot] = header, plan
        return PlannedImage(plan=plan, tensors=tensors, objects=[]), is_hit

    def drop_beyond(self, count: int) -> None:
        """Forget the plans of safetensors files that a call with ``count`` of them does not have."""
        self._kept = {slot: kept for slot, kept in self._kept.items() if slot[0] != "safetensors" or slot[1] < count}

    def lay_out_storages(self, structure: Structure, budget_bytes: int) -> ImageLayout:
        """Return the layout of a ``torch.save`` file. Each leaf is the bytes of a storage, whose key is its number."""
        sizes = [shape.numel() for shape in structure.shapes]
        placements = [
            Placement(key, (name,), (0,), TensorSpec(torch.uint8, (nbytes,), (1,)), storage_envelope(key, nbytes))
            for key, (name, nbytes) in enumerate(zip(structure.names, sizes, strict=True))
        ]

        def order(placed: Placement) -> tuple[bool, str, bool]:
            return image_order(structure.devices[placed.leaf], placed.envelope.raw_bytes, self._gather_bytes)

        return _without_gaps(lay_out(sorted(placements, key=order), budget_bytes=budget_bytes))


def torch_content(obj: object, name: str, plans: FilePlans) -> FileContent:
    """Return a ``torch.save`` file of ``obj``, which is pickled now.

    Raises:
        UnsupportedLeafError: two tensors view the same bytes as different dtypes.
        Exception: any error of pickle.
    """
    pickled, storages = pickle_object(obj)

    def plan() -> FilePart:
        lines = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
        names = [f"storage {key}" for key in range(len(lines))]
        planned, is_hit = plans.plan(("torch", 0), names, lines, plans.lay_out_storages)
        layout = planned.plan.layout
        tail = ZipTail(
            pickle=pickled,
            start=layout.tensor_bytes,
            keys=[item.leaf for item in layout.items],
            offsets=[item.item_offset for item in layout.items],
            lengths=[item.raw_bytes for item in layout.items],
        )
        return FilePart(name=name, planned=planned, plan_hit=is_hit, tail_bytes=tail.nbytes, render_tail=tail.render)

    return FileContent(parts=[plan])


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
