"""DeepSpeed with ZeRO-1 and bf16 on one GPU, saved by our engine while it trains. Skipped without DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from child_python import child_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="could not import 'deepspeed'"),
]
LONG_SECS = 300.0
TRAINER = """
import sys
import time
import deepspeed
import torch
from aio_ckpt.integrations import deepspeed as aio_deepspeed

folder, width = sys.argv[1], int(sys.argv[2])


def trainer(is_ours):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if is_ours:
        aio_deepspeed.install(engine)
    return engine


def losses(engine, count):
    found = []
    for _ in range(count):
        torch.manual_seed(engine.global_steps)
        batch = torch.randn(4, width, device=engine.device, dtype=torch.bfloat16)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def seconds(work):
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


ours = trainer(True)
losses(ours, 2)
for _ in range(2):
    blocked = seconds(lambda: ours.save_checkpoint(folder))
    wanted = losses(ours, 3)  # at once, so that torn copies would show
    ours.checkpoint_engine.wait()
    again = trainer(False)
    again.load_checkpoint(folder)
    assert losses(again, 3) == wanted
by_stock = seconds(lambda: again.save_checkpoint(folder + "-stock"))
print(f"save_checkpoint blocks {1e3 * blocked:.0f} ms, stock {1e3 * by_stock:.0f} ms")
ours.save_checkpoint(folder, tag="last")  # the end of the process commits it
"""


@pytest.mark.parametrize("width", [64, 2048])
def test_a_checkpoint_is_what_was_trained_when_it_was_called(tmp_path: Path, width: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    changes = {**place, "DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "run"), str(width)]
    done = subprocess.run(
        command, env=child_environment(**changes), capture_output=True, text=True, timeout=LONG_SECS, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout.splitlines()[-1])
    assert (tmp_path / "run/latest").read_text() == "last"
    assert os.listdir(tmp_path / "run/last")
