"""``python -m bench.memory``: 100 saves; what the process holds after the 10th and after the last."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from aio_ckpt.engine.engine import CheckpointEngine
from bench.common.measure import Spread
from bench.common.options import Options, log, parse, work_folder
from bench.common.results import FigureRow, Goal, Report, publish
from bench.common.states import SHAPES

__all__ = ["ShardTable", "main", "many_saves"]

SETTLED_AFTER = 10
"""Saves after which buffers and threads should be all there."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """What a process holds at one moment."""

    rss_bytes: int
    """Resident memory."""
    files: int
    """Open descriptors."""
    threads: int
    arena_bytes: int
    """Images of the engine, seen while a save was in flight."""

    @classmethod
    def now(cls, *, arena_bytes: int) -> ShardTable:
        """Of this process."""
        gc.collect()
        process = psutil.Process()
        return cls(
            rss_bytes=process.memory_info().rss,
            files=process.num_fds(),
            threads=process.num_threads(),
            arena_bytes=arena_bytes,
        )


def main() -> None:
    """Run the bench."""
    options = parse("memory", __doc__ or "")
    figures: list[FigureRow] = []
    goals: list[Goal] = []
    with work_folder(options) as folder:
        for name in options.shapes:
            state = SHAPES[name].make(options.sizes, options.device)
            payload = sum(tensor.nbytes for tensor in state.values())
            title = f"{name}: {len(state)} tensors, {payload / 1e6:.1f} MB"
            log(f"{title}, {options.saves} saves")
            early, late = many_saves({"state": state, "note": "a"}, folder / name, options)
            figures += _figures(title, early, late, options.saves)
            goals += _goals(name, payload, early, late, options.saves)
            del state
    settings = options.settings() | {"saves": options.saves}
    report = Report(bench="memory", settings=settings, figures=figures, goals=goals)
    log(f"wrote {publish(report, options.folder, out=options.out)}")


def many_saves(state: dict[str, object], folder: Path, options: Options) -> tuple[ShardTable, ShardTable]:
    """What is held after save ``SETTLED_AFTER`` and after the last; values change before each."""
    tensors = state["state"]
    assert isinstance(tensors, dict)
    early = late = ShardTable.now(arena_bytes=0)
    engine = CheckpointEngine(folder, options.config)
    try:
        for number in range(1, options.saves + 1):
            for tensor in list(tensors.values())[:4]:
                assert isinstance(tensor, torch.Tensor)
                tensor.add_(1)
            state["note"] = f"save {number}"
            ticket = engine.save(state)
            arena_bytes = engine.lifetime.arena_bytes
            report = ticket.result()
            assert report is not None
            shutil.rmtree(report.path)
            if number == SETTLED_AFTER:
                early = ShardTable.now(arena_bytes=arena_bytes)
        late = ShardTable.now(arena_bytes=arena_bytes)
    finally:
        engine.close_blocking()
    return early, late


def _figures(title: str, early: ShardTable, late: ShardTable, saves: int) -> list[FigureRow]:
    rows = []
    for when, held in ((SETTLED_AFTER, early), (saves, late)):
        for text, value, unit in (
            ("resident", held.rss_bytes / _MIB, "MiB"),
            ("open files", float(held.files), ""),
            ("threads", float(held.threads), ""),
            ("images in flight", held.arena_bytes / _MIB, "MiB"),
        ):
            rows.append(FigureRow(text=f"{title}: {text} after save {when}", values=Spread.of([value]), unit=unit))
    return rows


def _goals(name: str, payload: int, early: ShardTable, late: ShardTable, saves: int) -> list[Goal]:
    growth = late.rss_bytes - early.rss_bytes
    allowed = max(early.rss_bytes // 100, 4 * _MIB) / _MIB
    span = f"save {SETTLED_AFTER} to {saves}"
    goals = [
        Goal(text=f"{name}: resident memory, growth from {span}", figure=growth / _MIB, bound=allowed, unit="MiB"),
        Goal(text=f"{name}: open files, growth from {span}", figure=late.files - early.files, bound=0.0, unit=""),
        Goal(text=f"{name}: threads, growth from {span}", figure=late.threads - early.threads, bound=0.0, unit=""),
    ]
    if name != "small":  # 4 KiB tensors carry 0.7 KiB of envelope each, by the format
        goals.append(Goal(text=f"{name}: image in flight / payload", figure=late.arena_bytes / payload, bound=1.02))
    return goals


if __name__ == "__main__":
    main()
