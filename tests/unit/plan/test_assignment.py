"""Who writes what, in columns, against the same rule for one box after the other; and messages that are none."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.errors import DuplicateNameError, PeerFailedError, PlanChangedError
from aio_ckpt.plan import assignment
from aio_ckpt.plan.assignment import Assignment, Boxes, assign
from aio_ckpt.plan.differing_replicas import ObjectColumns, unequal_replicas
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, ShardTable, TensorSignature, intern
from aio_ckpt.ranks.save_ledger import ContentSums, Ledger, PlanMsg, Vote, extents_crc32

Key = tuple[str, tuple[int, ...]]
Plan = tuple[list[ShardInfo], tuple[str, ...]]
"""Items, objects."""
Written_ = list[dict[int, tuple[str, ...]]]
"""Per rank, the names that it writes of each item."""


def equal(boxes: Boxes) -> np.ndarray:
    """No replica differs."""
    return np.zeros(boxes.count, np.bool_)


# -- the rule, box by box ---------------------------------------------------------------------------


def nbytes(item: ShardInfo) -> int:
    return int(np.prod(item.signature.shape)) * {"float32": 4, "int8": 1}[item.signature.dtype]


class Rule:
    """Who writes each box, one at a time."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans
        self.taken: set[Key] = set()
        self.items: list[dict[int, list[str]]] = [{} for _ in plans]
        self.load = [0] * len(plans)

    def take(self, rank: int, index: int, names: list[str]) -> None:
        item = self.plans[rank][0][index]
        new = [name for name in names if (name, item.offsets) not in self.taken]
        if new:
            self.load[rank] += 0 if index in self.items[rank] else nbytes(item)
            self.items[rank].setdefault(index, []).extend(new)
            self.taken |= {(name, item.offsets) for name in new}

    def assign(self, kept: dict[int, dict[int, list[str]]]) -> Written_:
        """Kept shares; what only one rank has; then the largest first."""
        holders: dict[Key, list[tuple[int, int]]] = {}
        for rank, (items, _) in enumerate(self.plans):
            for index, item in enumerate(items):
                for name in item.fqns:
                    holders.setdefault((name, item.offsets), []).append((rank, index))
        for rank, share in kept.items():
            for index, names in share.items():
                self.take(rank, index, names)
        free = {
            key: [at for at in places if at[0] not in kept] for key, places in holders.items() if key not in self.taken
        }
        if not all(free.values()):
            raise PlanChangedError
        alone = [key for key in free if len(free[key]) == 1]
        for key in alone:
            self.take(*free[key][0], [key[0]])
        several = [key for key in free if key not in alone]
        several.sort(key=lambda key: nbytes(self.plans[free[key][0][0]][0][free[key][0][1]]))
        for key in reversed(several):
            if key not in self.taken:
                rank, index = min(free[key], key=lambda at: (self.load[at[0]], at[0]))
                item = self.plans[rank][0][index]
                self.take(rank, index, [name for name in item.fqns if (name, item.offsets) in free])
        return [
            {
                index: tuple(name for name in plan[0][index].fqns if name in names)
                for index, names in sorted(own.items())
            }
            for plan, own in zip(self.plans, self.items, strict=True)
        ]


@pytest.fixture(autouse=True)
def _no_replica_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_SMALL_BYTES", -1)


# -- models -----------------------------------------------------------------------------------------

SIZES = {"a": (8, 2), "b": (8, 2), "c": (8, 2), "d": (4, 4), "e": (4, 4), "f": (1, 3), "g": ()}


@st.composite
def plans_of_ranks(draw: Any) -> list[Plan]:
    """Ranks that hold some names, whole or in halves, each with ties of its own."""
    plans: list[Plan] = []
    for _ in range(draw(st.integers(1, 6))):
        items: list[ShardInfo] = []
        for names in draw(st.sampled_from([["abc", "de", "f", "g"], ["a", "b", "c", "d", "e", "f"], ["ab", "d", "g"]])):
            size = SIZES[names[0]]
            held = tuple(draw(st.permutations(names)))[: draw(st.integers(1, 3))]
            rows = size[0] // draw(st.sampled_from([1, 1, 2])) if size and size[0] > 1 else 0
            offsets = (draw(st.sampled_from(range(0, size[0], rows))), 0) if rows else (0,) * len(size)
            if draw(st.integers(0, 4)):
                items.append(
                    ShardInfo(held, offsets, TensorSignature((rows, size[1]) if rows else size, size, "float32"))
                )
        plans.append((draw(st.permutations(items)), tuple(draw(st.lists(st.sampled_from("xyz"), unique=True)))))
    return plans


@examples(600)
@given(plans_of_ranks(), st.data())
def test_shares_in_columns_are_those_of_the_rule_box_by_box(plans: list[Plan], data: Any) -> None:
    """Whatever is tied, kept or cut on some ranks, each rank writes what the plain rule gives it."""
    kept_ranks = data.draw(st.lists(st.sampled_from(range(len(plans))), unique=True, max_size=2))
    kept: dict[int, Assignment] = {}
    kept_names: dict[int, dict[int, list[str]]] = {}
    for rank in kept_ranks:
        items, objects = plans[rank]
        bits = [[data.draw(st.booleans()) for _ in item.fqns] for item in items]
        kept[rank] = Assignment.of([bit for row in bits for bit in row], [True] * len(objects))
        written = {
            index: [name for name, bit in zip(items[index].fqns, row, strict=True) if bit]
            for index, row in enumerate(bits)
        }
        kept_names[rank] = {index: names for index, names in written.items() if names}
    held = ShardTable.of([LocalPlan.of(items, objects, b"") for items, objects in plans])
    boxes = Boxes.of_rows(held)
    try:
        wanted = Rule(plans).assign(kept_names)
    except PlanChangedError:
        with pytest.raises(PlanChangedError, match="no rank captured"):
            assign(held, boxes, kept, equal(boxes))
        return
    assigned = assign(held, boxes, kept, equal(boxes))
    shares = [of_rank.share for of_rank in assigned]
    found = [dict(share.items([item.fqns for item in items])) for share, (items, _) in zip(shares, plans, strict=True)]
    assert found == wanted
    assert [of_rank.items for of_rank in assigned] == [len(own) for own in wanted]
    assert [of_rank.stored_by for of_rank in assigned] == _others(plans, shares)
    _check_objects(shares, plans, kept_ranks)


def _others(plans: list[Plan], shares: list[Assignment]) -> list[tuple[int, ...]]:
    """Per rank, the other ranks that write a box or an object of its own."""
    writer: dict[object, int] = {}
    for rank, (share, (items, objects)) in enumerate(zip(shares, plans, strict=True)):
        for index, names in share.items([item.fqns for item in items]):
            writer |= {(name, items[index].offsets): rank for name in names}
        writer |= dict.fromkeys(share.object_names(objects), rank)
    held = [{*((name, item.offsets) for item in items for name in item.fqns), *objects} for items, objects in plans]
    return [tuple(sorted({writer[box] for box in boxes} - {rank})) for rank, boxes in enumerate(held)]


def test_small_replicas_lie_with_the_lowest_rank_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_SMALL_BYTES", 64)
    monkeypatch.setattr(assignment, "_SMALL_TOTAL_BYTES", 64 * 10)
    small = [ShardInfo((f"s{n}",), (0,), TensorSignature((16,), (16,), "float32")) for n in range(12)]
    large = [ShardInfo((f"l{n}",), (0,), TensorSignature((17,), (17,), "float32")) for n in range(30)]
    shares, items = shares_of([([*small, *large], ())] * 3)
    names = [
        {name for _, names in share.items([item.fqns for item in [*small, *large]]) for name in names}
        for share in shares
    ]
    assert sum(name.startswith("s") for name in names[0]) >= 10
    assert max(items) - min(items) <= 2, "the large ones make up for it"


def test_a_rank_whose_state_lies_with_many_others_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_MOST_STORED_BY", 2)
    items = [ShardInfo((f"t{n}",), (0,), TensorSignature((4,), (4,), "float32")) for n in range(8)]
    held = ShardTable.of([LocalPlan.of(items, (), b"")] * 4)
    boxes = Boxes.of_rows(held)
    assert [of_rank.stored_by for of_rank in assign(held, boxes, {}, equal(boxes))] == [None] * 4


def _check_objects(shares: list[Assignment], plans: list[Plan], kept_ranks: list[int]) -> None:
    """A kept rank's objects stay its own; all others go to the lowest rank."""
    writers: dict[str, int] = {}
    for rank in (*kept_ranks, *(rank for rank in range(len(plans)) if rank not in kept_ranks)):
        for name in plans[rank][1]:
            if rank in kept_ranks:
                writers[name] = rank
            else:
                writers.setdefault(name, rank)
    for rank, (share, (_, objects)) in enumerate(zip(shares, plans, strict=True)):
        assert share.object_names(objects) == tuple(name for name in objects if writers[name] == rank)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_over_a_mesh_are_spread_as_evenly_as_those_of_one_group(replicas: int) -> None:
    """Groups of ranks that share nothing are balanced side by side: each is given what it would be given alone."""
    rows = [1 + number % 5 for number in range(30)]

    def plans_of(group: int, groups: int) -> list[Plan]:
        own = [
            ShardInfo((f"t{n}",), (group * r, 0), TensorSignature((r, 2), (groups * r, 2), "float32"))
            for n, r in enumerate(rows)
        ]
        return [(own, ())] * replicas

    alone, _ = shares_of(plans_of(0, 1))
    together, _ = shares_of([plan for group in range(4) for plan in plans_of(group, 4)])
    assert together == alone * 4


def shares_of(plans: list[Plan]) -> tuple[list[Assignment], list[int]]:
    held = ShardTable.of([LocalPlan.of(items, objects, b"") for items, objects in plans])
    boxes = Boxes.of_rows(held)
    assigned = assign(held, boxes, {}, equal(boxes))
    return [of_rank.share for of_rank in assigned], [of_rank.items for of_rank in assigned]


# -- messages ---------------------------------------------------------------------------------------


def test_a_share_says_which_names_of_which_items_and_refuses_another_plan() -> None:
    """A share is read back as it was made, and one that is too long or too short for a plan is an error."""
    share = Assignment.of([True, False, True, False], [False, True])
    assert share.items([("a", "b"), ("c",), ("d",)]) == [(0, ("a",)), (1, ("c",))]
    assert share.object_names(("x", "y")) == ("y",)
    assert share.count_objects() == 1
    for other in ([], [("a",)] * 9):
        with pytest.raises(PlanChangedError, match="of a plan of"):
            share.items(other)


GOOD = LocalPlan.of([ShardInfo(("a", "b"), (4, 0), TensorSignature((4, 2), (8, 2), "float32"))], ("o",), b"")
SUMS = ContentSums(b"1234", b"12345678")
pack = msgspec.msgpack.encode
LOOKS = ([((4, 2), (8, 2), "float32")], [0])
MALFORMED = {
    "names that are none": {"names": b"\xc1"},
    "names that end early": {"names": GOOD.names[:-1]},
    "names of another kind": {"names": pack([[1]])},
    "an item without a name": {"names": pack([[]])},
    "one name twice": {"names": pack([["a", "a"]])},
    "more items than looks": {"names": pack([["a"], ["b"]])},
    "a look that is none": {"signatures": b""},
    "a look that is not there": {"signatures": pack((LOOKS[0], [1]))},
    "a look before the first": {"signatures": pack((LOOKS[0], [-1]))},
    "another number of dimensions": {"signatures": pack(([((4,), (8, 2), "float32")], [0]))},
    "a negative side": {"signatures": pack(([((4, 2), (8, -2), "float32")], [0]))},
    "a side beyond all memory": {"signatures": pack(([((4, 2), (1 << 63, 2), "float32")], [0]))},
    "a shard beyond all memory": {"signatures": pack(([((1 << 40, 1 << 40), (1 << 40, 1 << 40), "float32")], [0]))},
    "a dtype that torch lacks": {"signatures": pack(([((4, 2), (8, 2), "float31")], [0]))},
    "too few offsets": {"offsets": GOOD.offsets[:8]},
    "half an offset": {"offsets": GOOD.offsets + b"1234"},
    "objects that are none": {"objects": b"\x01"},
    "one object twice": {"objects": pack(["o", "o"])},
    "too few tolerances": {"tolerances": b""},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_plan_that_is_none_is_an_error_that_names_its_rank(what: str) -> None:
    """Garbage from a rank ends in PeerFailedError with that rank, before anything is assigned."""
    with pytest.raises(PeerFailedError, match="rank 1 sent a plan that is none") as caught:
        ShardTable.of([GOOD, msgspec.structs.replace(GOOD, **MALFORMED[what])])
    assert caught.value.rank == 1


def test_a_shard_outside_of_its_tensor_is_an_error_that_names_it() -> None:
    """An offset before the first element or behind the last is refused, whatever the other ranks hold."""
    for offsets in ((-1, 0), (9, 0), (0, 3)):
        other = msgspec.structs.replace(GOOD, offsets=struct.pack("<2q", *offsets))
        with pytest.raises(PlanChangedError, match="rank 1 holds a part of 'a'"):
            ShardTable.of([GOOD, other])


def test_tensors_of_more_elements_than_can_be_numbered_are_refused() -> None:
    """What no memory holds ends in a clear error, not in numbers that wrap around."""
    huge = LocalPlan.of([ShardInfo(("a",), (0, 0), TensorSignature((1, 1), (1 << 40, 1 << 40), "int8"))], (), b"")
    with pytest.raises(PlanChangedError, match="more than can be numbered"):
        Boxes.of_rows(ShardTable.of([huge]))


def test_a_name_that_is_a_tensor_and_an_object_is_an_error() -> None:
    """One name for two kinds is refused, on one rank and between two."""
    both = msgspec.structs.replace(GOOD, objects=pack(["a"]))
    with pytest.raises(DuplicateNameError, match=r"'a' is .* on rank 0 and object on rank 0"):
        ShardTable.of([both])
    with pytest.raises(DuplicateNameError, match=r"'o' is object on rank 0 and .* on rank 1"):
        ShardTable.of([GOOD, LocalPlan.of([ShardInfo(("o",), (0,), TensorSignature((1,), (1,), "int8"))], (), b"")])
    with pytest.raises(DuplicateNameError, match=r"'a' is .* on rank 0 and object on rank 1"):
        ShardTable.of([GOOD, LocalPlan.of([], ("x", "a"), b"")])


def test_an_object_that_no_rank_captured_is_an_error() -> None:
    """What a kept share leaves out and no other rank has is missed by name; what another has is written there."""
    kept = {0: Assignment.of([], [True, False])}
    held = ShardTable.of([LocalPlan.of([], ("x", "y"), b""), LocalPlan.of([], ("x",), b"")])
    boxes = Boxes.of_rows(held)
    with pytest.raises(PlanChangedError, match=r"no rank captured \['y'\]"):
        assign(held, boxes, kept, equal(boxes))
    held = ShardTable.of([LocalPlan.of([], ("x", "y"), b"")] * 2)
    boxes = Boxes.of_rows(held)
    shares = [of_rank.share for of_rank in assign(held, boxes, kept, equal(boxes))]
    assert [share.object_names(("x", "y")) for share in shares] == [("x",), ("y",)]


def test_replicas_that_differ_are_found_and_written_by_the_lowest_rank() -> None:
    """By the sums of those ranks that sent any; the others do not count."""
    items = [ShardInfo((name,), (0,), TensorSignature((4,), (4,), "int8")) for name in ("a", "b", "c")]
    held = ShardTable.of([LocalPlan.of(items, ("x", "y"), b"")] * 3)
    boxes = Boxes.of_rows(held)
    unequal = unequal_replicas(held, boxes, {1: struct.pack("<3q", 1, 2, 3), 2: struct.pack("<3q", 1, -2, 3)})
    assert {held.names[name] for name in held.name[unequal[boxes.of]]} == {"b"}
    shares = [of_rank.share for of_rank in assign(held, boxes, {}, unequal)]
    assert [1 in dict(share.items([item.fqns for item in items])) for share in shares] == [True, False, False]
    sums = {0: struct.pack("<2I", 5, 6), 1: struct.pack("<2I", 5, 6), 2: struct.pack("<2I", 5, 7)}
    assert ObjectColumns.of(held.objects).unequal(sums) == {"y"}


@pytest.mark.parametrize("sums", [b"", b"1" * 7, b"1" * 16])
def test_sums_of_another_plan_are_an_error(sums: bytes) -> None:
    """So are those of a rank that holds nothing, and sends some."""
    held = ShardTable.of([GOOD, LocalPlan.of([], (), b"")])
    for rank in (0, 1):
        if sums or rank == 0:
            with pytest.raises(PeerFailedError, match=f"rank {rank} sent a plan that is none"):
                unequal_replicas(held, Boxes.of_rows(held), {rank: sums})
            with pytest.raises(PeerFailedError, match=f"rank {rank} sent a plan that is none"):
                ObjectColumns.of(held.objects).unequal({rank: sums})


def test_what_equal_ranks_tell_is_kept_once() -> None:
    """Of ranks that name and cut their tensors alike, the leader keeps one copy of the names and the looks."""
    copies = [msgspec.msgpack.Decoder(LocalPlan).decode(pack(GOOD)) for _ in range(3)]
    assert copies[0].names is not copies[1].names
    kept = intern(copies)
    assert kept == copies
    assert all(plan.names is kept[0].names and plan.signatures is kept[0].signatures for plan in kept)
    (again,) = intern(copies[1:2], kept)
    assert again.offsets is kept[0].offsets, "a rank that plans the same anew"


@pytest.mark.parametrize("moved", [(1, 5, 6), (-1, 5, 6), (0, -5, 6), (0, 5, -6)])
def test_objects_that_are_none_of_a_share_are_an_error(moved: tuple[int, int, int]) -> None:
    """A rank that tells of an object that it does not write, or of a place before its file, makes the save fail."""
    ledger, places = Ledger(1, differing="refuse"), struct.pack("<3q", 0, 900, 0)
    (word,) = ledger.assign([PlanMsg(1, GOOD, SUMS)])
    with pytest.raises(PlanChangedError, match="rank 0 lost count"):
        vote = Vote(1, word.share_id, 1, 2, (0.0, 0.0, 0.0), (moved,), extents_crc32([moved[1:]]), SUMS, places)
        ledger.learn([vote])


@pytest.mark.parametrize(
    "places",
    [
        b"",
        b"1" * 23,
        bytes(48),
        struct.pack("<3q", 0, -1, 0),
        struct.pack("<3q", (1 << 63) - 1, 1, 0),
        struct.pack("<3q", 0, 900, 2),
        struct.pack("<3q", 0, 900, -1),
    ],
)
def test_places_that_no_data_file_has_are_an_error(places: bytes) -> None:
    """A rank that tells more, fewer or other places than its share has makes the save fail, and no metadata."""
    ledger = Ledger(1, differing="refuse")
    (word,) = ledger.assign([PlanMsg(1, GOOD, SUMS)])

    def written(told: bytes) -> Vote:
        spans = [(5, 6)]
        return Vote(1, word.share_id, 1, 2, (0.0, 0.0, 0.0), ((0, 5, 6),), extents_crc32(spans), SUMS, told)

    with pytest.raises(PlanChangedError, match="rank 0 lost count"):
        ledger.learn([written(places)])
    assert ledger.learn([written(struct.pack("<3q", 0, 900, 1))]) == [(5, 6)]
