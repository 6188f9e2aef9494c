"""``python -m bench.first_steps``, or ``torchrun --nproc-per-node N -m bench.first_steps``: what a save costs training.

Transformer blocks train with AdamW, one process on each GPU, each with a state of its own. A pair is seven steps
without a save and seven with a save before the third, each from the same rest. Lost is what the last five steps take
longer. The second row of pairs guards the optimizer. In the last one, the first rank alone saves, and the others train
on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.ranks.coordinator import SoloCoordinator
from bench.common.measure import Spread
from bench.common.options import log
from bench.common.results import FigureRow, Goal, Report, out_folder, publish
from bench.gpu.options import Trial
from bench.gpu.supervise import free_port
from bench.gpu.train import Ground, StepClock, Trainer, make_trainer

__all__ = ["main"]

_BEFORE, _STEPS = 2, 5
"""Steps after the rest that belong to nothing, and those that are compared."""
_WAIT_SECS = 120.0


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_steps", description=__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--gb", type=float, default=8.5 if has_gpu else 0.02, help="state of each rank")
    parser.add_argument("--step-ms", type=float, default=63 if has_gpu else 20, help="training step aimed at")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of each kind, after one that warms up")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk of the checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    ground = _ground()
    given.dir.mkdir(parents=True, exist_ok=True)
    folder = _same([tempfile.mkdtemp(dir=given.dir)] if ground.rank == 0 else [None], ground)
    try:
        trainer = make_trainer(_trial(given.gb, given.step_ms, folder), ground)
        figures = {
            "together": _pairs(trainer, ground, Path(folder, "together"), given.pairs),
            "guarded": _pairs(trainer, ground, Path(folder, "guarded"), given.pairs, is_guarded=True),
        }
        if ground.world > 1:
            figures["first rank alone"] = _pairs(trainer, ground, Path(folder, "alone"), given.pairs, is_alone=True)
        ranks: list[dict[str, tuple[list[float], list[float]]] | None] = [None] * ground.world
        if ground.world > 1:
            dist.all_gather_object(ranks, figures, ground.group)
        else:
            ranks = [figures]
        if ground.rank == 0:
            report = _report([each for each in ranks if each], given.gb, given.step_ms, given.pairs)
            out = out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=False)
            log(f"wrote {publish(report, given.dir.absolute(), out=out)}")
    finally:
        if ground.rank == 0:
            shutil.rmtree(folder)


def _ground() -> Ground:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return Ground(rank=rank, world=world, device=device, group=group, saves=group)


def _same(value: list[str | None], ground: Ground) -> str:
    """Return the value of the first rank."""
    dist.broadcast_object_list(value, 0, ground.group)
    assert value[0] is not None
    return value[0]


def _trial(gb: float, step_ms: float, folder: str) -> Trial:
    return Trial(
        contender="aio_ckpt",
        mode="save",
        shape="blocks",
        gb=gb,
        dtype="bf16",
        step_ms=step_ms,
        every=(),
        repeats=1,
        base_steps=0,
        secs=0,
        folder=folder,
    )


def _pairs(
    trainer: Trainer, ground: Ground, root: Path, pairs: int, *, is_alone: bool = False, is_guarded: bool = False
) -> tuple[list[float], list[float]]:
    """Return what each save took from the five steps, and how long ``save()`` blocked, in ms."""
    lost, blocked = list[float](), list[float]()
    coordinator = SoloCoordinator() if is_alone else None
    is_saving = ground.rank == 0 or not is_alone
    with SyncCheckpointEngine(
        root / str(ground.rank if is_alone else 0), EngineConfig(keep_last=1), coordinator=coordinator
    ) as engine:
        if is_guarded:
            engine.guard(trainer.optimizer)
        for number in range(pairs + 1):
            without, _ = _steps(trainer, ground, None)
            beside, blocked_ms = _steps(trainer, ground, engine if is_saving else None)
            if number:
                lost.append(1e3 * (beside - without))
                blocked.append(blocked_ms)
    return lost, blocked


def _steps(trainer: Trainer, ground: Ground, engine: SyncCheckpointEngine | None) -> tuple[float, float]:
    """Train from rest. Returns the seconds of the steps after the first two, and the ms of ``save()`` before them."""
    if ground.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    ground.barrier()
    clock, ticket, blocked_ms = StepClock(ground), None, 0.0
    for step in range(_BEFORE + _STEPS):
        if engine is not None and step == _BEFORE:
            began = time.perf_counter()
            ticket = engine.save(trainer.state)
            blocked_ms = 1e3 * (time.perf_counter() - began)
        trainer.compute()
        trainer.update()
        clock.end_step()
    secs = sum(clock.steps_secs()[_BEFORE:])
    if ticket is not None:
        ticket.result(_WAIT_SECS)
    ground.barrier()
    return secs, blocked_ms


def _report(ranks: list[dict[str, tuple[list[float], list[float]]]], gb: float, step_ms: float, pairs: int) -> Report:
    rows = [
        FigureRow(text=f"{what}, {kind}, rank {rank}", values=Spread.of(values), unit="ms")
        for kind in ranks[0]
        for rank, figures in enumerate(ranks)
        for what, values in zip(("lost", "blocked"), figures[kind], strict=True)
    ]
    lost = max(Spread.of(figures["together"][0]).median for figures in ranks)
    guarded = max(Spread.of(figures["guarded"][0]).median for figures in ranks)
    blocked = max(Spread.of(figures["together"][1]).median for figures in ranks)
    return Report(
        bench="first-steps",
        settings={"gb": gb, "step_ms": step_ms, "pairs": pairs, "ranks": len(ranks)},
        figures=rows,
        goals=[
            Goal(text="lost in five steps, the slowest rank", figure=lost, bound=15.0, unit="ms"),
            Goal(text="save(), the slowest rank", figure=blocked, bound=3.0, unit="ms"),
            Goal(text="guarded, lost in five steps, the slowest rank", figure=guarded, bound=15.0, unit="ms"),
        ],
    )


if __name__ == "__main__":
    main()
