"""The manager for torchtitan, driven as torchtitan's Trainer drives it; skipped if torchtitan is not installed.

``pip install -e '.[dev,integrations]'`` installs it. ``AIO_CKPT_TITAN=1`` makes a missing torchtitan an error.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytestmark = [pytest.mark.slow]
LONG_SECS = 300.0
STEPS = 8


@pytest.fixture(autouse=True)
def needs_torchtitan() -> None:
    """Skip also where torchtitan is built for another torch than this."""
    for name in ("torchtitan.components.checkpointer", "torchtitan.components.optimizer"):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an import of somebody else's raises
            pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with ranks(1) as running:
        yield running


# -- a trainer in the order of torchtitan's ---------------------------------------------------------


class Data:
    """Stateful data, with the names of torchtitan's ParallelAwareDataloader."""

    def __init__(self, rank: int, count: int) -> None:
        self.name, self.count, self.position = f"dp_rank_{rank}", count, 1000 * rank

    def batch(self) -> torch.Tensor:
        self.position += 1
        return torch.linspace(-1, 1, 40).reshape(4, 10) * (self.position % 97) + torch.rand(4, 10)

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(self.position), "world_size": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == self.count
        self.position = pickle.loads(state[self.name])


class Trainer:
    """One rank's trainer: states, order of the calls, and arguments of the manager are torchtitan's."""

    def __init__(self, rank: int, count: int, folder: Path, *, stock: bool = False, seed: int = 1, **settings: Any):
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from aio_ckpt.integrations.torchtitan import AioCheckpointManager

        warnings.simplefilter("ignore")
        logging.getLogger().setLevel(logging.ERROR)
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(10, 36), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(36), torch.nn.Linear(36, 7)]
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (count,)))
        self.optimizers = default_adamw(implementation="for-loop").build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1.0 / (1 + step))
        self.data = Data(rank, count)
        self.step, self.ntokens_seen = 0, 0
        self.losses: dict[int, float] = {}
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(100 * seed + rank)
        known = {"enable": True, "interval": 2, "keep_latest_k": 0, "last_save_model_only": False}
        kind = CheckpointManager if stock else AioCheckpointManager
        self.load_step = settings.pop("load_step", -1)
        self.checkpointer = kind.Config(**(known | settings)).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def load(self) -> bool:
        return self.checkpointer.load(step=self.load_step)

    def train(self, until: int, steps: int = STEPS) -> None:
        """Train ``until`` this step; ``steps`` is torchtitan's ``training.steps``."""
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            loss = self.model(self.data.batch()).square().mean() * (1 + random.random() + np.random.rand())
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += 4
            self.losses[self.step] = loss.item()
            self.checkpointer.save(self.step, last_step=self.step == steps)

    def contents(self) -> dict[str, Any]:
        """Everything that is the same on any number of ranks."""
        tensors = {**self.model.state_dict(), **self.optimizers.state_dict()}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
        return whole | {"lr": self.schedulers.state_dict()["last_epoch"], "step": self.step}


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted[name])) for name in wanted if wanted[name] is not None and not isinstance(wanted[name], (tuple, str)))


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns. DCP's CheckpointException is no Exception, which alone a rank reports."""
    try:
        return fn()
    except dist.checkpoint.api.CheckpointException as error:
        raise RuntimeError(str(error)) from error


def runs(rank: int, count: int, folder: Path, until: int, settings: dict[str, Any], kill: bool = False) -> Any:
    """Load if there is something, train, close. Returns whether it loaded, the losses and the contents."""

    def run() -> Any:
        trainer = Trainer(rank, count, folder, **settings)
        has_loaded = trainer.load()
        trainer.train(until)
        if kill:
            trainer.checkpointer.maybe_wait_for_saving()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.checkpointer.close()
        return has_loaded, trainer.losses, trainer.contents()

    return told(run)


def test_a_killed_run_goes_on_with_equal_losses(tmp_path: Path) -> None:
    with ranks(2) as running:
        wanted = running.run(runs, tmp_path / "whole", 8, {"seed": 1}, timeout=LONG_SECS)
    with ranks(2) as running:
        for rank in range(2):
            running.start(rank, runs, tmp_path / "killed", 5, {"seed": 1}, True)
        for rank in range(2):
            running.wait_until_dead(rank)
    with ranks(2) as running:
        found = running.run(runs, tmp_path / "killed", 8, {"seed": 2}, timeout=LONG_SECS)
    for (has_loaded, losses, contents), (_, all_losses, all_contents) in zip(found, wanted, strict=True):
        assert has_loaded
        assert losses == {step: all_losses[step] for step in (5, 6, 7, 8)}
        assert equal(contents, all_contents)
