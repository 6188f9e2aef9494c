"""Megatron's real ``pretrain``: killed in a save, and resumed by ours and by stock; see ``megatron_pretrain.py``."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from child_python import child_environment
from megatron_stubs import has_training
from saved_files import ROOT_MANIFEST
from torchrun import run_logged, torchrun

import aio_ckpt
from tests.integrations import megatron_pretrain
from tests.integrations.megatron_pretrain import ASYNC, ITERATIONS, SAVE_INTERVAL

pytestmark = pytest.mark.skipif(not has_training(), reason="needs megatron-core 0.19")
DEADLINE = 120.0
"""Seconds after which a rank that still runs prints its stacks and ends."""
WORLD = 2
TRACKER = "latest_checkpointed_iteration.txt"
KILLED_BEHIND = 9

Losses = list[dict[int, list[str]]]
"""By rank, and by iteration: of each micro batch, exactly."""


def train(
    folder: Path, device: str, *extra: str, saves: str = "ours", name: str, killed_behind: int | None = None
) -> Losses:
    """Train under torchrun, with the checkpoints in ``folder``. Returns the losses of this run."""
    place = folder.parent / name
    command = [*torchrun(WORLD), megatron_pretrain.__file__, *megatron_pretrain.arguments(folder, device), *extra]
    log = place.with_suffix(".log")
    kill = {} if killed_behind is None else {"KILLED_BEHIND": str(killed_behind)}
    env = child_environment(LOSSES=str(place), SAVES=saves, DEVICE=device, DEADLINE=str(DEADLINE), **kill)
    env |= {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # as --deterministic-mode asks
    env |= {"TORCH_COMPILE_DISABLE": "1"}  # which takes longer than all iterations
    began = time.monotonic()
    code = run_logged(command, log, env=env, secs=DEADLINE + 30.0)
    print(f"{name}: {time.monotonic() - began:.1f} s, ended with {code}")
    if (code != 0) != (killed_behind is not None):
        pytest.fail(f"{name} ended with {code}:\n{log.read_text(errors='replace')[-20_000:]}")
    return [losses_in(Path(f"{place}.{rank}")) for rank in range(WORLD)]


def losses_in(path: Path) -> dict[int, list[str]]:
    """Return what a rank wrote down."""
    losses: dict[int, list[str]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["iteration"], []).append(record["loss"])
    return losses


def behind(losses: Losses, iteration: int) -> Losses:
    """Return the losses of later iterations."""
    return [{each: values for each, values in of_rank.items() if each > iteration} for of_rank in losses]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint. No size of a parameter of this model makes Megatron pad."""
    state = aio_ckpt.read(folder / f"iter_{ITERATIONS:07d}", skip_untrusted=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def is_ours(folder: Path, iteration: int) -> bool:
    """Whether this package has written the checkpoint."""
    return bool(list((folder / f"iter_{iteration:07d}").glob(ROOT_MANIFEST)))


def files_in(folder: Path, iteration: int) -> int:
    """Return the number of data files: one a rank, in a checkpoint of this package."""
    return len(list((folder / f"iter_{iteration:07d}").glob("*.distcp")))


def assert_a_killed_pretrain_resumes(root: Path, device: str) -> None:
    whole = train(root / "whole", device, *ASYNC, name="undisturbed")
    assert [list(losses) for losses in whole] == [list(range(1, ITERATIONS + 1))] * WORLD
    assert is_ours(root / "whole", ITERATIONS)

    killed = train(root / "killed", device, *ASYNC, name="killed", killed_behind=KILLED_BEHIND)
    assert killed == [{step: of_rank[step] for step in range(1, KILLED_BEHIND + 1)} for of_rank in whole]
    saved = int((root / "killed" / TRACKER).read_text())
    assert saved in (KILLED_BEHIND - SAVE_INTERVAL, KILLED_BEHIND)  # the save that was killed may be committed
    assert (root / "killed" / f"iter_{KILLED_BEHIND:07d}").is_dir()
    print(f"killed in the save of iteration {KILLED_BEHIND}; the tracker says {saved}")
    shutil.copytree(root / "killed", root / "stock")

    assert train(root / "killed", device, *ASYNC, name="resumed") == behind(whole, saved)
    assert int((root / "killed" / TRACKER).read_text()) == ITERATIONS
    assert files_in(root / "killed", KILLED_BEHIND) == WORLD  # those of the save that was killed are gone
    wanted, found = tensors_of(root / "whole"), tensors_of(root / "killed")
    assert wanted.keys() == found.keys() != set()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name

    assert train(root / "stock", device, saves="stock", name="resumed by stock") == behind(whole, saved)
    assert not is_ours(root / "stock", ITERATIONS)
    later = train(root / "stock", device, *ASYNC, "--ckpt-step", str(ITERATIONS - SAVE_INTERVAL), name="from stock's")
    assert later == behind(whole, ITERATIONS - SAVE_INTERVAL)


@pytest.mark.gpu(2)
def test_a_killed_pretrain_resumes_on_gpus_with_equal_losses(tmp_path: Path) -> None:
    assert_a_killed_pretrain_resumes(tmp_path, "cuda")


@pytest.mark.slow
def test_a_killed_pretrain_resumes_with_equal_losses(tmp_path: Path) -> None:
    assert_a_killed_pretrain_resumes(tmp_path, "cpu")
