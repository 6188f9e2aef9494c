"""Which replicas may differ, and what the leader does with those that do."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from log_lines import kept_lines
from torch import nn

from aio_ckpt.errors import DuplicateNameError, EmptyStateError
from aio_ckpt.plan import assignment
from aio_ckpt.plan.assignment import Boxes, unpacked
from aio_ckpt.plan.differing_replicas import Tolerance, have_to_be_equal, may_differ, replicated_items, unequal_replicas
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, ShardTable, TensorSignature
from aio_ckpt.ranks.save_ledger import ContentSums, Ledger, PlanMsg, Vote, extents_crc32
from aio_ckpt.state.flatten import flatten


class Normed(nn.Module):
    """Parameters, buffers that every model has, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("ordered", torch.sparse_coo_tensor([[0]], [1.0], (2,)))


def free_names(state: dict[str, Any]) -> set[str]:
    plan = PlanCache(world_size=2).resolve(flatten(state, rank=0)).plan
    assert plan.local is not None
    tolerances = np.frombuffer(plan.local.tolerances, "<u4").tolist()
    assert len(tolerances) == len(plan.layout.items)
    rows = zip(plan.layout.items, tolerances, strict=True)
    return {name for item, tolerance in rows if tolerance == Tolerance.FREE for name in item.fqns}


def test_buffers_arrays_and_single_numbers_may_differ_and_parameters_and_moments_may_not() -> None:
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    steps = {f"o.state.{number}.step" for number in range(2)}
    state = {"m": model, "o": optimizer, "a": np.arange(3), "loss": torch.tensor(1.0), "rng": torch.get_rng_state()}
    assert free_names(state) == {*(f"m.{name}" for name in statistics), "m.codes", "a", "loss", *steps}
    plain = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_sparse}
    assert free_names(plain) == statistics, "without the module, its other buffers are not known"


def items(*tolerances: int) -> list[ShardInfo]:
    signature = TensorSignature((4,), (4,), "int8")
    return [ShardInfo((f"t{number}",), (0,), signature, tolerance) for number, tolerance in enumerate(tolerances)]


def local(*tolerances: int, objects: tuple[str, ...] = ()) -> LocalPlan:
    return LocalPlan.of(items(*tolerances), objects, b"")


def test_declared_replicas_may_differ_on_the_ranks_of_one_mesh_only() -> None:
    """And two ranks that disagree whether a tensor is a buffer hold different things."""
    held = ShardTable.of([local(0, 1, 7, 7, 1), local(0, 1, 7, 8, 0)])
    boxes = Boxes.of_rows(held)
    names = [held.names[held.name[row]] for row in boxes.order[:: held.ranks]]
    assert [name for name, strict in zip(names, have_to_be_equal(held, boxes), strict=True) if strict] == [
        "t0",
        "t3",
        "t4",
    ]
    assert [name for name, free in zip(names, may_differ(held, boxes), strict=True) if free] == ["t1", "t4"]


def test_items_that_another_rank_holds_are_flagged_and_a_sum_of_zero_is_compared_with_none() -> None:
    own = ShardInfo(("own",), (0,), TensorSignature((4,), (4,), "int8"))
    plans = [LocalPlan.of([own, *items(0, 0)], (), b""), local(0, 0), LocalPlan.of([], (), b"")]
    held = ShardTable.of(plans)
    boxes = Boxes.of_rows(held)
    flags = [
        unpacked(bits, count).tolist() for bits, count in zip(replicated_items(held, boxes), (3, 2, 0), strict=True)
    ]
    assert flags == [[False, True, True], [True, True], []]
    unequal = unequal_replicas(held, boxes, {0: sums((0, 0, 5)).tensors, 1: sums((7, 6)).tensors})
    assert [held.names[held.name[row]] for row in boxes.order if unequal[boxes.of[row]]] == ["t1", "t1"]


def sums(tensors: tuple[int, ...], objects: tuple[int, ...] = ()) -> ContentSums:
    return ContentSums(struct.pack(f"<{len(objects)}I", *objects), struct.pack(f"<{len(tensors)}q", *tensors))


def votes(ledger: Ledger, plans: list[LocalPlan], contents: list[ContentSums]) -> list[Vote]:
    """The votes of a later save of two ranks that held the same at first."""
    equal = sums((1,) * 2, (1,) * 2)
    replies = ledger.assign([PlanMsg(1, plan, equal) for plan in plans])
    return [
        Vote(2, reply.share_id, 1, 2, (0.0, 0.0, 0.0), (), extents_crc32([]), content)
        for reply, content in zip(replies, contents, strict=True)
    ]


def test_a_later_save_is_refused_by_its_votes_unless_the_values_of_rank_0_are_meant() -> None:
    plans, contents = [local(0, 1, objects=("x", "y"))] * 2, [sums((1, 1), (1, 1)), sums((2, 1), (1, 1))]
    ledger = Ledger(2, differing="refuse")
    with pytest.raises(DuplicateNameError, match=r"^tensors differ .*1 name: 't0'.*PerRank.*Shard.*rank0"):
        ledger.compare(votes(ledger, plans, contents))
    ledger = Ledger(2, differing="rank0")
    with kept_lines() as lines:
        ledger.compare(votes(ledger, plans, contents))
    assert "1 name: 't0'" in lines.messages[0]


def test_each_name_that_may_differ_is_told_once() -> None:
    plans = [local(0, 1, objects=("x", "y"))] * 2
    ledger = Ledger(2, differing="refuse")
    same, other = sums((1, 1), (1, 1)), sums((1, 2), (1, 5))
    with kept_lines() as lines:
        for contents in ([same, same], [same, other], [same, other], [same, sums((), (6, 5))]):
            ledger.compare(votes(ledger, plans, contents))
    assert [line.partition("):")[0].partition("of them (")[2] for line in lines.messages] == [
        "2 names: 't1', 'y'",
        "1 name: 'x'",
    ]


def test_where_the_values_of_rank_0_are_meant_it_writes_every_plain_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are equal now: they may differ in the next save, and belong together."""
    monkeypatch.setattr(assignment, "_SMALL_BYTES", -1)
    for differing, alone in (("refuse", False), ("rank0", True)):
        plan = local(*[0] * 8)
        replies = Ledger(2, differing=differing).assign([PlanMsg(1, plan, sums((1,) * 8))] * 2)  # type: ignore[arg-type]
        written = [len(reply.share.rows(8)) for reply in replies if reply.share is not None]
        assert written == ([8, 0] if alone else [4, 4])


def test_states_of_which_none_has_a_leaf_are_refused() -> None:
    ledger = Ledger(2, differing="refuse")
    with pytest.raises(EmptyStateError, match="all ranks hold no leaf"):
        ledger.assign([PlanMsg(1, local(), ContentSums(b""))] * 2)
    ledger.assign([PlanMsg(1, local(), ContentSums(b"")), PlanMsg(1, local(0), sums((1,)))])
