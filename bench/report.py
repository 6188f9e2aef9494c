"""Results: rows and goals, as JSON and as tables in ``bench/README.md``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from bench.measure import Beside, Contender, Sample, Spread, ratio

__all__ = ["FigureRow", "Goal", "Report", "Row", "machine", "make_row", "publish"]

BENCH = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on one shape."""

    name: str
    """Contender."""
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
    """What."""
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
    """What."""
    values: Spread
    """Over the rounds."""
    unit: str
    """Of the values."""


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


# -- tables ---------------------------------------------------------------------------------------


def _ms(secs: float) -> str:
    return f"{secs * 1e3:.2f}" if secs < 0.01 else f"{secs * 1e3:.1f}" if secs < 0.1 else f"{secs * 1e3:.0f}"


def _range(spread: Spread) -> str:
    return f"{_ms(spread.low)} .. {_ms(spread.high)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _shape_table(rows: Sequence[Row]) -> list[str]:
    head = ["", "median ms", "min .. max", "x limit", "GB/s", "blocked ms", "CPU-s/GB", "first ms", "durable"]
    cells = [
        [
            row.name,
            _ms(row.total.median),
            _range(row.total),
            f"{row.ratio:.2f}",
            f"{row.gb_per_sec:.2f}",
            _ms(row.blocked.median),
            f"{row.cpu_secs_per_gb:.2f}",
            _ms(row.first_secs),
            row.durability,
        ]
        for row in rows
    ]
    return _table(head, cells)


def _beside_table(rows: Sequence[Row]) -> list[str]:
    felt = [(row.name, row.beside) for row in rows if row.beside is not None]
    if not felt:
        return []
    head = [
        "beside it",
        "ticker idle p99 / max ms",
        "p99 / max ms, whole",
        "p99 / max ms, after the call",
        "Python loop keeps",
        "done ms, Python loop beside",
    ]
    cells = [
        [
            name,
            f"{_ms(beside.idle_lag_p99_secs)} / {_ms(beside.idle_lag_max_secs)}",
            f"{_ms(beside.lag_p99_secs)} / {_ms(beside.lag_max_secs)}",
            f"{_ms(beside.lag_p99_after_call_secs)} / {_ms(beside.lag_max_after_call_secs)}",
            f"{beside.python_rate.median:.0%} ({beside.python_rate.low:.0%} .. {beside.python_rate.high:.0%})",
            _ms(beside.python_total_secs.median),
        ]
        for name, beside in felt
    ]
    return ["", *_table(head, cells)]


def _figure(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 3
    return f"{value:.{digits}f} {unit}".strip()


def render(report: Report, described: Mapping[str, object], date: str) -> str:
    """The report as Markdown."""
    about = ", ".join(f"{key} {value}" for key, value in described.items() if value != [])
    options = ", ".join(f"{key}={value}" for key, value in report.settings.items())
    lines = [f"Run of {date}. {about}. Options: {options}."]
    for title, rows in report.shapes.items():
        lines += ["", f"**{title}**", "", *_shape_table(rows), *_beside_table(rows)]
    if report.figures:
        cells = [
            [row.text, _figure(row.values.median, row.unit), f"{row.values.low:.3f} .. {row.values.high:.3f}"]
            for row in report.figures
        ]
        lines += ["", *_table(["", "median", "min .. max"], cells)]
    if report.goals:
        cells = [
            [
                goal.text,
                _figure(goal.figure, goal.unit),
                f"{'>=' if goal.is_floor else '<='} {_figure(goal.bound, goal.unit)}",
                "met" if goal.is_met else "**missed**",
            ]
            for goal in report.goals
        ]
        lines += ["", *_table(["goal", "measured", "promised", ""], cells)]
    return "\n".join(lines) + "\n"


def publish(report: Report, folder: Path, *, out: Path, writes_readme: bool) -> Path:
    """Print the report, write its JSON to ``out``, and with ``writes_readme`` its tables into bench/README.md."""
    described = machine(folder)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    text = render(report, described, date)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{report.bench}-{date}.json"
    goals = [asdict(goal) | {"is_met": goal.is_met} for goal in report.goals]
    document = {"date": date, "machine": described} | asdict(report) | {"goals": goals}
    path.write_text(json.dumps(document, indent=1) + "\n")
    if writes_readme:
        readme = BENCH / "README.md"
        readme.write_text(replace_between(readme.read_text(), report.bench, text))
    return path


def replace_between(document: str, name: str, text: str) -> str:
    """``document`` with ``text`` between the markers of ``name``.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- bench:{name} -->\n", f"<!-- /bench:{name} -->"
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"bench/README.md lacks the markers {begin.strip()} and {end}")
    return before + begin + "\n" + text + "\n" + end + after
