"""A small GPT of Megatron that is saved, killed and resumed, with the real package; see ``megatron_gpt.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from megatron_stubs import has_training

from tests.integrations import megatron_gpt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_gpt_resumes_on_gpus_with_equal_losses(tmp_path: Path, tp: int) -> None:
    megatron_gpt.main(["--root", str(tmp_path / "run"), "--device", "cuda", "--tp", str(tp)])


@pytest.mark.slow
@pytest.mark.skipif(not has_training(), reason="needs megatron-core 0.19")
def test_a_killed_gpt_resumes_with_equal_losses(tmp_path: Path) -> None:
    megatron_gpt.main(["--root", str(tmp_path / "run"), "--device", "cpu", "--tp", "2"])
