"""``load(cast=True)`` reads tensors of another dtype into that of the template."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_storage import TIMEOUT
from torch import nn

from aio_ckpt import SyncCheckpointEngine, TemplateMismatchError

LARGE = 3 << 20
"""Elements: more than one block, and more than one part of a box."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path) as engine:
        yield engine


@pytest.mark.parametrize("numel", [1, 7, LARGE])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int32, torch.float32),
        (torch.int64, torch.int32),
        (torch.float32, torch.complex64),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_a_tensor_is_converted_as_copy_does(
    engine: SyncCheckpointEngine, stored: torch.dtype, wanted: torch.dtype, numel: int
) -> None:
    saved = (torch.arange(numel) % 61).to(stored)
    engine.save({"w": saved, "same": torch.ones(3)}).result(TIMEOUT)
    template = {"w": torch.zeros(numel, dtype=wanted), "same": torch.zeros(3)}
    engine.load(template, cast=True)
    assert torch.equal(template["w"].view(torch.uint8), saved.to(wanted).view(torch.uint8))
    assert template["same"].tolist() == [1, 1, 1]


def test_without_cast_the_error_names_cast_and_nothing_is_touched(engine: SyncCheckpointEngine) -> None:
    engine.save({"w": torch.ones(3)}).result(TIMEOUT)
    template = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(
        TemplateMismatchError, match=r"'w' is torch.bfloat16 .* torch.float32 .*: cast=True converts it"
    ):
        engine.load(template)
    assert not template["w"].any()


def test_what_torch_does_not_cast_is_refused_all_the_same(engine: SyncCheckpointEngine) -> None:
    engine.save({"w": torch.ones(3)}).result(TIMEOUT)
    with pytest.raises(TemplateMismatchError, match="which cast=True does not convert"):
        engine.load({"w": torch.zeros(3, dtype=torch.int64)}, cast=True)
    with pytest.raises(TemplateMismatchError, match=r"torch.float32 in the checkpoint$"):
        engine.load({"w": torch.zeros(3, dtype=torch.int64)})


def test_a_transposed_tensor_and_numpy_values_are_converted(engine: SyncCheckpointEngine) -> None:
    engine.save({"t": torch.arange(6.0).reshape(2, 3), "a": np.arange(3.0), "s": np.float64(2.5)}).result(TIMEOUT)
    frozen = np.zeros(3, np.float32)
    frozen.setflags(write=False)
    for array in (np.zeros(3, np.float32), frozen):
        template: dict[str, Any] = {"t": torch.zeros(3, 2, dtype=torch.float16).t(), "a": array, "s": np.float32(0)}
        engine.load(template, cast=True)
        assert template["t"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (template["a"].dtype, template["a"].tolist()) == (np.float32, [0, 1, 2])
        assert (type(template["s"]), float(template["s"])) == (np.float32, 2.5)


def test_a_module_of_another_dtype_gets_the_converted_values(engine: SyncCheckpointEngine) -> None:
    model = nn.Linear(4, 3)
    engine.save({"model": model}).result(TIMEOUT)
    half = nn.Linear(4, 3).bfloat16()
    engine.load({"model": half}, cast=True)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_one_warning_names_the_tensors_whose_values_may_not_fit(
    engine: SyncCheckpointEngine, caplog: pytest.LogCaptureFixture
) -> None:
    tied = torch.zeros(4, dtype=torch.float16)
    saved = {"u": torch.tensor([255], dtype=torch.uint8), "s": np.float64(1e300), "n": np.array([2**40])}
    engine.save(saved | {"ok": torch.ones(1), "tied": torch.ones(2), "net": nn.Linear(1, 1)}).result(TIMEOUT)
    narrow = {"u": torch.zeros(1, dtype=torch.int8), "s": np.float32(0), "n": np.zeros(1, np.int32)}
    template = narrow | {"ok": torch.ones(1).bfloat16(), "tied": tied[:2], "net": nn.Linear(1, 1).half()}
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        engine.load(template, cast=True)
        (line,) = caplog.messages
    assert template["u"].item() == -1
    for told in ("'u' (uint8 -> int8)", "'n' (int64 -> int32)", "'tied' (float32 -> float16)", "and 1 more: values"):
        assert told in line
    assert "'ok'" not in line
    assert line.endswith("values beyond the range of the template's dtype are not kept")
