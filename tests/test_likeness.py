"""What proves that tensors look as before is quick, may be silent, and is never believed untried."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.state import same_metadata as likeness
from aio_ckpt.state.same_metadata import Likeness, looks_like

TIMEOUT = 20.0


class Lying:
    """Guards that find everything alike."""

    def __init__(self, *_: object, **__: object) -> None:
        return None

    def check(self, *_: object) -> bool:
        return True


class Other:
    """Guards of a version that is made otherwise."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        raise AssertionError("never made")


def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "_tells_all_apart", lambda: False)


def test_the_same_tensors_and_others_that_look_the_same_are_proven() -> None:
    tensors = [torch.ones(2, 3), torch.ones(4, dtype=torch.int8), torch.nn.Parameter(torch.ones(1))]
    like = Likeness(tensors)
    if like._check is None:
        pytest.skip("this torch has no guards that tell everything apart")
    assert like.is_proven(tensors)
    assert like.is_proven([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int8), torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("pair", range(len(list(likeness._unlike()))))
def test_no_difference_is_overlooked(pair: int) -> None:
    one, other = list(likeness._unlike())[pair]
    same = torch.ones(5)
    assert not Likeness([same, one]).is_proven([same, other])


@pytest.mark.parametrize("pair", range(len(list(likeness._unlike()))))
def test_one_tensor_proves_those_that_look_like_it_and_no_other(pair: int) -> None:
    one, other = list(likeness._unlike())[pair]
    if not likeness._tells_all_apart():
        pytest.skip("this torch has no guards that tell everything apart")
    is_like = looks_like(one)
    assert is_like(one)
    assert not is_like(other)


def test_without_a_proof_nothing_looks_like_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    without_proof(monkeypatch)
    one = torch.ones(3)
    assert not looks_like(one)(one)


def test_fewer_more_and_swapped_tensors_are_not_proven() -> None:
    a, b = torch.ones(2), torch.ones(3)
    like = Likeness([a, b])
    for given in ([a], [a, b, torch.ones(3)], [b, a], []):
        assert not like.is_proven(given)


@pytest.mark.parametrize("guards", [Lying, Other, None])
def test_guards_that_lie_or_are_made_otherwise_or_lack_are_not_used(
    monkeypatch: pytest.MonkeyPatch, guards: Any
) -> None:
    if guards is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)
    assert not likeness._tells_all_apart.__wrapped__()


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_plan_is_a_hit_or_a_miss_whether_or_not_there_is_a_quick_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    if not is_quick:
        without_proof(monkeypatch)
    tied = torch.nn.Parameter(torch.ones(5))
    state: dict[str, object] = {"a": torch.ones(2, 3), "tied": tied, "again": tied}
    with SyncCheckpointEngine(tmp_path) as engine:

        def hits() -> bool:
            report = engine.save(state).result(TIMEOUT)
            assert report is not None
            return report.plan_hit

        assert [hits(), hits()] == [False, True]
        tied.requires_grad_(False)  # nothing that a checkpoint holds
        assert hits()
        with torch.no_grad():
            assert hits()
        state["a"] = torch.ones(3, 2).t()
        assert [hits(), hits()] == [False, True]
        state["a"] = torch.ones(2, 3, dtype=torch.float64)
        assert [hits(), hits()] == [False, True]


def test_a_likeness_keeps_no_tensor_alive() -> None:
    tensor = torch.ones(3)
    like, seen = Likeness([tensor]), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert seen() is None
    assert like.is_proven([torch.ones(3)]) or like._check is None
