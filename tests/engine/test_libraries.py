"""Containers of libraries that people save: a test whose library is missing is skipped with that reason."""

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
