"""``python -m bench.mirror``: training steps with saves, alone and beside the copies of a mirror.

Without ``--place``, the mirror is in a server that is started on this machine, with half of its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import aio_ckpt
from aio_ckpt import EngineConfig, Mirror, SyncCheckpointEngine
from bench.common import seaweedfs
from bench.common.measure import Spread
from bench.common.options import log
from bench.common.results import FigureRow, Goal, Report, out_folder, publish

__all__ = ["main"]

_TENSORS, _SAVES = 16, 3
State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Means of the steps and saves of one loop, in seconds."""

    step: float
    blocked: float = 0.0
    committed: float = 0.0
    copied: float = 0.0
    """From the commit of the last step until its copy was there."""


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.mirror", description=__doc__)
    parser.add_argument(
        "--place", help="begin of the mirrors' names: a directory, or a place in your bucket (they stay)"
    )
    parser.add_argument("--mb", type=int, default=512, help="size of the state, on the GPU if there is one")
    parser.add_argument("--steps", type=int, default=60, help="steps of a loop, which saves three times")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk of the root")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 16 MB, 2 rounds")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    nbytes, rounds, steps = (16 << 20, 2, 12) if given.quick else (given.mb * 1_000_000, given.rounds, given.steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    state = {f"w{number}": torch.randn(nbytes // 4 // _TENSORS, device=device) for number in range(_TENSORS)}
    with _place(given.place, given.dir) as place, tempfile.TemporaryDirectory(dir=given.dir) as folder:
        step = _train_step(device)
        runs: dict[str, list[_Run]] = {"nothing": [], "saves": [], "saves and copies": []}
        plain: list[float] = []
        for number in range(rounds + 1):
            runs["nothing"].append(_loop(None, state, step, steps))
            with _engine(folder, None) as engine:
                runs["saves"].append(_loop(engine, state, step, steps))
            with _engine(folder, Mirror(f"{place}-{number}", keep_last=1)) as engine:  # each root has its own
                runs["saves and copies"].append(_loop(engine, state, step, steps))
            begun = time.perf_counter()
            aio_ckpt.copy(Path(folder) / f"step_{steps + 1:09d}", f"{place}-plain-{number}")
            plain.append(time.perf_counter() - begun)
            if "://" not in place:
                shutil.rmtree(f"{place}-plain-{number}")
                shutil.rmtree(f"{place}-{number}")
            log(f"round {number} of {rounds}: " + ", ".join(f"{name}: {each[-1]}" for name, each in runs.items()))
    report = Report(
        bench="mirror",
        settings={
            "megabytes": nbytes / 1e6,
            "device": device,
            "steps": steps,
            "rounds": rounds,
            "server": "yours" if given.place else "SeaweedFS on the other half of the cores",
            "quick": given.quick,
        },
        figures=_figures(runs, plain, nbytes),
        goals=_goals(runs),
    )
    out = out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=given.quick)
    log(f"wrote {publish(report, given.dir.absolute(), out=out)}")


@contextlib.contextmanager
def _engine(folder: str, mirror: Mirror | None) -> Iterator[SyncCheckpointEngine]:
    """Open an engine on an empty root, with its memory ready."""
    shutil.rmtree(folder)
    with SyncCheckpointEngine(folder, EngineConfig(keep_last=1, mirror=mirror)) as engine:
        yield engine


def _loop(engine: SyncCheckpointEngine | None, state: State, step: Callable[[], None], steps: int) -> _Run:
    """Train ``steps`` steps, and save three times at equal distances, the last time at the end."""
    if engine is None:
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        return _Run(step=(time.perf_counter() - begun) / steps)
    first = engine.save(state, step=1)
    first.mirrored.result()  # memory, threads and plan are there
    tickets, begun = [], time.perf_counter()
    for number in range(1, steps + 1):
        step()
        if number % (steps // _SAVES) == 0:
            tickets.append(engine.save(state, step=number + 1))
    trained = time.perf_counter() - begun
    reports: list[Any] = [ticket.result() for ticket in tickets]
    committed = time.perf_counter()
    tickets[-1].mirrored.result()
    return _Run(
        step=trained / steps,
        blocked=sum(report.timings.blocked_secs for report in reports) / len(reports),
        committed=sum(report.timings.committed_secs for report in reports) / len(reports),
        copied=time.perf_counter() - committed,
    )


def _train_step(device: str) -> Callable[[], None]:
    """Return a step of some milliseconds: products of matrices, waited for as a loss is."""
    size, count = (8192, 4) if device == "cuda" else (1024, 2)
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)

    def step() -> None:
        for _ in range(count):
            c = a @ b
        float(c[0, 0])

    return step


@contextlib.contextmanager
def _place(given: str | None, folder: Path) -> Iterator[str]:
    if given is not None:
        yield given
        return
    import obstore
    from obstore.store import from_url

    with seaweedfs.on_half_of_the_cores(folder):
        obstore.put(from_url("s3://bucket"), "first", b"")  # makes the bucket
        yield "s3://bucket/mirror"


def _figures(runs: dict[str, list[_Run]], plain: list[float], nbytes: int) -> list[FigureRow]:
    saves, both = runs["saves"][1:], runs["saves and copies"][1:]
    rows = [
        FigureRow(text=f"step with {name}", values=Spread.of([each.step * 1e3 for each in found[1:]]), unit="ms")
        for name, found in runs.items()
    ]
    for name, found in (("", saves), (" beside copies", both)):
        blocked, committed = [each.blocked * 1e3 for each in found], [each.committed for each in found]
        rows.append(FigureRow(text=f"save(){name} blocks", values=Spread.of(blocked), unit="ms"))
        rows.append(FigureRow(text=f"save(){name} is durable after", values=Spread.of(committed), unit="s"))
    rows.append(
        FigureRow(text="last copy, after its commit", values=Spread.of([each.copied for each in both]), unit="s")
    )
    rates = [nbytes / 1e9 / secs for secs in plain[1:]]
    rows.append(FigureRow(text="aio_ckpt.copy, alone", values=Spread.of(rates), unit="GB/s"))
    return rows


def _goals(runs: dict[str, list[_Run]]) -> list[Goal]:
    saves, both = runs["saves"][1:], runs["saves and copies"][1:]

    def median(found: list[_Run], name: str) -> float:
        return Spread.of([getattr(each, name) for each in found]).median

    return [
        Goal(
            text="step beside copies / with saves alone",
            figure=median(both, "step") / median(saves, "step"),
            bound=1.05,
        ),
        Goal(text="save() beside copies / alone", figure=median(both, "blocked") / median(saves, "blocked"), bound=1.1),
    ]


if __name__ == "__main__":
    main()
