"""A run of Ray Train in this process's child: the blocks of the page, in a train loop of one or two ranks."""

from __future__ import annotations

import sys
from typing import Any

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Run the block of the page on a rank."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    names = {"model": model, "optimizer": optimizer, "train_step": train_step, "__name__": "page"}
    exec(config["block"], names)


if __name__ == "__main__":
    block, folder, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(include_dashboard=False, num_cpus=ranks + 1, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"block": block},
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=folder, name="run"),
    )
    result = trainer.fit()
    print("RESULT", result.metrics["step"], result.checkpoint.path)
    ray.shutdown()
