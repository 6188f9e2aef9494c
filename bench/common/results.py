"""Results: rows and goals, printed as tables and kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common.measure import Beside, Contender, Sample, Spread, ratio
from bench.common.tables import render

__all__ = [
    "BENCH",
    "RESULTS",
    "FigureRow",
    "Figures",
    "Goal",
    "Report",
    "Row",
    "figure_rows",
    "kept_in",
    "machine",
    "machine_name",
    "make_row",
    "out_folder",
    "publish",
    "slowest",
]

BENCH = Path(__file__).parents[1]
RESULTS = BENCH / "results"
"""Below it a folder for each machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on one shape."""

    name: str
    """Of the contender, as tables show it."""
    durability: str
    """What is on the disk when it is done."""
    first_secs: float
    """First operation, not in the spread: it maps buffers and plans."""
    total: Spread
    """Seconds from the call until done."""
    ratio: float
    """Median over the limit's median."""
    ratio_by_round: Spread
    """Ratio within each round."""
    gb_per_sec: float
    """Payload over the median."""
    blocked: Spread
    """Seconds that the caller's thread was held."""
    cpu_secs_per_gb: float
    """Median CPU seconds of the process per GB of payload."""
    beside: Beside | None = None
    """What the caller feels, for contenders that work in the background."""


def make_row(
    contender: Contender,
    first: Sample,
    samples: Sequence[Sample],
    limits: Sequence[Sample],
    nbytes: int,
    felt: Beside | None,
) -> Row:
    """Figures of one contender."""
    totals = [sample.total_secs for sample in samples]
    relative, by_round = ratio(totals, [sample.total_secs for sample in limits])
    total = Spread.of(totals)
    return Row(
        name=contender.name,
        durability=contender.durability,
        first_secs=first.total_secs,
        total=total,
        ratio=relative,
        ratio_by_round=by_round,
        gb_per_sec=nbytes / 1e9 / total.median,
        blocked=Spread.of([sample.blocked_secs for sample in samples]),
        cpu_secs_per_gb=Spread.of([sample.cpu_secs for sample in samples]).median / (nbytes / 1e9),
        beside=felt,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that was promised."""

    text: str
    """What is measured, as tables show it."""
    figure: float
    """As measured."""
    bound: float
    """What it must not exceed (or reach, with ``is_floor``)."""
    unit: str = "x"
    """Of both."""
    is_floor: bool = False
    """Larger is better."""

    @property
    def is_met(self) -> bool:
        """Whether the promise held in this run."""
        return self.figure >= self.bound if self.is_floor else self.figure <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """A single figure of the planning and memory benches."""

    text: str
    """What is measured, as tables show it."""
    values: Spread
    """Over the rounds."""
    unit: str
    """Of the values."""


Figures = dict[str, list[float]]
"""Values of each round by ``name, unit``."""


def slowest(ranks: Sequence[Figures]) -> Figures:
    """Return the largest value of all ranks in each round."""
    return {name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def figure_rows(title: str, figures: Figures) -> list[FigureRow]:
    """Return a row for each name, below one title."""
    rows = []
    for text, values in figures.items():
        name, _, unit = text.rpartition(", ")
        rows.append(FigureRow(text=f"{title}: {name}", values=Spread.of(values), unit=unit))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of one bench."""

    bench: str
    """``save``, ``load``, ``plan`` or ``memory``."""
    settings: Mapping[str, object]
    """Options of the run."""
    shapes: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Rows by shape (title)."""
    figures: Sequence[FigureRow] = ()
    """Single figures."""
    goals: Sequence[Goal] = ()
    """What was promised."""


def machine(folder: Path) -> dict[str, object]:
    """The machine, without its name."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release().partition("-")[0],
        "file_system": max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }


def machine_name(described: Mapping[str, Any], ranks: int = 1) -> str:
    """Return the folder of this machine's results: ``2-cores``, or ``4x-nvidia-h200`` with a GPU for each rank."""
    devices = described["devices"]
    name = f"{ranks}x {devices[0]}" if devices else f"{described['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def kept_in(folder: Path, ranks: int = 1) -> Path:
    """Return where ``--write`` keeps results of this machine."""
    return RESULTS / machine_name(machine(folder), ranks)


def out_folder(folder: Path, *, out: Path | None, write: bool, quick: bool, ranks: int = 1) -> Path:
    """Return where the JSON goes: to ``--out``, among the results with ``--write``, else below ``--dir``.

    Figures of ``--quick`` prove nothing, so that they are never kept.
    """
    return out or (kept_in(folder, ranks) if write and not quick else folder / "bench-results")


def publish(report: Report, folder: Path, *, out: Path) -> Path:
    """Print the report as tables, and write it as JSON to ``out``, in place of the last one of the same bench."""
    goals = [asdict(goal) | {"is_met": goal.is_met} for goal in report.goals]
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    document = {"date": date, "machine": machine(folder)} | asdict(report) | {"goals": goals}
    print(render(document))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{report.bench}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
