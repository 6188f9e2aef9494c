"""What proves that tensors look as before is quick, may be silent, and is never believed untried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.state import same_metadata as likeness
from aio_ckpt.state.same_metadata import looks_like

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


@pytest.mark.parametrize("guards", [Lying, Other, None])
def test_guards_that_lie_or_are_made_otherwise_or_lack_are_not_used(
    monkeypatch: pytest.MonkeyPatch, guards: Any
) -> None:
    if guards is None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)
    assert not likeness._tells_all_apart.__wrapped__()


def test_what_a_checkpoint_holds_of_a_tensor_decides_whether_a_plan_is_a_hit(tmp_path: Path) -> None:
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
