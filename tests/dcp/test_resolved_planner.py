"""``ResolvedPlanner``: what a planner resolved is saved, whatever becomes of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt.dcp import Writer
from aio_ckpt.dcp.resolved_planner import ResolvedPlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def resolved(state: dict[str, Any]) -> ResolvedPlanner:
    planner = ResolvedPlanner(None)
    planner.resolve(state, is_coordinator=True)
    return planner


def test_copies_take_the_place_of_the_tensors_and_objects_are_as_they_were(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "bias": torch.ones(2), "run": {"of": [3]}}
    planner = resolved(state)
    planner.replace_tensors([tensor.clone() for tensor in planner.tensors])
    state["model"]["w"].zero_()
    state["bias"].zero_()
    state["run"]["of"][0] = 4
    dcp.save({}, storage_writer=Writer(tmp_path), planner=planner)
    target = {"model": {"w": torch.zeros(6)}, "bias": torch.zeros(2), "run": {"of": [0]}}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["w"], torch.arange(6.0))
    assert torch.equal(target["bias"], torch.ones(2))
    assert target["run"] == {"of": [3]}


class Quantized(torch.Tensor):
    """Tensor that gives its plain values on demand, as those of FP8 recipes do."""

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor) * 2


def test_a_quantized_tensor_is_dequantized_as_nvrx_does(tmp_path: Path) -> None:
    dcp.save({}, storage_writer=Writer(tmp_path), planner=resolved({"w": torch.arange(6.0).as_subclass(Quantized)}))
    target = {"w": torch.zeros(6)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], 2 * torch.arange(6.0))


def test_an_error_of_resolving_is_the_error_of_the_save(tmp_path: Path) -> None:
    planner = ResolvedPlanner(None)
    planner.fail(OSError(5, "the device is gone"))
    with pytest.raises(CheckpointException, match="the device is gone"):
        dcp.save({}, storage_writer=Writer(tmp_path), planner=planner)
    assert not (tmp_path / ".metadata").exists()
