"""``.metadata`` of several ranks, rendered from columns, against what DCP's own planner makes of the same shares."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from property_examples import examples
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from aio_ckpt import PerRank
from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format import dcp_metadata_write as metadata_pickle
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.plan.assignment import Assignment, Boxes, assign
from aio_ckpt.plan.global_plan import Stored, render_global
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, ShardTable, TensorSignature
from aio_ckpt.state.dcp_paths import dcp_paths
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


# -- the same by DCP's planner ----------------------------------------------------------------------


def items_of(rank: Stored) -> list[tuple[str, Box, TensorSignature]]:
    """Every (name, box, look) that a rank writes, read back from its messages."""
    fqns = msgspec.msgpack.decode(rank.local.names)
    signatures, numbers = msgspec.msgpack.Decoder(tuple[list[TensorSignature], list[int]]).decode(rank.local.signatures)
    offsets = iter(np.frombuffer(rank.local.offsets, "<i8").tolist())
    begins = [tuple(itertools.islice(offsets, len(signatures[number].size))) for number in numbers]
    return [
        (name, (begins[item], signatures[numbers[item]].shape), signatures[numbers[item]])
        for item, names in rank.share.items(fqns)
        for name in names
    ]


def objects_of(rank: Stored) -> tuple[str, ...]:
    return rank.share.object_names(msgspec.msgpack.decode(rank.local.objects))


def save_plan(rank: Stored) -> SavePlan:
    items = [
        WriteItem(
            index=MetadataIndex(name, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(shape)),
                properties=TensorProperties(dtype=DTYPES[signature.dtype]),
                size=torch.Size(signature.size),
            ),
        )
        for name, (offsets, shape), signature in items_of(rank)
    ]
    return SavePlan([*items, *(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects_of(rank))])


def places_of(rank: Stored) -> list[tuple[int, int, int]]:
    """Where every name stands, and whether in the frozen file; tied names share a place."""
    fqns = msgspec.msgpack.decode(rank.local.names)
    places = np.frombuffer(rank.places, "<i8").reshape(-1, 3).tolist()
    items = rank.share.items(fqns)
    return [tuple(place) for (_, names), place in zip(items, places, strict=True) for _ in names]


def by_dcp(ranks: Sequence[Stored], spans: Sequence[tuple[int, int]]) -> Metadata:
    plans, metadata = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False).create_global_plan(
        [save_plan(rank) for rank in ranks]
    )
    metadata.storage_data = {
        item.index: _StorageInfo(data_file_name("s", number, is_frozen=bool(is_frozen)), *place)
        for number, (rank, made) in enumerate(zip(ranks, plans, strict=True))
        for item, (*place, is_frozen) in zip(made.items, places_of(rank), strict=False)
    }
    names = [(name, number) for number, rank in enumerate(ranks) for name in objects_of(rank)]
    for (name, number), span in zip(names, spans, strict=True):
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo(data_file_name("s", number), *span)
    metadata.planner_data = {
        name: path
        for number, rank in enumerate(ranks)
        for name, path in dcp_paths(decode_skeleton(rank.local.skeleton, name="s"), rank=number).items()
    }
    metadata.storage_meta = StorageMeta(checkpoint_id="c", save_id="s")
    return metadata


def every_field(value: object) -> object:
    """``value`` with everything that its instances hold: equality of DCP's classes leaves the index hint out."""
    if isinstance(value, dict):
        return {every_field(key): every_field(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(every_field, value))
    if dataclasses.is_dataclass(value):
        return type(value).__name__, tuple((name, every_field(item)) for name, item in sorted(vars(value).items()))
    return value


def filled(template: MetadataTemplate, spans: Sequence[tuple[int, int]] = ()) -> bytes:
    return b"".join(template.fill(spans, checkpoint_id="c", save_id="s"))


# -- models -----------------------------------------------------------------------------------------


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """(offset, length) as ``torch.chunk`` cuts; what is left over is empty."""
    step = -(-size // parts) if size else 0
    return [(min(part * step, size), max(min(step, size - part * step), 0)) for part in range(parts)]


def split(box: Box, parts: int, draw: Any) -> list[Box]:
    """A box cut in two again and again, wherever it may be: no grid."""
    offsets, shape = box
    sides = [dim for dim, side in enumerate(shape) if side > 1]
    if parts == 1 or not sides:
        return [box]
    dim = draw(st.sampled_from(sides))
    at = draw(st.integers(1, shape[dim] - 1))
    first = offsets, (*shape[:dim], at, *shape[dim + 1 :])
    second = (
        (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
        (*shape[:dim], shape[dim] - at, *shape[dim + 1 :]),
    )
    left = draw(st.integers(1, parts - 1))
    return [*split(first, left, draw), *split(second, parts - left, draw)]


def boxes_of(kind: str, size: tuple[int, ...], ranks: int, draw: Any) -> list[Box | None]:
    """What each rank holds of a tensor."""
    whole: Box = (0,) * len(size), size
    if kind == "replicated" or not size:
        return [whole] * ranks
    if kind == "some":
        held = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
        return [whole if mine or (rank == 0 and not any(held)) else None for rank, mine in enumerate(held)]
    if kind == "odd":
        found: list[Box | None] = [*split(whole, ranks, draw)]
        return draw(st.permutations([*found, *[None] * (ranks - len(found))]))
    width = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    first, second = draw(st.permutations(range(len(size))))[:2] if len(size) > 1 else (0, 0)
    boxes: list[Box | None] = []
    for rank in range(ranks):
        offsets, shape = [0] * len(size), list(size)
        offsets[first], shape[first] = cut(size[first], ranks // width)[rank // width]
        if kind == "mesh" and first != second:
            offsets[second], shape[second] = cut(size[second], width)[rank % width]
        boxes.append((tuple(offsets), tuple(shape)) if math.prod(shape) or not math.prod(size) else None)
    return boxes


kinds = st.sampled_from(["replicated", "some", "odd", "mesh", "hybrid"])
shapes = st.lists(st.integers(1, 7) | st.just(0), max_size=3).map(tuple)


@st.composite
def models(draw: Any) -> list[LocalPlan]:
    """What each of 1 to 8 ranks holds: tensors cut in all ways, tied names, objects, values of each rank's own."""
    ranks = draw(st.integers(1, 8))
    tensors: list[list[ShardInfo]] = [[] for _ in range(ranks)]
    states: list[dict[str, Any]] = [{"own": PerRank([0, {"x": rank}]), "n": {"m": 3}} for rank in range(ranks)]
    objects = [(f"own.rank{rank}.0", f"own.rank{rank}.1.x", "n.m") for rank in range(ranks)]
    for number in range(draw(st.integers(0, 5))):
        size, dtype = draw(shapes), draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
        is_tied = draw(st.booleans())
        for rank, box in enumerate(boxes_of(draw(kinds), size, ranks, draw)):
            if box is not None:
                names = (f"t{number}", f"tied.{number}") if is_tied else (f"t{number}",)
                tensors[rank].append(ShardInfo(names, box[0], TensorSignature(box[1], size, dtype)))
                states[rank] |= {"t" + name[1:]: 0 for name in names[:1]}
                if is_tied:
                    states[rank].setdefault("tied", {})[str(number)] = 0
    if draw(st.booleans()):
        for rank in range(ranks):
            tensors[rank] = draw(st.permutations(tensors[rank]))
    return [
        LocalPlan.of(tensors[rank], objects[rank], encode_skeleton(flatten(states[rank], rank=rank).skeleton))
        for rank in range(ranks)
    ]


def stored(plans: Sequence[LocalPlan], draw: Any = None) -> list[Stored]:
    """The shares that the ranks agree on, each with places in its file."""
    held = ShardTable.of(plans)
    boxes = Boxes.of_rows(held)
    assigned = assign(held, boxes, {}, np.zeros(boxes.count, np.bool_))
    shares, items = [of_rank.share for of_rank in assigned], [of_rank.items for of_rank in assigned]
    start = draw(st.sampled_from([0, (1 << 31) - 2000, 1 << 33])) if draw else 0
    frozen = draw(st.sets(st.integers(0, 9))) if draw else set()
    return [
        Stored(
            local=local,
            share=share,
            places=np.array([(start + 1000 * at, 900 + at, at in frozen) for at in range(count)], "<i8").tobytes(),
        )
        for local, share, count in zip(plans, shares, items, strict=True)
    ]


@examples(300)
@given(models(), st.data())
def test_metadata_from_columns_is_in_every_field_what_dcps_planner_makes(plans: list[LocalPlan], data: Any) -> None:
    """For any model and layout, what is read back equals the plan of DCP, index hints, places and paths included."""
    ranks = stored(plans, data.draw)
    spans = [(100 * at, (1 << 40) + at) for at in range(sum(len(objects_of(rank)) for rank in ranks))]
    found = filled(render_global(ranks), spans)
    wanted = pickle.loads(pickle.dumps(by_dcp(ranks, spans)))
    assert every_field(parse_metadata(found, name="m")) == every_field(wanted)
    assert every_field(pickle.loads(found)) == every_field(wanted)
    assert pickle.loads(found) == wanted


def rows_of(rank: int, ranks: int, names: int) -> LocalPlan:
    """A model whose every tensor is sharded by rows."""
    signatures = [TensorSignature((2, 3), (2 * ranks, 3), "float32"), TensorSignature((1,), (ranks,), "int8")]
    items = [ShardInfo((f"t{n}",), (2 * rank, 0) if n % 2 else (rank,), signatures[1 - n % 2]) for n in range(names)]
    state = {f"t{n}": 0 for n in range(names)} | {"own": PerRank({"x": 1})}
    return LocalPlan.of(items, (f"own.rank{rank}.x",), encode_skeleton(flatten(state, rank=rank).skeleton))


@pytest.mark.parametrize(("ranks", "names"), [(300, 4), (2, 1100)])
def test_more_shards_files_and_names_than_are_rendered_at_once_are_as_few(
    monkeypatch: pytest.MonkeyPatch, ranks: int, names: int
) -> None:
    """Beyond what one batch, one byte of memo index and one dict's batch hold, it is still DCP's plan."""
    monkeypatch.setattr(metadata_pickle, "_ROWS_AT_ONCE", 1000)
    assert max(ranks * names / metadata_pickle._ROWS_AT_ONCE, names / metadata_pickle._NAMES_AT_ONCE) > 1
    stores = stored([rows_of(rank, ranks, names) for rank in range(ranks)])
    spans = [(8 * rank, 8) for rank in range(ranks)]
    found = filled(render_global(stores), spans)
    wanted = pickle.loads(pickle.dumps(by_dcp(stores, spans)))
    assert every_field(parse_metadata(found, name="m")) == every_field(wanted)
    assert len(found) < 235 * ranks * names


@pytest.mark.parametrize("rows", [(1 << 31) - 1, 1 << 31, (1 << 62) // 3])
def test_numbers_beyond_32_bits_are_as_dcp_writes_them(rows: int) -> None:
    """Shapes and offsets on both sides of what BININT holds come back as they were."""
    for boxes in (
        [((0, 0), (rows - 1, 2)), ((rows - 1, 0), (1, 2))],
        [((0, 0), (rows, 1)), ((0, 1), (rows, 1))],
    ):
        ranks = by_hand(boxes, (rows, 2))
        wanted = pickle.loads(pickle.dumps(by_dcp(ranks, ())))
        assert every_field(parse_metadata(filled(render_global(ranks)), name="m")) == every_field(wanted)


def test_more_classes_and_fields_than_a_byte_counts_are_referred_to() -> None:
    """The 300th entry of the memo is found as the first is."""
    memo = metadata_pickle._Memo()
    found = b"".join(memo.reference(metadata_pickle._plain(str(number))) for number in range(300))
    head = metadata_pickle._PROTO + b"".join(memo.head())
    assert pickle.loads(head + b"(" + found + b"t.") == tuple(map(str, range(300)))


@dataclasses.dataclass
class Later:
    """As a later torch might write an entry: more fields, of all kinds."""

    fqn: str
    offset: int
    more: Any = None


@given(st.recursive(st.none() | st.booleans() | st.integers(-300, 300) | st.text(max_size=3), st.lists, max_leaves=5))
def test_a_field_that_a_later_torch_adds_is_written_as_pickle_would(more: Any) -> None:
    """What is no hole of an instance stands in every entry as pickle writes it, hole by hole the rest."""
    memo, instance = metadata_pickle._Memo(), Later(metadata_pickle._NAME, metadata_pickle._AT, [more, {"x": more}])
    holes = metadata_pickle._NAME, metadata_pickle._AT
    tokens = metadata_pickle._tokens(metadata_pickle._parsed(instance, *holes), memo)
    stencil = metadata_pickle._EntryTemplate(tokens, frozenset())
    names = memo.reserve(2)
    texts = (metadata_pickle._text(text) + metadata_pickle._put(names + n) + b"0" for n, text in enumerate("ab"))
    head = b"".join((metadata_pickle._PROTO, *texts, *memo.head()))
    columns = {metadata_pickle._NAME: names + np.arange(2), metadata_pickle._AT: np.array([5, 6])}
    found = pickle.loads(head + b"](" + stencil.rows(columns, 2).tobytes() + b"e.")
    assert found == [Later("a", 5, [more, {"x": more}]), Later("b", 6, [more, {"x": more}])]


@pytest.mark.parametrize("instance", [Later("f", 7), Later("f", 7, 7), Later("f", 8, "f")])
def test_a_field_that_a_later_torch_drops_or_says_twice_is_refused(instance: Later) -> None:
    """Each value has one place in an entry, or nothing is rendered: never a metadata with a value that is not ours."""
    with pytest.raises(NotImplementedError, match="Later"):
        metadata_pickle._parsed(instance, "f", 7, 8)


def test_what_later_saves_change_is_not_in_the_part_that_they_share() -> None:
    """The first part is the same for all spans and ids, its sums are of it, and without objects it ends at the id."""
    for objects in ((), ("own.rank0.x",)):
        local = msgspec.structs.replace(rows_of(0, 1, 3), objects=msgspec.msgpack.encode(objects))
        template = render_global(stored([local]))
        spans = [(at, 7) for at, _ in enumerate(objects)]
        parts = [template.fill(spans, checkpoint_id=name, save_id=name * 2) for name in ("c", "other")]
        assert parts[0][1] is parts[1][1] is template.fixed
        assert template.fixed_crc32 == zlib.crc32(template.fixed)
        assert len(template.head) < 200 * len(objects) + 1
        assert [pickle.loads(b"".join(part)).storage_meta.save_id for part in parts] == ["cc", "otherother"]


# -- tensors that are not whole ---------------------------------------------------------------------


def by_hand(boxes: Sequence[Box], size: tuple[int, ...]) -> list[Stored]:
    """Each rank writes one box of one tensor, whatever the others do."""
    skeleton = encode_skeleton(flatten({"w": 0}, rank=0).skeleton)
    return [
        Stored(
            local=LocalPlan.of([ShardInfo(("w",), offsets, TensorSignature(shape, size, "int8"))], (), skeleton),
            share=Assignment.of([True], []),
            places=np.array([0, 900, 0], "<i8").tobytes(),
        )
        for offsets, shape in boxes
    ]


def dcp_refuses(ranks: Sequence[Stored]) -> bool:
    plans, metadata = create_default_global_save_plan([save_plan(rank) for rank in ranks])
    found = _validate_global_plan(plans, metadata)
    return (
        not found if isinstance(found, bool) else bool(found)
    )  # older torch tells whether all is well, newer what is not


@st.composite
def nearly_whole(draw: Any) -> tuple[list[Box], tuple[int, ...]]:
    """A tensor cut up, of which some boxes may be moved, grown, shrunk, doubled or left out."""
    size = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = split(((0,) * len(size), size), draw(st.integers(2, 8)), draw)
    for _ in range(draw(st.integers(0, 3))):
        at, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(size) - 1))
        offsets, shape = (list(part) for part in boxes[at])
        offsets[dim] = max(offsets[dim] + draw(st.integers(-1, 1)), 0)
        shape[dim] = max(shape[dim] + draw(st.integers(-1, 1)), 0)
        boxes[at] = tuple(offsets), tuple(shape)
    if draw(st.booleans()) and draw(st.booleans()):
        boxes.append(draw(st.sampled_from(boxes)))
    if draw(st.booleans()) and draw(st.booleans()) and len(boxes) > 2:
        boxes.pop(draw(st.integers(0, len(boxes) - 1)))
    return draw(st.permutations(boxes)), size


@examples(1000)
@given(nearly_whole())
def test_what_dcps_planner_would_refuse_is_refused_and_nothing_else(cut_up: tuple[list[Box], tuple[int, ...]]) -> None:
    """Shards out of bounds, over each other or with a hole between them end in PlanChangedError; whole ones do not."""
    boxes, size = cut_up
    assume(len(boxes) > 1)  # of one rank alone DCP takes whatever it has
    ranks = by_hand(boxes, size)
    if dcp_refuses(ranks):
        with pytest.raises(PlanChangedError, match=r"do not hold whole tensors|begins at"):
            render_global(ranks)
    else:
        render_global(ranks)


def test_a_shard_whose_end_exceeds_64_bits_is_out_of_bounds() -> None:
    """A forged shard of the largest length at the largest offset is not taken for one that ends before it begins."""
    largest = 1 << 62
    with pytest.raises(PlanChangedError, match="out of bounds"):
        render_global(by_hand([((largest,), (largest,))] * 2, (largest,)))


@pytest.mark.parametrize(
    ("size", "boxes", "text"),
    [
        (
            (6,),
            [((0,), (2,)), ((2,), (1,))],
            r"'w' has 6 elements, its shards of ranks 0, 1 have 3; a sharded tensor in PerRank",
        ),
        (
            (8,),
            [((at,), (1,)) for at in range(8) if at != 5],
            r"its shards of ranks 0, 1, 2, 3, 4 and 2 more have 7; a sharded",
        ),
        ((5,), [((0,), (4,)), ((3,), (2,))], r"shards \[4\] at \[0\] of rank 0 and \[2\] at \[3\] of rank 1"),
        ((6,), [((0,), (3,)), ((3,), (9,))], r"out of bounds shard \[9\] at \[3\] of rank 1"),
    ],
    ids=["hole", "a hole among many", "overlap", "out of bounds"],
)
def test_ranks_that_do_not_hold_whole_tensors_are_named(size: tuple[int, ...], boxes: list[Box], text: str) -> None:
    with pytest.raises(PlanChangedError, match=text):
        render_global(by_hand(boxes, size))


@pytest.mark.parametrize("size", [(), (3,)])
def test_a_tensor_that_nobody_writes_is_refused(size: tuple[int, ...]) -> None:
    """What ranks hold and no share contains never goes missing without a word, one element or many."""
    held = by_hand([((0,) * len(size), size)] * 2, size)
    nobody = [dataclasses.replace(rank, share=Assignment.of([False], []), places=b"") for rank in held]
    with pytest.raises(PlanChangedError, match="'w' has"):
        render_global(nobody)


def test_of_two_paths_for_one_name_the_highest_ranks_stands() -> None:
    """Ranks that nest a name differently are merged as DCP merges them, rank after rank."""
    states = [{"w": {"x": 0}}, {"w.x": 0}, {"w": {"x": 0}}]
    for order in ((0, 1, 2), (1, 0, 1)):
        skeletons = [encode_skeleton(flatten(states[number], rank=0).skeleton) for number in order]
        item = ShardInfo(("w.x",), (0,), TensorSignature((2,), (2,), "int8"))
        ranks = stored([LocalPlan.of([item], (), skeleton) for skeleton in skeletons])
        wanted = pickle.loads(pickle.dumps(by_dcp(ranks, ())))
        assert every_field(pickle.loads(filled(render_global(ranks)))) == every_field(wanted)
