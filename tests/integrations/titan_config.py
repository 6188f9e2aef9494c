"""Configurations of ``torchtitan.train`` for tests: its llama3 debug model, with random tokens in place of a data set.

``python -m tests.integrations.titan_train --module tests.integrations.titan_config --config ours``, where the variable
``DUMP_FOLDER`` names the folder. If ``KILLED_BEHIND`` is a step, SIGKILL ends the process once its checkpoint is there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from aio_ckpt.integrations.torchtitan import AioCheckpointManager

INTERVAL, STEPS = 4, 12
TIMEOUT_SECS = 60.0


class Numbers(BaseTokenizer):
    """A tokenizer that is never asked."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Refuse."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Refuse."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Return that of the debug model."""
        return 2048


class RandomTokens(BaseDataLoader):
    """Batches that follow from their number, which is its state."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **kwargs: Any) -> None:
        self._rank, self._shape, self._count = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels without end."""
        while True:
            self._count += 1
            if self._count > int(os.environ.get("KILLED_BEHIND", STEPS)):
                kill_behind(int(os.environ["KILLED_BEHIND"]))
            numbers = torch.Generator().manual_seed(1000 * self._rank + self._count)
            tokens = torch.randint(2048, self._shape, generator=numbers)
            positions = torch.arange(self._shape[1] - 1).repeat(self._shape[0], 1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that were made."""
        return {"count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind them."""
        self._count = state_dict["count"]


def kill_behind(step: int) -> None:
    """End this process once the checkpoint of ``step`` is there."""
    checkpoint = Path(os.environ["DUMP_FOLDER"], "checkpoint", f"step-{step}", ".metadata")
    deadline = time.monotonic() + TIMEOUT_SECS
    while not checkpoint.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{checkpoint} is not there after {TIMEOUT_SECS} s")
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def _config(checkpoint: CheckpointManager.Config) -> Trainer.Config:
    config = llama3_debugmodel()
    config.dump_folder = os.environ["DUMP_FOLDER"]
    config.tokenizer, config.dataloader = Numbers.Config(), RandomTokens.Config()
    config.optimizer = default_adamw(lr=8e-4)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=2)
    config.training = TrainingConfig(local_batch_size=2, seq_len=256, steps=STEPS)
    config.validator = Validator.Config(enable=False)
    config.debug = DebugConfig(seed=11, deterministic=True)
    config.checkpoint = checkpoint
    return config


def ours() -> Trainer.Config:
    """Return the configuration with our manager."""
    return _config(
        AioCheckpointManager.Config(
            enable=True, interval=INTERVAL, last_save_model_only=False, enable_first_step_checkpoint=True
        )
    )


def stock() -> Trainer.Config:
    """Return the configuration with torchtitan's manager."""
    return _config(CheckpointManager.Config(enable=True, interval=INTERVAL, last_save_model_only=False))
