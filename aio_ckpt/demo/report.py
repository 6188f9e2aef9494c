"""What the demo found. Pure: from the events of the runs to figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import msgspec

from aio_ckpt.demo.train import Ended, Event, Idle, Saved, Saving, Started, Stepped
from aio_ckpt.reports import amount

__all__ = ["Continuation", "DemoReport", "Figure", "Run", "compare", "report_on", "rows_of"]

_LABELS = {
    "step_without_saves": "step without saves (undisturbed run)",
    "step_with_saves": "step with saves, save() included",
    "step_while_idle": "  of them while nothing is written",
    "step_while_written": "  of them while a save is written",
    "first_save_blocked": "save() blocked, first of a process",
    "save_blocked": "save() blocked, later ones",
    "save_to_staged": "save to staged",
    "save_to_durable_training": "save to durable, training",
    "save_to_durable_idle": "save to durable, idle",
    "plain_write": "plain write of as many bytes",
    "speed_training": "speed to durable, training",
    "speed_idle": "speed to durable, idle",
    "disk_speed": "the disk's own speed",
    "disk_share_training": "share of the disk, training",
    "disk_share_idle": "share of the disk, idle",
}
"""Figures of the report as the table names them."""


@dataclass(slots=True)
class Run:
    """What one run told."""

    started: Started | None = None
    """How it began."""
    steps: list[Stepped] = field(default_factory=list)
    """Its steps."""
    saving: list[Saving] = field(default_factory=list)
    """Its calls of ``save()``."""
    saved: list[Saved] = field(default_factory=list)
    """Its saves that became durable while it lived."""
    idle: list[Idle] = field(default_factory=list)
    """Saves while nothing trained."""
    digest: str = ""
    """Of the final state; empty if it was killed."""

    def add(self, event: Event) -> None:
        """One more event."""
        match event:
            case Started():
                self.started = event
            case Stepped():
                self.steps.append(event)
            case Saving():
                self.saving.append(event)
            case Saved():
                self.saved.append(event)
            case Idle():
                self.idle.append(event)
            case Ended():
                self.digest = event.digest


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the killed and the resumed run together are the undisturbed one."""

    losses_compared: int
    """Losses held against the undisturbed run's."""
    difference: str | None
    """The first thing that differs; None if every bit is the same."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None


def compare(undisturbed: Run, killed: Run, resumed: Run) -> Continuation:
    """Every loss and the final state, bit for bit."""
    expected = {event.step: event.loss.hex() for event in undisturbed.steps}
    events = [*killed.steps, *resumed.steps]
    different = [event for event in events if expected.get(event.step) != event.loss.hex()]
    if different:
        first = different[0]
        difference = f"loss of step {first.step} is {first.loss.hex()}, undisturbed {expected.get(first.step)}"
    elif {event.step for event in events} != set(expected):
        difference = f"{len({event.step for event in events})} of {len(expected)} steps were trained"
    elif resumed.digest != undisturbed.digest:
        difference = "the losses are equal, the final states are not"
    else:
        return Continuation(losses_compared=len(events), difference=None)
    return Continuation(losses_compared=len(events), difference=difference)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity, measured several times."""

    unit: str
    """``s``, ``B/s`` or ``1`` (a share)."""
    median: float
    """Of all."""
    mean: float
    """Of all."""
    worst: float
    """Longest time, or lowest speed or share."""
    count: int
    """How many."""

    @classmethod
    def of(cls, values: Iterable[float], unit: str = "s") -> Figure | None:
        """None if there are no values."""
        found = list(values)
        if not found:
            return None
        worst = max(found) if unit == "s" else min(found)
        return cls(unit=unit, median=median(found), mean=fmean(found), worst=worst, count=len(found))


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``aio-ckpt demo --json`` prints."""

    seed: int
    """To run the very same again."""
    is_identical: bool
    """Whether the resumed run continued bit for bit."""
    continuation: Continuation
    """What was compared."""
    killed_after: int
    """Last step that the killed run finished."""
    resumed_from: int | None
    """Step that was loaded."""
    load_secs: float
    """How long loading took."""
    bytes_per_save: int
    """Bytes of one checkpoint's data file."""
    write_mode: str
    """``direct``, ``dontcache`` or ``buffered``."""
    plain_write_direct: bool
    """Whether the plain write used O_DIRECT."""
    figures: dict[str, Figure]
    """What was measured, by name."""
    secs: float = 0.0
    """How long the demo took."""
    plot: str | None = None
    """Where the plot is."""


def report_on(undisturbed: Run, killed: Run, resumed: Run, continuation: Continuation, *, seed: int) -> DemoReport:
    """All figures of a finished demo. A process's first save pays for fresh memory, so it is told apart."""
    first, later = [*killed.saved[:1], *resumed.saved[:1]], [*killed.saved[1:], *resumed.saved[1:]]
    saved = [*killed.saved, *resumed.saved]
    steps = [*killed.steps, *resumed.steps]
    last = saved[-1]
    assert resumed.started is not None
    plain = [last.image_bytes / idle.plain_secs for idle in resumed.idle]
    training = [save.image_bytes / save.durable_secs for save in saved]
    idle = [found.saved.image_bytes / found.saved.durable_secs for found in resumed.idle]
    disk = median(plain) if plain else 0.0
    pairs = [found.plain_secs / found.saved.durable_secs for found in resumed.idle]  # moments apart: a fair race
    figures = {
        "step_without_saves": Figure.of(event.secs for event in undisturbed.steps),
        "step_with_saves": Figure.of(_full_steps(killed) + _full_steps(resumed)),
        "step_while_idle": Figure.of(event.secs for event in steps if not event.is_saving),
        "step_while_written": Figure.of(event.secs for event in steps if event.is_saving),
        "first_save_blocked": Figure.of(save.blocked_secs for save in first),
        "save_blocked": Figure.of(save.blocked_secs for save in later),
        "save_to_staged": Figure.of(save.staged_secs for save in later),
        "save_to_durable_training": Figure.of(save.durable_secs for save in saved),
        "save_to_durable_idle": Figure.of(found.saved.durable_secs for found in resumed.idle),
        "plain_write": Figure.of(found.plain_secs for found in resumed.idle),
        "speed_training": Figure.of(training, "B/s"),
        "speed_idle": Figure.of(idle, "B/s"),
        "disk_speed": Figure.of(plain, "B/s"),
        "disk_share_training": Figure.of((speed / disk for speed in training if disk), "1"),
        "disk_share_idle": Figure.of(pairs, "1"),
    }
    return DemoReport(
        seed=seed,
        is_identical=continuation.is_identical,
        continuation=continuation,
        killed_after=killed.steps[-1].step,
        resumed_from=resumed.started.resumed_from,
        load_secs=resumed.started.load_secs,
        bytes_per_save=last.image_bytes,
        write_mode=last.mode,
        plain_write_direct=all(found.plain_direct for found in resumed.idle),
        figures={name: figure for name, figure in figures.items() if figure is not None},
    )


def _full_steps(run: Run) -> list[float]:
    """Time from step to step: with the ``save()`` that followed it, if one did."""
    calls = {call.step: call.secs for call in run.saving}
    return [event.secs + calls.get(event.step, 0.0) for event in run.steps]


def rows_of(report: DemoReport) -> Sequence[Sequence[str]]:
    """The table: what, median, mean, worst, how many."""
    rows = [
        (
            _LABELS[name],
            *(_show(value, figure.unit) for value in (figure.median, figure.mean, figure.worst)),
            str(figure.count),
        )
        for name, figure in report.figures.items()
    ]
    size = amount(report.bytes_per_save)
    return [*rows, (f"bytes of a save ({report.write_mode} I/O)", size, "", "", "")]


def _show(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value / 1e9:.2f} GB/s" if unit == "B/s" else f"{value:.0%}"
