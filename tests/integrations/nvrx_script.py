"""A plain script of NVRx's users on one rank: it saves, trains on, and loads what it saved by stock DCP.

``python tests/integrations/nvrx_script.py --root DIR --device cuda`` saves by ours; ``--stock``: by NVRx itself.
The line that it prints at the end holds the times, in ms, for which each save and its polls blocked the trainer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from saved_files import root_manifest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

TENSORS = 8


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--stock", action="store_true")
    options = parser.parse_args(given)
    if not options.stock:
        from aio_ckpt import EngineConfig
        from aio_ckpt.integrations import nvrx

        nvrx.install(EngineConfig(budget_bytes=(256 + 3 * options.mib) << 20))
    times = trains(options)
    print(json.dumps(times), flush=True)
    return times


def trains(options: argparse.Namespace) -> dict[str, Any]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    is_cuda = options.device == "cuda"
    if not is_cuda:  # NVRx itself asks for CUDA
        torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")  # type: ignore
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=not is_cuda)
    rows = options.mib * (1 << 18) // TENSORS // 1024
    model = {f"layer {i}": torch.full((rows, 1024), 0.0, device=options.device) for i in range(TENSORS)}
    state, found, tracked = {"model": model, "step": 0}, {"save_ms": [], "poll_ms": []}, []
    for step in range(1, options.saves + 1):
        for tensor in model.values():
            tensor.add_(1.0)
        state["step"] = step
        if is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        writer = FileSystemWriterAsync(
            options.root / f"step {step}", thread_count=2, use_cpu_shm_for_gpu_tensors=not is_cuda
        )
        planned = save_state_dict_async_plan(state, writer)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize = [lambda planned=planned: save_state_dict_async_finalize(*planned)]
        request = AsyncRequest(save_fn, args, finalize, preload_fn=preload_fn)
        request.add_finalize_fn(lambda step=step: tracked.append(step))
        queue.schedule_async_request(request)
        found["save_ms"].append(round(1e3 * (time.perf_counter() - began), 1))
        longest = 0.0
        for _ in itertools.count():
            for tensor in model.values():  # training goes on
                tensor.add_(1.0).sub_(1.0)
            began = time.perf_counter()
            done = queue.maybe_finalize_async_calls(blocking=False)
            longest = max(longest, time.perf_counter() - began)
            if done:
                break
        found["poll_ms"].append(round(1e3 * longest, 1))
    assert tracked == list(range(1, options.saves + 1)), tracked
    queue.close()
    for step in tracked:
        target = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}, "step": 0}
        folder = options.root / f"step {step}"
        dcp.load(target, storage_reader=dcp.FileSystemReader(folder))
        assert target["step"] == step
        assert all(bool((tensor == step).all()) for tensor in target["model"].values())
        assert root_manifest(folder).exists() is not options.stock
    if is_cuda:
        saves_a_file(state, options.root / "state.pt")
    dist.destroy_process_group()
    return found


def saves_a_file(state: dict[str, Any], path: Path) -> None:
    """By ``TorchAsyncCheckpoint``, which stays NVRx's own."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(state, path)
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert torch.load(path)["step"] == state["step"]


if __name__ == "__main__":
    main()
