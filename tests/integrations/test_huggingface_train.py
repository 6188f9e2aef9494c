"""transformers' real Trainer: killed in a save, and resumed by ours and by stock; see ``huggingface_train.py``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from child_python import child_environment
from torch.utils._pytree import keystr, tree_flatten_with_path
from torchrun import run_logged, torchrun

import aio_ckpt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", exc_type=ImportError)
    pytest.importorskip("accelerate", exc_type=ImportError)
    import safetensors.torch

    from tests.integrations import huggingface_train
    from tests.integrations.huggingface_train import MICRO_BATCHES, MODES, SAVE_STEPS, STEPS

DEADLINE = 200.0
"""Seconds after which a rank that still runs prints its stacks and ends."""
DRAFTS = "_aio_ckpt-draft"
WRITTEN_AT_A_TIME = SAVE_STEPS, 2 * SAVE_STEPS
"""Step of the checkpoint that is durable, and of that which is written, when a run is killed."""


def launch(name: str, device: str, *runs: str) -> None:
    """Train one run after the other, on all ranks of a mode."""
    ranks = MODES[name].ranks
    command = [sys.executable] if ranks == 1 else torchrun(ranks)
    command += [huggingface_train.__file__, name, device, *runs]
    env = child_environment(DEADLINE=str(DEADLINE), CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1")
    if ranks == 1:  # of more, a single process would make a torch.nn.DataParallel
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    began = time.monotonic()
    log = Path(f"{runs[0].partition(':')[2]}.log")
    code = run_logged(command, log, env=env, secs=DEADLINE + 10.0)
    kinds = " and ".join(run.partition(":")[0] for run in runs)
    print(f"{name} on {device}, {kinds}: {time.monotonic() - began:.1f} s, ended with {code}")
    is_killed = any(Path(run.partition(":")[2], DRAFTS).is_dir() for run in runs if run.startswith("killed:"))
    if (code != 0) != is_killed:
        pytest.fail(f"{name} ended with {code}:\n{log.read_text(errors='replace')[-20_000:]}")


def losses(folder: Path, kind: str, ranks: int) -> list[list[tuple[int, str]]]:
    """Return the steps and losses that each rank wrote down."""
    texts = [Path(f"{folder}.{kind}.{rank}").read_text() for rank in range(ranks)]
    return [[(step, loss) for step, loss in map(json.loads, text.splitlines())] for text in texts]


def history(folder: Path) -> Any:
    """Return what the Trainer logged up to the last checkpoint: losses, norms of gradients and learning rates."""
    return json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]


def states(folder: Path) -> dict[str, Any]:
    """Return weights and optimizers of the last checkpoint, by the names of their files or directories."""
    found: dict[str, Any] = {}
    for path in (folder / f"checkpoint-{STEPS}").iterdir():
        if path.suffix == ".safetensors":
            found[path.name] = safetensors.torch.load_file(path)
        elif path.name in ("optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin"):
            found[path.name] = torch.load(path, weights_only=True, map_location="cpu")
        elif path.is_dir():
            found[path.name] = aio_ckpt.read(path)
    return found


def assert_same(found: Any, wanted: Any) -> None:
    """Fail unless two states have the same names, bits and values. A list may stand for a tuple."""
    leaves, others = (
        {keystr(path): leaf for path, leaf in tree_flatten_with_path(each)[0]} for each in (found, wanted)
    )
    assert leaves.keys() == others.keys()
    for name, other in others.items():
        leaf = leaves[name]
        assert torch.equal(leaf, other) if isinstance(other, torch.Tensor) else leaf == other, name


def files(folder: Path) -> set[str]:
    """Return the files of the last checkpoint."""
    top = folder / f"checkpoint-{STEPS}"
    return {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}


def assert_a_killed_run_resumes(root: Path, name: str, device: str) -> None:
    mode = MODES[name]
    if mode.is_lora:
        pytest.importorskip("peft")
    undisturbed, killed, by_stock = root / "whole", root / "killed", root / "stock"
    launch(name, device, f"ours:{undisturbed}", f"killed:{killed}")
    whole = losses(undisturbed, "ours", mode.ranks)
    assert [len(of_rank) for of_rank in whole] == [STEPS * MICRO_BATCHES] * mode.ranks
    durable, written = WRITTEN_AT_A_TIME
    assert sorted(os.listdir(killed)) == [DRAFTS, f"checkpoint-{durable}"]
    draft = os.listdir(killed / DRAFTS / f"checkpoint-{written}")
    assert "trainer_state.json" in draft
    assert mode.held not in draft

    shutil.copytree(killed, by_stock)
    launch(name, device, f"stock:{by_stock}", f"ours:{killed}")
    later = [[each for each in of_rank if each[0] > durable] for of_rank in whole]
    assert losses(killed, "ours", mode.ranks) == later
    assert losses(by_stock, "stock", mode.ranks) == later
    assert history(killed) == history(by_stock) == history(undisturbed)
    assert sorted(os.listdir(killed)) == [f"checkpoint-{step}" for step in range(SAVE_STEPS, STEPS + 1, SAVE_STEPS)]

    wanted = states(undisturbed)
    assert len(wanted) >= 2
    assert_same(states(killed), wanted)
    assert_same(states(by_stock), wanted)
    names = files(by_stock)
    assert files(killed) == files(undisturbed) == {*names, "checksums.sfv"}
    sums = (killed / f"checkpoint-{STEPS}" / "checksums.sfv").read_text()
    assert {line.rpartition(" ")[0] for line in sums.splitlines() if not line.startswith(";")} == names


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu(mode.ranks)) for name, mode in MODES.items()]
)
def test_a_killed_run_resumes_on_gpus_with_equal_losses(tmp_path: Path, name: str) -> None:
    assert_a_killed_run_resumes(tmp_path, name, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODES])
def test_a_killed_run_resumes_with_equal_losses(tmp_path: Path, name: str) -> None:
    assert_a_killed_run_resumes(tmp_path, name, "cpu")
