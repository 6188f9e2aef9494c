"""``python -m bench.step_time``: how much longer a training step is while a save drains.

A stack of linear layers trains with AdamW; its optimizer is guarded, its steps are timed by CUDA events (without a GPU:
by the host's clock, as a dry run). A variant trains alone for a while, then saves and trains on until the checkpoint is
durable, several times; each save is compared with the steps right before it. The variants take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from bench.common.measure import Spread
from bench.common.options import log
from bench.common.results import machine, out_folder

__all__ = ["main"]

_AHEAD_STEPS = 2
"""How far the host may be ahead of the device, as in a loop that looks at its loss."""
_SETTLE_STEPS = 10
"""Steps after a save that belong to nothing: the checkpoint before is deleted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command line."""

    folder: Path
    """File system to save to."""
    gigabytes: float
    """Of the state: parameters and two moments."""
    batch: int
    """Rows of a batch."""
    rounds: int
    """Turns of each variant."""
    saves: int
    """Saves a turn."""
    steps: int
    """Steps before each save, the baseline."""
    variants: tuple[str, ...]
    """Names in :data:`VARIANTS`."""
    device: torch.device
    """Where it trains."""
    out: Path
    """Where the JSON goes."""


VARIANTS: dict[str, EngineConfig] = {
    "no cap": EngineConfig(keep_last=1),
    "no cap, thread_nice=0": EngineConfig(keep_last=1, thread_nice=0, thread_ioprio=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One save and the steps beside it."""

    baseline_secs: float
    """Median step before it."""
    median_secs: float
    """Median step from the call of ``save()`` until durable."""
    worst_secs: float
    """Longest of them."""
    steps: int
    """How many there were."""
    lost_secs: float
    """What they took beyond as many steps of the baseline."""
    blocked_secs: float
    """How long ``save()`` kept the host."""
    durable_secs: float
    """From the call until committed."""

    @property
    def share(self) -> float:
        """Median step as a share of the baseline."""
        return self.median_secs / self.baseline_secs


class Training:
    """A stack of square linear layers with AdamW; ``secs`` of each step, by events of the device."""

    def __init__(self, gigabytes: float, batch: int, device: torch.device) -> None:
        width = 8192 if device.type == "cuda" else 512
        layers = max(1, math.ceil(gigabytes * 1e9 / (12 * width * width)))
        torch.manual_seed(0)
        self.device = device
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._batch = torch.randn(batch, width, device=device)
        self._ends: list[Any] = []

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self._ends)

    def step(self) -> None:
        """One step; returns while the device may be two behind."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(self._batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            self._ends.append(end)
            if self.steps > _AHEAD_STEPS:
                self._ends[-1 - _AHEAD_STEPS].synchronize()
        else:
            self._ends.append(time.perf_counter())

    def secs(self, first: int, stop: int) -> list[float]:
        """Length of the steps ``first`` to ``stop - 1``; waits for the device."""
        ends = self._ends[first - 1 : stop]
        if self.device.type == "cuda":
            ends[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(ends)]
        return [b - a for a, b in itertools.pairwise(ends)]


def main() -> None:
    """Run the bench, print its rows, write the JSON."""
    options = _parse()
    training = Training(options.gigabytes, options.batch, options.device)
    folder = Path(tempfile.mkdtemp(prefix="aio_ckpt-step-time-", dir=options.folder))
    drains: dict[str, list[list[Drain]]] = {name: [] for name in options.variants}
    try:
        for number in range(options.rounds):
            for name in options.variants:
                log(f"round {number}: {name}")
                drains[name].append(_turn(training, folder / f"{number}-{name}", VARIANTS[name], options))
        described = machine(folder)
    finally:
        shutil.rmtree(folder)
    state_bytes = sum(3 * parameter.nbytes for parameter in training.model.parameters())
    rows = [_row(name, turns, state_bytes) for name, turns in drains.items()]
    print("\n".join(_table(rows)))
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "step-time.json"
    settings = {"device": str(options.device), "state_bytes": state_bytes, "batch": options.batch}
    settings |= {"rounds": options.rounds, "saves": options.saves, "baseline_steps": options.steps}
    every = {name: [[asdict(drain) for drain in turn] for turn in turns] for name, turns in drains.items()}
    document = {"date": date, "machine": described, "bench": "step_time", "settings": settings}
    path.write_text(json.dumps(document | {"rows": rows, "drains": every}, indent=1, default=asdict) + "\n")
    log(f"wrote {path}")


def _parse() -> Options:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.step_time", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to save to")
    parser.add_argument("--gb", type=float, help="of the state (default 8.5; 0.05 without a GPU)")
    parser.add_argument("--batch", type=int, help="rows of a batch (default 8192; 16 without a GPU)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant")
    parser.add_argument("--saves", type=int, default=8, help="saves a turn, after one that warms up")
    parser.add_argument("--steps", type=int, default=60, help="steps before each save, its baseline")
    parser.add_argument("--variants", default="no cap", help="of " + "; ".join(VARIANTS))
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu", help="where it trains")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one turn, two saves")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    # Names hold commas themselves: every name that stands in the text was asked for.
    left, variants = given.variants, list[str]()
    for name in sorted(VARIANTS, key=len, reverse=True):
        if name in left:
            variants.append(name)
            left = left.replace(name, "")
    if left.strip(", "):
        parser.error(f"no such variants: {left}")
    device = torch.device(given.device)
    small = device.type == "cpu"
    return Options(
        folder=given.dir.absolute(),
        gigabytes=given.gb or (0.05 if small else 8.5),
        batch=given.batch or (16 if small else 8192),
        rounds=1 if given.quick else given.rounds,
        saves=2 if given.quick else given.saves,
        steps=min(given.steps, 10) if given.quick else given.steps,
        variants=tuple(name for name in VARIANTS if name in variants),
        device=device,
        out=out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=given.quick),
    )


def _turn(training: Training, root: Path, config: EngineConfig, options: Options) -> list[Drain]:
    """One engine: a save that warms up, then the ones that count."""
    with SyncCheckpointEngine(root, config) as engine:
        engine.guard(training.optimizer)
        training.step()
        drains = [_drain(training, engine, options.steps) for _ in range(options.saves + 1)]
    shutil.rmtree(root)
    for drain in drains[1:]:
        log(f"    x {drain.share:.3f} in {drain.steps} steps, durable {drain.durable_secs:.2f} s")
    return drains[1:]


def _drain(training: Training, engine: SyncCheckpointEngine, steps: int) -> Drain:
    for _ in range(_SETTLE_STEPS):
        training.step()
    alone = training.steps
    for _ in range(steps):
        training.step()
    began = training.steps
    ticket = engine.save({"model": training.model, "optimizer": training.optimizer})
    training.step()
    while not ticket.done():
        training.step()
    ended = training.steps
    report = ticket.result()
    if report is None:
        raise AssertionError("the save was skipped")
    baseline = statistics.median(training.secs(alone + 1, began))
    beside = training.secs(began, ended)
    return Drain(
        baseline_secs=baseline,
        median_secs=statistics.median(beside),
        worst_secs=max(beside),
        steps=len(beside),
        lost_secs=sum(beside) - len(beside) * baseline,
        blocked_secs=report.timings.blocked_secs,
        durable_secs=report.timings.committed_secs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant, over all its saves."""

    name: str
    """Of the variant, as tables show it."""
    baseline_secs: Spread
    """Median step without a save."""
    share: Spread
    """Median step of a drain as a share of the baseline before it."""
    first_share: float
    """Median of it over the first saves of the turns."""
    worst: Spread
    """Longest step of a drain as a share of the baseline."""
    lost_secs: Spread
    """Training time lost a save."""
    blocked_secs: Spread
    """Host time of ``save()``."""
    durable_secs: Spread
    """Until committed."""
    gb_per_sec: float
    """State over the median of that."""


def _row(name: str, turns: Sequence[Sequence[Drain]], state_bytes: int) -> Row:
    drains = [drain for turn in turns for drain in turn]
    durable = Spread.of([drain.durable_secs for drain in drains])
    return Row(
        name=name,
        baseline_secs=Spread.of([drain.baseline_secs for drain in drains]),
        share=Spread.of([drain.share for drain in drains]),
        first_share=statistics.median(turn[0].share for turn in turns),
        worst=Spread.of([drain.worst_secs / drain.baseline_secs for drain in drains]),
        lost_secs=Spread.of([drain.lost_secs for drain in drains]),
        blocked_secs=Spread.of([drain.blocked_secs for drain in drains]),
        durable_secs=durable,
        gb_per_sec=state_bytes / 1e9 / durable.median,
    )


def _table(rows: Sequence[Row]) -> list[str]:
    head = ["", "step alone ms", "median step in the drain, x", "min .. max", "first save, x", "worst step, x"]
    head += ["lost ms", "save() blocks ms", "durable s", "GB/s"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in rows:
        cells = [
            row.name,
            f"{row.baseline_secs.median * 1e3:.2f}",
            f"{row.share.median:.3f}",
            f"{row.share.low:.3f} .. {row.share.high:.3f}",
            f"{row.first_share:.3f}",
            f"{row.worst.median:.2f}",
            f"{row.lost_secs.median * 1e3:.1f}",
            f"{row.blocked_secs.median * 1e3:.1f}",
            f"{row.durable_secs.median:.2f}",
            f"{row.gb_per_sec:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
