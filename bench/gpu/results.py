"""From the phases that ranks reported to rows, tables, goals and JSON."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.common.results import kept_in, machine
from bench.gpu.contenders import SAVERS
from bench.gpu.guests import GUESTS
from bench.gpu.loads import LOADERS
from bench.gpu.options import GpuOptions
from bench.gpu.raw import RAW
from bench.gpu.supervise import Event, Outcome
from bench.gpu.tables import render

__all__ = ["Document", "Row", "row_of", "shares"]

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on one state; figures of the slowest rank."""

    contender: str
    """Key of the contender, as ``--only`` takes it."""
    title: str
    """Name of the contender in tables."""
    setting: str
    """Its settings, as tables show them."""
    durability: str
    """What is on the disk when it says that it is done."""
    shape: str
    """Of the state."""
    gb: float
    """As asked for by ``--gb``."""
    tensors: int
    """Of one rank."""
    nbytes: int
    """Of one rank."""
    status: str
    """``ok``, ``not run`` or ``failed``; what was measured before a failure is kept."""
    error: str
    """Why something is missing; empty if nothing is."""
    figures: Figures
    """Names end in their unit; see :func:`figures_of`."""
    every: Sequence[Figures] = ()
    """Tokens a second by steps between saves."""
    ranks: Sequence[Outcome] = field(default=(), repr=False)
    """What each rank reported."""

    def summary(self) -> str:
        """For the log."""
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.status} {self.error} {shown}".replace("  ", " ")


def _about(contender: str) -> tuple[str, str, str]:
    if contender == RAW:
        return "limits", "O_DIRECT by 4 threads; one pinned copy", "fdatasync"
    if contender in LOADERS:
        return LOADERS[contender].title, LOADERS[contender].setting, "-"
    kind = (SAVERS | GUESTS)[contender]
    return kind.title, kind.setting, kind.durability


def row_of(contender: str, shape: str, gb: float, ranks: Sequence[Outcome]) -> Row:
    """The ranks' reports in one row."""
    statuses = {outcome.status for outcome in ranks}
    status = "ok" if statuses == {"ok"} else "failed" if "failed" in statuses else "not run"
    # The rank that failed first says why; the others only that another did.
    errors = sorted({outcome.error for outcome in ranks if outcome.error}, key=lambda text: "another rank" in text)
    ready = [event for outcome in ranks for event in outcome.events if event["event"] == "ready"]
    title, setting, durability = _about(contender)
    nbytes = max((int(event["nbytes"]) for event in ready), default=0)
    figures = merge([figures_of(outcome) for outcome in ranks])
    return Row(
        contender=contender,
        title=title,
        setting=setting,
        durability=durability,
        shape=shape,
        gb=gb,
        tensors=max((int(event["tensors"]) for event in ready), default=0),
        nbytes=nbytes,
        status=status,
        error=errors[0] if errors else "",
        figures=figures,
        every=_every(ranks),
        ranks=list(ranks),
    )


def shares(figures: Figures, raw: Sequence[Figures]) -> Figures:
    """Of the raw disk and of one large pinned copy; staged late means a small share of the link.

    ``raw``: figures of the limits for the same state, as often as they were measured in the run.
    """
    found: Figures = {}
    limits = {name: statistics.mean(r[name] for r in raw if name in r) for name in {name for r in raw for name in r}}
    moved = figures.get("durable_secs", figures.get("load_secs"))
    if moved and limits.get("disk_secs"):
        found["disk_share"] = limits["disk_secs"] / moved
    if figures.get("staged_secs") and limits.get("copy_secs"):
        found["link_share"] = limits["copy_secs"] / figures["staged_secs"]
    return found


def _every(ranks: Sequence[Outcome]) -> list[Figures]:
    found: dict[int, Figures] = {}
    for outcome in ranks:
        for event in of_kind(outcome.events, "every"):
            slowest = found.get(event["every"])
            if slowest is None or event["tokens_per_sec"] < slowest["tokens_per_sec"]:
                found[event["every"]] = {
                    name: value for name, value in event.items() if name not in ("event", "at_secs")
                }
    return [found[every] for every in sorted(found)]


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    """Events of one kind."""
    return [event for event in events if event["event"] == kind]


def figures_of(outcome: Outcome) -> Figures:
    """Of one rank: medians over the repeats; only what was measured."""
    events = outcome.events
    figures: Figures = {}
    ready = of_kind(events, "ready")
    gigabytes = ready[0]["nbytes"] / 1e9 if ready else 1.0
    alone, beside, loads = of_kind(events, "alone"), of_kind(events, "beside"), of_kind(events, "load")
    if opened := of_kind(events, "open"):
        figures["open_secs"] = opened[0]["secs"]
    if alone:
        figures |= {"first_blocked_secs": alone[0]["blocked_secs"], "first_durable_secs": alone[0]["durable_secs"]}
    if ready and not loads:
        figures["step_secs"] = ready[0]["step_secs"]
    # Where the time did not suffice for more saves alone, or they would block to the end, those beside training count.
    if later := alone[1:] or beside:
        for name in ("blocked_secs", "staged_secs", "synced_secs", "done_secs", "durable_secs"):
            if values := [event[name] for event in later if name in event]:
                figures[name] = statistics.median(values)
        figures["cpu_secs_per_gb"] = statistics.median(event["cpu_secs"] for event in later) / gigabytes
    figures |= _beside(beside)
    if loads:
        figures["load_first_secs"] = loads[0]["secs"]
        figures["load_secs"] = statistics.median(event["secs"] for event in loads[1:] or loads)
        figures["cpu_secs_per_gb"] = statistics.median(event["cpu_secs"] for event in loads) / gigabytes
    if disk := of_kind(events, "disk"):
        figures["disk_secs"] = statistics.median(event["secs"] for event in disk[1:] or disk)
    if copies := of_kind(events, "copy"):
        figures["copy_secs"] = copies[0]["secs"] * gigabytes * 1e9 / copies[0]["nbytes"]
    figures |= {f"{name}_bytes": float(value) for name, value in outcome.peaks.items()}
    if grown := of_kind(events, "device"):
        figures.setdefault("device_bytes", grown[0]["growth_bytes"])
    return figures


def _beside(beside: Sequence[Event]) -> Figures:
    """What a save costs the training beside it."""
    if not beside:
        return {}
    lost = [sum(e["steps_secs"]) - len(e["steps_secs"]) * statistics.mean(e["base_secs"]) for e in beside]
    # Steps of the drain: neither the one that held the call nor the last, which came after the end.
    drains = [
        statistics.median(e["steps_secs"][1:-1]) / statistics.median(e["base_secs"])
        for e in beside
        if len(e["steps_secs"]) > MIN_DRAIN_STEPS
    ]
    figures = {
        "lost_secs": statistics.median(lost),
        "lost_low_secs": min(lost),
        "lost_high_secs": max(lost),
        "worst_step_secs": max(max(e["steps_secs"]) for e in beside),
        "blocked_beside_secs": statistics.median(e["blocked_secs"] for e in beside),
    }
    return figures | ({"drain_step_ratio": statistics.median(drains)} if drains else {})


MIN_DRAIN_STEPS = 6


def merge(ranks: Sequence[Figures]) -> Figures:
    """The slowest rank's of each figure; memory of the host is shared, so each rank gets its part."""
    merged = {
        name: max(rank[name] for rank in ranks if name in rank) for name in dict.fromkeys(k for r in ranks for k in r)
    }
    if "system_bytes" in merged:
        merged["system_bytes"] /= len(ranks)
    return merged


class Document:
    """The results of one run, written anew after each row."""

    def __init__(self, options: GpuOptions, world: int) -> None:
        self._options = options
        self._rows: list[Row] = []
        self._date = datetime.now(UTC).strftime("%Y-%m-%d")
        self._world = world
        self._machine = machine(options.folder)
        label = options.label or "-".join((options.mode, *options.shapes))
        self.path = (options.out or kept_in(options.folder, world)) / f"gpu-{label}.json"

    def add(self, row: Row) -> None:
        """One more."""
        self._rows.append(row)

    def _shared(self, row: Row) -> Row:
        """With its shares of what the limits were for its state, before it and after."""
        raw = [one.figures for one in self._rows if (one.contender, one.shape, one.gb) == (RAW, row.shape, row.gb)]
        return replace(row, figures=row.figures | shares(row.figures, raw))

    def as_json(self) -> dict[str, Any]:
        """The whole document."""
        return {
            "bench": "gpu",
            "date": self._date,
            "machine": self._machine,
            "ranks": self._world,
            "settings": self._options.settings(),
            "rows": [asdict(self._shared(row)) for row in self._rows],
        }

    def render(self) -> str:
        """As Markdown."""
        return render(self.as_json())

    def write(self) -> Path:
        """To ``--out``; a run that is cut off leaves what it had."""
        self._machine = machine(self._options.folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rounded(self.as_json()), indent=1)
        # A list of numbers takes a line, not a line each.
        text = re.sub(r"\[\s+((?:[-\d.e]+,?\s+)+)\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
        self.path.write_text(text + "\n")
        return self.path


def rounded(value: Any) -> Any:
    """Numbers to six digits after the point: microseconds."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
