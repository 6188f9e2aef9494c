"""``python -m bench.plan``: what planning an unchanged state costs the caller, beside DCP's planner; many names."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.memory.host_copy import copy_all
from aio_ckpt.reports import SaveReport
from bench.common.limits import page_aligned
from bench.common.measure import Spread
from bench.common.options import Options, log, parse, work_folder
from bench.common.results import FigureRow, Goal, Report, publish
from bench.common.states import flattened_optimizer, tiny_tensors
from bench.names import loads_of_names, plain_values

__all__ = ["main", "planning"]


def main() -> None:
    """Run the bench."""
    options = parse("plan", __doc__ or "")
    count, parameters = (2_000, 43) if options.quick else (20_000, 432)
    with work_folder(options) as folder:
        tiny: Mapping[str, object] = tiny_tensors(count)
        figures, cost = planning(f"{count:,} tensors of 64 bytes", tiny, folder / "tiny", options)
        figures += _fresh_addresses(count, folder / "fresh", options)
        figures += _dcp_planning(count, tiny, options.rounds)
        optimizer = flattened_optimizer(parameters)
        scalars = sum(not isinstance(value, torch.Tensor) for value in optimizer.values())
        title = f"flattened AdamW of {parameters} parameters ({scalars:,} scalars)"
        more, optimizer_cost = planning(title, optimizer, folder / "optimizer", options)
        named, name_goals = loads_of_names(5_000 if options.quick else 50_000, folder / "names", options)
        valued, value_goals = plain_values(5_000 if options.quick else 50_000, folder / "values", options)
    goals = [
        *name_goals,
        *value_goals,
        Goal(text=f"{count:,} tensors, unchanged: caller's time less the copies", figure=cost, bound=40.0, unit="ms"),
        Goal(text=f"{title}: caller's time less the copies", figure=optimizer_cost, bound=15.0, unit="ms"),
    ]
    report = Report(bench="plan", settings=options.settings(), figures=[*figures, *more, *named, *valued], goals=goals)
    log(f"wrote {publish(report, options.folder, out=options.out)}")


def planning(title: str, state: Mapping[str, object], folder: Path, options: Options) -> tuple[list[FigureRow], float]:
    """Rows of one unchanged state, and milliseconds of the caller's time without the copies (medians)."""
    log(title)
    copies = Copies([value for value in state.values() if isinstance(value, torch.Tensor)])
    blocked, planned, copied = list[float](), list[float](), list[float]()
    engine = CheckpointEngine(folder, options.config)
    try:
        first = _save(engine, state)
        for _ in range(options.rounds):
            report = _save(engine, state)
            if not report.plan_hit:
                raise AssertionError("an unchanged state was planned anew")
            blocked.append(report.timings.blocked_secs)
            planned.append(report.timings.plan_secs)
            copied.append(_timed(copies.run))
    finally:
        engine.close_blocking()
    figures = [
        _row(f"{title}: first save(), plan included", [first.timings.blocked_secs]),
        _row(f"{title}: save() until it returns", blocked),
        _row(f"{title}: of it walk, comparison, fingerprint", planned),
        _row(f"{title}: its copies alone", copied),
    ]
    return figures, (Spread.of(blocked).median - Spread.of(copied).median) * 1e3


class Copies:
    """The copies of a save of small host tensors, and nothing else, as the engine makes them: to warm memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        step = 1024  # about what an item takes in the image
        offsets = itertools.accumulate((tensor.nbytes + step for tensor in tensors), initial=0)
        rows = [(offset, tensor.data_ptr(), tensor.nbytes) for offset, tensor in zip(offsets, tensors, strict=False)]
        self._tensors = tensors
        self._memory = page_aligned(sum(tensor.nbytes + step for tensor in tensors))
        self._moves = np.array([row for row in rows if row[2]], np.uint64).reshape(-1, 3)

    def run(self) -> None:
        """Copy every source into the image once."""
        copy_all(torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr(), self._moves)


def _save(engine: CheckpointEngine, state: Mapping[str, object]) -> SaveReport:
    report = engine.save(state).result()
    if report is None:
        raise AssertionError("the save was skipped")
    shutil.rmtree(report.path)
    return report


def _fresh_addresses(count: int, folder: Path, options: Options) -> list[FigureRow]:
    """The same structure, every tensor at a new address: the layout is reused, the descriptors are not."""
    engine = CheckpointEngine(folder, options.config)
    blocked = list[float]()
    try:
        state = tiny_tensors(count)
        _save(engine, state)
        for _ in range(options.rounds):
            state = {name: tensor.clone() for name, tensor in state.items()}  # the old ones live until the new do
            blocked.append(_save(engine, state).timings.blocked_secs)
    finally:
        engine.close_blocking()
    return [_row(f"{count:,} tensors of 64 bytes, all at new addresses: save() until it returns", blocked)]


def _dcp_planning(count: int, state: Mapping[str, object], rounds: int) -> list[FigureRow]:
    """DCP's planner as ``dcp.save`` drives it on one rank, a fresh planner a save."""

    def plan(*, caches: bool) -> None:
        planner = DefaultSavePlanner(enable_plan_caching=caches)
        planner.set_up_planner(dict(state), is_coordinator=True)
        local = planner.create_local_plan()
        plans, _ = planner.create_global_plan([local])
        planner.finish_plan(plans[0])

    rows = []
    for text, caches in (("without its cache", False), ("with its cache, after the first", True)):
        operation = partial(plan, caches=caches)
        operation()
        secs = [_timed(operation) for _ in range(rounds)]
        rows.append(_row(f"{count:,} tensors: DCP's planner, {text}", secs))
    return rows


def _timed(operation: Callable[[], None]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin


def _row(text: str, secs: Sequence[float]) -> FigureRow:
    return FigureRow(text=text, values=Spread.of([value * 1e3 for value in secs]), unit="ms")


if __name__ == "__main__":
    main()
