"""Values of libraries that people save: a test whose library is missing is skipped with that reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import EngineConfig, SyncCheckpointEngine


def easy_dict(number: float) -> Any:
    return pytest.importorskip("easydict").EasyDict({"lr": number, "deep": {"w": torch.full((2,), float(number))}})


def omega(number: float) -> Any:
    return pytest.importorskip("omegaconf").OmegaConf.create({"lr": number, "deep": {"layers": [1, {"x": number}]}})


def config_dict(number: float) -> Any:
    return pytest.importorskip("ml_collections").ConfigDict({"lr": number, "deep": {"x": number}})


MAKERS = {"EasyDict": easy_dict, "DictConfig": omega, "ConfigDict": config_dict}


@pytest.mark.parametrize("case", MAKERS)
def test_a_mapping_of_a_library_is_loaded_into_its_own_object_and_read(root: Path, case: str) -> None:
    make = MAKERS[case]
    with SyncCheckpointEngine(root) as engine:
        engine.save({"cfg": make(2), "w": torch.ones(1)}).result(TIMEOUT)
        target = make(1)
        state = {"cfg": target, "w": torch.zeros(1)}
        engine.load(state)
        assert state["cfg"] is target
        assert str(target) == str(make(2))
        plain, report = engine.read(with_report=True)
        assert type(plain["cfg"]) is dict
        assert plain["cfg"]["lr"] == 2
        assert any(case in line for line in report.plain)
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        whole = engine.read()["cfg"]
    assert type(whole) is type(target)
    assert str(whole) == str(make(2))


# -- optimizers of torchao ----------------------------------------------------------------------------


@pytest.mark.slow  # torchao takes seconds to import
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_low_bit_optimizer_goes_on_as_if_it_had_never_stopped(root: Path, name: str) -> None:
    kind = getattr(pytest.importorskip("torchao.optim"), name)

    def trained(steps: int, seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 64, bias=False)
        optimizer = kind(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 128)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    def moments(optimizer: Any) -> list[torch.Tensor]:
        return [value.dequantize() for value in optimizer.state_dict()["state"][0].values() if hasattr(value, "codes")]

    model, optimizer = trained(3, seed=1)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"model": model, "optimizer": optimizer}).result(TIMEOUT)
        for steps in (0, 1):
            other, fresh = trained(steps, seed=2)
            engine.load({"model": other, "optimizer": fresh})
            assert len(moments(fresh)) == 2
            assert all(map(torch.equal, moments(fresh), moments(optimizer)))
        template = trained(1, seed=3)[1].state_dict()
        engine.load({"optimizer": template})
        assert torch.equal(template["state"][0]["exp_avg"].codes, optimizer.state_dict()["state"][0]["exp_avg"].codes)
        read = engine.read()["optimizer"]["state"][0]["exp_avg"]
    assert type(read) is type(template["state"][0]["exp_avg"])
    assert torch.equal(read.dequantize(), moments(optimizer)[0])
