"""Result of the demo: the comparison of the resumed run bit for bit, and the plot of the losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from aio_ckpt.demo.train import Ended, Event, Saved, Started, Stepped

_GREY, _ORANGE, _BLUE, _GREEN = "#b0b0b0", "#d55e00", "#0072b2", "#009e73"


@dataclass(slots=True)
class Run:
    """Events of one run, in the order in which they were received."""

    started: Started | None = None
    """First event; None if the run ended before it could train."""
    steps: list[Stepped] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    """Saves that became durable before the run ended."""
    digest: str = ""
    """Digest of the final state; empty if the run was killed."""

    def add(self, event: Event) -> None:
        """Add one event."""
        match event:
            case Started():
                self.started = event
            case Stepped():
                self.steps.append(event)
            case Saved():
                self.saved.append(event)
            case Ended():
                self.digest = event.digest


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the killed and the resumed run with the undisturbed one."""

    losses_compared: int
    """Number of losses that were compared."""
    difference: str | None
    """Description of the first difference; None if every bit is the same."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the demo, as ``aio-ckpt demo --json`` prints it."""

    seed: int
    """Seed that repeats this run."""
    is_identical: bool
    """Whether the resumed run continued bit for bit."""
    continuation: Continuation
    killed_after: int
    """Last step that the killed run finished."""
    resumed_from: int | None
    """Step that was loaded; None if none was."""
    secs: float = 0.0
    """Duration of the whole demo."""
    plot: str | None = None
    """Path of the plot; None without matplotlib."""


def compare(undisturbed: Run, killed: Run, resumed: Run) -> Continuation:
    """Compare every loss and the final state, bit for bit."""
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


def report_on(undisturbed: Run, killed: Run, resumed: Run, *, seed: int) -> DemoReport:
    """Return the report of a finished demo."""
    assert resumed.started is not None
    continuation = compare(undisturbed, killed, resumed)
    return DemoReport(
        seed=seed,
        is_identical=continuation.is_identical,
        continuation=continuation,
        killed_after=killed.steps[-1].step,
        resumed_from=resumed.started.resumed_from,
    )


def draw(path: Path, undisturbed: Run, killed: Run, resumed: Run) -> Path | None:
    """Plot the losses of the three runs as a PNG and return its path; None if matplotlib, an extra, is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    runs = (
        (undisturbed, "undisturbed", _GREY, 5, "-"),
        (killed, "killed", _ORANGE, 1.5, "-"),
        (resumed, "resumed", _BLUE, 1.5, "--"),
    )
    for run, label, color, width, style in runs:
        steps, losses = [event.step for event in run.steps], [event.loss for event in run.steps]
        axes.plot(steps, losses, style, color=color, linewidth=width, label=label)
    axes.axvline(killed.steps[-1].step, color=_ORANGE, linestyle=":", label="SIGKILL")
    if resumed.started is not None and resumed.started.resumed_from is not None:
        axes.axvline(resumed.started.resumed_from, color=_BLUE, linestyle=":", label="resumed from here")
    saves = [save.step for save in (*killed.saved, *resumed.saved)]
    losses_by_step = {event.step: event.loss for event in undisturbed.steps}
    axes.plot(saves, [losses_by_step[step] for step in saves], "v", color=_GREEN, label="saved")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
