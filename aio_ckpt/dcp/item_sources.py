"""Sources of one rank's data file, from a plan of DCP: tensors laid out in an image, then streams of bytes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from aio_ckpt._torch import StorageInfo
from aio_ckpt.errors import PlanChangedError, UnsupportedLeafError
from aio_ckpt.format import tensor_pickle
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.rank_manifest import ObjectEntry
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.plan.pointer_fingerprint import check_sources, fingerprint_of
from aio_ckpt.plan.save_plan import PlannedImage, placement_of, plan_image
from aio_ckpt.plan.structure import Leaves, Structure
from aio_ckpt.plan.tied_tensors import partition, tied_names
from aio_ckpt.state.flatten import FlatState


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Item that is stored as bytes: an object, a transformed item, or a tensor that only ``torch.save`` can write."""

    index: MetadataIndex
    data: bytes
    descriptors: tuple[str, ...]
    """Stream extensions that were applied, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Values that one rank writes. Kept only until the save ends."""

    planned: PlannedImage
    """Tensors, and their places in the image."""
    indices: tuple[MetadataIndex, ...]
    """Per tensor leaf of ``planned``, its index in DCP's metadata."""
    aliases: tuple[int, ...]
    """Per tensor leaf, the leaf whose item holds its bytes."""
    streams: tuple[Stream, ...]
    """Other items, in the order in which they follow the tensors."""
    objects: tuple[ObjectEntry, ...]
    """Entries of ``streams`` in the rank manifest."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.indices and not self.streams

    def results(self, file: str) -> list[WriteResult]:
        """Return the result of each item in the data file ``file``, with its place as stored in ``.metadata``."""
        places = {
            item.leaf: StorageInfo(file, item.item_offset, item.envelope.item_bytes)
            for item in self.planned.plan.layout.items
        }
        found = [(index, places[leaf]) for index, leaf in zip(self.indices, self.aliases, strict=True)]
        for stream, entry in zip(self.streams, self.objects, strict=True):
            given: Any = {"transform_descriptors": list(stream.descriptors)} if stream.descriptors else {}
            found.append((stream.index, StorageInfo(file, entry.offset, entry.nbytes, **given)))
        return [WriteResult(index=index, size_in_bytes=place.length, storage_data=place) for index, place in found]


def collect_sources(
    plan: SavePlan, planner: SavePlanner, transforms: Any, *, gather_bytes: int, budget_bytes: int
) -> Sources:
    """Resolve every item of ``plan``. ``transforms``: torch's ``_StorageWriterTransforms``; None without extensions.

    All tensors are resolved before the first is copied, so a planner that makes new tensors needs memory for all.

    Raises:
        UnsupportedLeafError: a tensor is a sparse COO tensor.
        PlanChangedError: a tensor does not have the planned shape.
        SourceChangedError: a tensor's memory was freed.
    """
    items: list[WriteItem] = []
    tensors: list[torch.Tensor] = []
    streams: list[Stream] = []
    for item in plan.items:
        data: Any = planner.resolve_data(item)
        if isinstance(data, torch.Tensor) and data.layout is torch.sparse_coo:
            raise UnsupportedLeafError(
                f"{item.index.fqn!r}: a sparse COO tensor, which DCP could not load: save its indices() and values()"
            )
        if item.type is WriteItemType.BYTE_IO or transforms is not None or not is_plain(data):
            streams.append(_encode(item, data, transforms))
            continue
        _check_shape(item, data)
        items.append(item)
        tensors.append(data.detach())
    boxes = [_box(item) for item in items]
    names = [item.index.fqn for item in items]
    planned, aliases = plan_tensors(names, tensors, boxes, gather_bytes=gather_bytes, budget_bytes=budget_bytes)
    starts = itertools.accumulate((len(stream.data) for stream in streams), initial=planned.plan.layout.tensor_bytes)
    return Sources(
        planned=planned,
        indices=tuple(item.index for item in items),
        aliases=tuple(aliases),
        streams=tuple(streams),
        objects=tuple(
            ObjectEntry((stream.index.fqn,), start, len(stream.data), crc32_of(stream.data))
            for start, stream in zip(starts, streams, strict=False)
        ),
    )


def is_plain(data: object) -> bool:
    """Return whether ``data`` is a tensor that raw bytes, dtype, shape and stride describe completely."""
    return (
        type(data) in PLAIN_TYPES
        and isinstance(data, torch.Tensor)
        and data.layout is torch.strided
        and not (data.is_quantized or data.is_meta)
        and data.dtype in tensor_pickle.STORABLE_DTYPES
    )


def plan_tensors(
    names: Sequence[str],
    tensors: list[torch.Tensor],
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    gather_bytes: int,
    budget_bytes: int,
) -> tuple[PlannedImage, list[int]]:
    """Lay out tensors in an image. Tensors that share bytes are stored once.

    Args:
        boxes: (global shape, offsets) of each tensor.
        budget_bytes: memory for the image.

    Returns:
        The plan and, per tensor, the index of the first one that shares its bytes.
    """
    flat = FlatState(list(names), list(tensors), [LeafKind.TENSOR] * len(tensors), int(LeafKind.TENSOR))
    leaves = Leaves(tensors=tensors, types=[torch.Tensor] * len(tensors), shards=dict(enumerate(boxes)), objects=[])
    structure = Structure.of(flat, leaves)
    fingerprint = fingerprint_of(tensors)
    check_sources(flat, tensors, fingerprint)
    aliases = partition(structure, fingerprint)
    placements = [
        placement_of(structure, leaf, fqns, boxes[leaf][1]) for leaf, fqns in tied_names(names, aliases).items()
    ]
    plan = plan_image(structure, placements, fingerprint, gather_bytes=gather_bytes, budget_bytes=budget_bytes)
    return PlannedImage(plan=plan, tensors=tensors, objects=[]), aliases


def _box(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    data = item.tensor_data
    assert data is not None
    return tuple(data.size), tuple(data.chunk.offsets)


def _check_shape(item: WriteItem, tensor: torch.Tensor) -> None:
    planned = tuple(item.tensor_data.chunk.sizes) if item.tensor_data is not None else ()
    if tuple(tensor.shape) != planned:
        raise PlanChangedError(
            f"{item.index.fqn!r}: planned with shape {planned}, now {tuple(tensor.shape)}: a cached plan is out of "
            "date, or the planner changes shapes; plan anew"
        )


def _encode(item: WriteItem, data: Any, transforms: Any) -> Stream:
    """Encode an item as stock DCP does: an object's bytes, or a tensor by ``torch.save``, through the extensions."""
    out = io.BytesIO()
    stream, descriptors = transforms.transform_save_stream(item, out) if transforms is not None else (out, [])
    if item.type is WriteItemType.BYTE_IO:
        stream.write(data.getbuffer())
    else:
        tensor = data.detach().cpu()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save stores all bytes of a storage
        torch.save(tensor, stream)
    if stream is not out:
        stream.close()  # ends the transformation and leaves ``out`` open
    return Stream(index=item.index, data=out.getvalue(), descriptors=tuple(descriptors))
