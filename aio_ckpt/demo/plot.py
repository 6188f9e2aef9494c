"""The demo's plot: losses, and step times with the saves marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aio_ckpt.demo.report import Run

__all__ = ["draw"]

_GREY, _ORANGE, _BLUE, _GREEN = "#b0b0b0", "#d55e00", "#0072b2", "#009e73"


def draw(path: Path, undisturbed: Run, killed: Run, resumed: Run) -> Path | None:
    """Write the PNG; None if matplotlib, an extra, is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, times = figure.subplots(2, 1, sharex=True)
    _draw_losses(losses, undisturbed, killed, resumed)
    _draw_times(times, undisturbed, killed, resumed)
    figure.savefig(path, dpi=120)
    return path


def _draw_losses(axes: Any, undisturbed: Run, killed: Run, resumed: Run) -> None:
    runs = (
        (undisturbed, "undisturbed", _GREY, 5, "-"),
        (killed, "killed", _ORANGE, 1.5, "-"),
        (resumed, "resumed", _BLUE, 1.5, "--"),
    )
    for run, label, color, width, style in runs:
        steps, values = [event.step for event in run.steps], [event.loss for event in run.steps]
        axes.plot(steps, values, style, color=color, linewidth=width, label=label)
    _mark(axes, killed, resumed)
    axes.set_ylabel("loss (nats a byte)")
    axes.legend()


def _draw_times(axes: Any, undisturbed: Run, killed: Run, resumed: Run) -> None:
    runs = ((undisturbed, "undisturbed", _GREY), (killed, "killed", _ORANGE), (resumed, "resumed", _BLUE))
    for run, label, color in runs:
        steps, times = [event.step for event in run.steps], [event.secs * 1e3 for event in run.steps]
        axes.plot(steps, times, ".-", color=color, linewidth=0.8, markersize=4, label=label)
    calls = [*killed.saving, *resumed.saving]
    steps, times = [call.step for call in calls], [call.secs * 1e3 for call in calls]
    axes.plot(steps, times, "v", color=_GREEN, label="save() blocked")
    _mark(axes, killed, resumed)
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.set_ylabel("milliseconds")
    axes.set_xlabel("step")
    axes.legend(loc="upper left", ncols=3)


def _mark(axes: Any, killed: Run, resumed: Run) -> None:
    axes.axvline(killed.steps[-1].step, color=_ORANGE, linestyle=":", label="SIGKILL")
    if resumed.started is not None and resumed.started.resumed_from is not None:
        axes.axvline(resumed.started.resumed_from, color=_BLUE, linestyle=":", label="resumed from here")
