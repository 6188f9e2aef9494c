"""Progress bars for loads, reads and saves, in a terminal and in a notebook.

    engine.load(state, progress=aio_ckpt.progress.rich())
    report = aio_ckpt.progress.rich("last save").wait(engine.save(state))

``tqdm()`` in the place of ``rich()`` gives the bar of that library. Each imports its library when it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from aio_ckpt.errors import StallError
from aio_ckpt.reports import Progress, SaveReport

if TYPE_CHECKING:
    from rich.console import Console

    from aio_ckpt.ticket import SaveTicket

__all__ = ["ProgressBar", "rich", "tqdm"]

_INTERVAL_SECS = 0.1
"""Time between two looks at a ticket."""


class _Display(Protocol):
    """A bar on the screen."""

    def show(self, now: Progress, text: str) -> None:
        """Show the progress, with ``text`` in front."""

    def close(self) -> None:
        """Leave the bar as it is, and give the screen back."""


class ProgressBar:
    """Bar for ``load(progress=)``, ``read(progress=)`` and tickets: one at a time, any number after each other.

    The bar appears once the number of bytes is known, and ends with the load, the read or the save.
    """

    def __init__(self, label: str, new_display: Callable[[Progress, str], _Display]) -> None:
        """``label`` stands in front of the stage. ``new_display`` opens a bar, for a first progress and its text."""
        self._label = label
        self._new_display = new_display
        self._display: _Display | None = None

    def __call__(self, now: Progress) -> None:
        """Show ``now``. Any thread may call this."""
        text = f"{self._label} {now.stage}".strip()
        if self._display is not None:
            self._display.show(now, text)
        elif now.bytes_total:
            self._display = self._new_display(now, text)
        if now.has_ended:
            self.close()

    def wait(self, ticket: SaveTicket) -> SaveReport | None:
        """Show the save until it is finished. Returns and raises what ``ticket.result()`` does."""
        try:
            while not ticket.done():
                self(ticket.progress)
                with contextlib.suppress(StallError):  # the interval is over
                    ticket.exception(_INTERVAL_SECS)
            self(ticket.progress)
        finally:
            self.close()
        return ticket.result()

    def close(self) -> None:
        """Leave the bar as it is, and give the screen back. Does nothing if there is none."""
        display, self._display = self._display, None
        if display is not None:
            display.close()


def rich(label: str = "", *, console: Console | None = None) -> ProgressBar:
    """Return a bar of the library rich.

    In a notebook, rich needs the package ``ipywidgets``. In a pipe or a file, it writes one line at the end.

    Args:
        label: text in front of the stage.
        console: where to show the bar; None for standard output.
    """
    return ProgressBar(label, functools.partial(_RichDisplay, console=console))


def tqdm(label: str = "", **options: Any) -> ProgressBar:
    """Return a bar of the library tqdm, which chooses between terminal and notebook itself.

    Args:
        label: text in front of the stage.
        options: passed to ``tqdm.auto.tqdm``: ``file``, ``position``, ``leave``, ``ncols`` and others.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as new_bar
    except ImportError as error:
        raise ImportError("aio_ckpt.progress.tqdm() needs tqdm: pip install tqdm, or use rich()") from error
    return ProgressBar(label, functools.partial(_TqdmDisplay, new_bar=new_bar, options=options))


class _RichDisplay:
    def __init__(self, now: Progress, text: str, *, console: Console | None) -> None:
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=30, finished_style="green"),  # rich's own is grey where there are 16 colours
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._progress = progress.Progress(*columns, console=console)
        self._task = self._progress.add_task(text, total=now.bytes_total, completed=now.bytes_done)
        self._progress.start()

    def show(self, now: Progress, text: str) -> None:
        self._progress.update(self._task, description=text, total=now.bytes_total, completed=now.bytes_done)

    def close(self) -> None:
        self._progress.refresh()  # stop() alone does not in a notebook
        self._progress.stop()


class _TqdmDisplay:
    def __init__(self, now: Progress, text: str, *, new_bar: Callable[..., Any], options: dict[str, Any]) -> None:
        shown = {"unit": "B", "unit_scale": True, **options}
        self._bar = new_bar(desc=text, total=now.bytes_total, initial=now.bytes_done, **shown)

    def show(self, now: Progress, text: str) -> None:
        self._bar.total = now.bytes_total
        self._bar.set_description(text, refresh=False)
        self._bar.update(now.bytes_done - self._bar.n)  # less than 0 if another checkpoint is read
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
