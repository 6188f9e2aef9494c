"""A tiny language model, its data, and Trainers of it; without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from aio_ckpt.integrations.huggingface import AioTrainerMixin


class AioTrainer(AioTrainerMixin, Trainer):  # type: ignore[misc]
    """Trainer under test."""


def dataset(rows: int = 24) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (rows, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Arguments of a run of 12 steps that saves every third one."""
    given: dict[str, Any] = {
        "max_steps": 12,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**given, **options})


def trainer(folder: Path, kind: type[Trainer] = AioTrainer, *, callbacks: Any = None, **options: Any) -> Any:
    """Return a Trainer of a new model."""
    data = dataset()
    args = arguments(folder, **options)
    return kind(model=model(), args=args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def losses(trainer: Any) -> dict[int, float]:
    """Return the loss of each step."""
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def load_to_numbered_cpus() -> None:
    """Let ``torch.load`` know ``cpu:0``, where transformers 5.17 loads the optimizer if there are several ranks."""
    torch.serialization.register_package(
        1, lambda stored: None, lambda stored, place: stored if place.startswith("cpu:") else None
    )
