"""What many names cost: loads with each option beside a plain one, and dicts of plain values beside stock DCP."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import aio_ckpt
from aio_ckpt import EngineConfig, SaveReport, SyncCheckpointEngine
from bench.common.measure import Spread
from bench.common.options import Options, log
from bench.common.results import FigureRow, Goal

__all__ = ["loads_of_names", "plain_values"]


def loads_of_names(count: int, folder: Path, options: Options) -> tuple[list[FigureRow], list[Goal]]:
    """Load ``count`` tensors of one number, plainly and with each option."""
    names = [f"layers.{number // 10}.w{number % 10}" for number in range(count)]
    with SyncCheckpointEngine(folder, EngineConfig()) as engine:
        own = _save(engine, {name: torch.ones(1) for name in names}, 1).path
        tied = _save(engine, dict.fromkeys(names, torch.ones(1)), 2).path

    def tensors(prefix: str = "") -> dict[str, Any]:
        return {prefix + name: torch.zeros(1) for name in names}

    loads: dict[str, Callable[[], object]] = {
        "load()": lambda: aio_ckpt.load(own, tensors()),
        "read()": lambda: aio_ckpt.read(own),
        "read(only=every name)": lambda: aio_ckpt.read(own, only=names),
        "load(rename=every name)": lambda: aio_ckpt.load(
            own, tensors("m."), rename={name: f"m.{name}" for name in names}
        ),
        "load(rename=a function)": lambda: aio_ckpt.load(own, tensors("m."), rename=lambda name: f"m.{name}"),
        "load() into None": lambda: aio_ckpt.load(own, dict.fromkeys(names)),
        "load() into one tensor under every name": lambda: aio_ckpt.load(tied, dict.fromkeys(names, torch.zeros(1))),
    }
    rows, medians = _rows(f"{count:,} names", loads, options.rounds)
    slowest = max(medians[1:]) / medians[0]
    return rows, [
        Goal(text=f"{count:,} names: the slowest option, in plain loads", figure=slowest, bound=10.0, unit="x")
    ]


def plain_values(count: int, folder: Path, options: Options) -> tuple[list[FigureRow], list[Goal]]:
    """Save, load and read ``count`` numbers beside a tensor, with this engine and with stock DCP."""

    def state() -> dict[str, Any]:
        return {"w": torch.ones(1), **{f"k{number}": number for number in range(count)}}

    plain = folder / "stock"
    with warnings.catch_warnings(), SyncCheckpointEngine(folder / "own", EngineConfig()) as engine:
        warnings.simplefilter("ignore")  # one process
        first = _save(engine, state(), 1)
        stock_save(state(), checkpoint_id=plain, no_dist=True)
        rows, (stock, load, read) = _rows(
            f"a dict of {count:,} numbers",
            {
                "stock dcp.load": lambda: stock_load(state(), checkpoint_id=plain, no_dist=True),
                "load()": lambda: aio_ckpt.load(first.path, state()),
                "read()": lambda: aio_ckpt.read(first.path),
            },
            options.rounds,
        )
    blocked = first.timings.blocked_secs * 1e3
    rows.append(FigureRow(text=f"a dict of {count:,} numbers: first save()", values=Spread.of([blocked]), unit="ms"))
    return rows, [
        Goal(text=f"a dict of {count:,} numbers: load() / stock", figure=load / stock, bound=0.5, unit="x"),
        Goal(text=f"a dict of {count:,} numbers: read() / stock", figure=read / stock, bound=0.5, unit="x"),
        Goal(text=f"a dict of {count:,} numbers: first save()", figure=blocked, bound=300.0, unit="ms"),
    ]


def _save(engine: SyncCheckpointEngine, state: dict[str, Any], step: int) -> SaveReport:
    report = engine.save(state, step=step).result()
    if report is None:
        raise AssertionError("the save was skipped")
    return report


def _rows(title: str, calls: dict[str, Callable[[], object]], rounds: int) -> tuple[list[FigureRow], list[float]]:
    """Time the calls in turn. Returns a row and the median, in milliseconds, of each."""
    log(title)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - begin) * 1e3)
    spreads = {name: Spread.of(values) for name, values in taken.items()}
    rows = [FigureRow(text=f"{title}: {name}", values=spread, unit="ms") for name, spread in spreads.items()]
    return rows, [spread.median for spread in spreads.values()]
