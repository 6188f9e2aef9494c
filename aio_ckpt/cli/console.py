"""Output of the commands: coloured lines, tables and a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import click

from aio_ckpt.cli.texts import clock_text
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from rich.console import Console

Advance: TypeAlias = Callable[[int, str], None]
"""``advance(done, words)``: shows the total amount done so far, and a text."""
OnProgress: TypeAlias = Callable[[int, int], None]
"""Takes the bytes done so far, and those in all."""
Cells: TypeAlias = tuple[str, ...]
"""One row of a table."""

_PLAIN_LINES = 10
"""Most lines that a plain progress prints."""
_QUIET_SECS = 3.0
"""Seconds after which a plain progress of bytes prints its first line: short work prints none."""
_BAR_CHARS = 20
_PARTS = 1000
"""Steps of a bar that shows bytes."""
_GAP = "  "
"""Space between two columns. No cell has two spaces in a row, so that a script can split lines there."""


class Screen:
    """Output of one command. With ``as_json``, standard output holds one JSON document and nothing more."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stream: TextIO = sys.stderr if as_json else sys.stdout
        self._live: Console | None = None
        """Terminal that shows a bar now."""

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None if the output is no terminal, so that nothing is fitted."""
        return shutil.get_terminal_size().columns if _is_terminal(self._stream) else None

    def line(self, text: str = "", *, style: str = "") -> None:
        """Write one line. It is never wrapped, so that a name can be copied. ``style``: bold, a colour, or both."""
        if self._live is not None:
            from rich.text import Text

            self._live.print(Text(text, style=style), soft_wrap=True)
            return
        if style:
            words = style.split()
            text = click.style(
                text, next((word for word in words if word != "bold"), None), bold="bold" in words or None
            )
        click.echo(text, file=self._stream, color=_is_terminal(self._stream) and _has_colour())

    def json(self, document: Any) -> None:
        """Write ``document`` to standard output, in ASCII: ``json.loads`` restores file names that are no UTF-8.

        NaN and infinities become null.
        """
        import msgspec

        print(json.dumps(_finite(msgspec.to_builtins(document)), indent=2, allow_nan=False))

    def table(
        self,
        titles: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        numbers: Collection[str] = (),
        optional: Sequence[str] = (),
        styles: Sequence[str] = (),
    ) -> None:
        """Write a table. No cell is folded or cut.

        If the table is wider than the terminal, columns are left out, and a line names them. If it still is, the first
        column stands on lines of its own. Rich's table is not used: it folds or cuts at the width of the terminal. For
        20,000 rows it takes 6 s instead of 0.1 s.

        Args:
            numbers: titles of columns that are aligned to the right.
            optional: titles of columns that may be left out, the first one first.
            styles: style of each row.
        """
        left_out: list[str] = []
        columns = [*zip(titles, *rows, strict=True)]
        widths = [max(map(_cells, column)) for column in columns]
        for title in optional:
            if self.width is None or sum(widths) + len(_GAP) * (len(widths) - 1) <= self.width:
                break
            number = [column[0] for column in columns].index(title)
            left_out.append(title)
            del columns[number], widths[number]
        is_stacked = self.width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > self.width
        is_number = [column[0] in numbers for column in columns]
        for row, style in zip(zip(*columns, strict=True), ("bold", *(styles or [""] * len(rows))), strict=True):
            cells = [
                " " * (width - _cells(cell)) + cell if right else cell + " " * (width - _cells(cell))
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ]
            if is_stacked:
                self.line(cells[0].rstrip(), style=style)
                self.line((_GAP + _GAP.join(cells[1:])).rstrip(), style=style)
            else:
                self.line(_GAP.join(cells).rstrip(), style=style)
        if left_out:
            self.line(f"left out at {self.width} columns: {', '.join(left_out)}")

    @contextmanager
    def progress(self, label: str, total: int, *, quiet_secs: float = 0.0) -> Iterator[Advance]:
        """Show the progress towards ``total``: a bar on a terminal, some lines on standard error otherwise.

        The first line comes ``quiet_secs`` after the first call. Any one thread may call the yielded function. Lines
        that are written meanwhile stand above the bar.
        """
        stream = next((each for each in (self._stream, sys.stderr) if _is_terminal(each)), None)
        if stream is None:
            yield _plain_advance(label, total, quiet_secs)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        console = Console(file=stream, highlight=False)
        columns = TextColumn("{task.description}"), BarColumn(_BAR_CHARS), TextColumn("{task.fields[words]}")
        with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
            task = progress.add_task(Text(label).markup, total=max(total, 1), words="")
            self._live = console if stream is self._stream else None
            try:
                yield lambda done, words: progress.update(
                    task, completed=done if total else 1, words=Text(words).markup
                )
            finally:
                self._live = None


def _plain_advance(label: str, total: int, quiet_secs: float) -> Advance:
    said, begin = 0, None

    def advance(done: int, words: str) -> None:
        nonlocal said, begin
        begin = begin or time.monotonic()
        part = _PLAIN_LINES * done // max(total, 1)
        if part > said and time.monotonic() - begin >= quiet_secs:
            said = part
            print(f"{label}: {words}", file=sys.stderr, flush=True)

    return advance


def _finite(value: Any) -> Any:
    """Return a JSON document with null in the place of numbers that JSON lacks: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_terminal(stream: TextIO) -> bool:
    forced = os.environ.get("FORCE_COLOR")
    return stream is not None and stream.isatty() if forced is None else forced != ""


def _has_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _cells(text: str) -> int:
    """Return the number of columns that a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


@contextmanager
def bytes_progress(screen: Screen, label: str) -> Iterator[OnProgress]:
    """Show a progress. The yielded function takes the bytes done so far, and those in all.

    The rate is that since its first call: before it, the command imports torch and looks at the files.
    """
    with screen.progress(label, _PARTS, quiet_secs=_QUIET_SECS) as advance:
        first: tuple[float, int] | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal first
            now = time.monotonic()
            first = first if first and first[1] <= done else (now, done)  # it begins anew if a step was replaced
            secs, moved = now - first[0], done - first[1]
            words = pace_words(done, total, moved / secs if secs > 0 else 0.0)
            advance(_PARTS * done // total if total else _PARTS, words)

        yield on_progress


def counted(begin: int, most: int, total: int, on_progress: OnProgress) -> Callable[[int], None]:
    """Return a function that takes the number of bytes read since its last call, of one checkpoint.

    It reports to ``on_progress``, at once and then: ``begin`` bytes were done before this checkpoint, which has
    ``most``.
    """
    done = 0
    on_progress(begin, total)

    def on_read(more: int) -> None:
        nonlocal done
        done = min(done + more, most)  # a checkpoint that was replaced meanwhile is read again
        on_progress(begin + done, total)

    return on_read


def pace_words(done: int, total: int, rate: float) -> str:
    """Return how much of how much, how fast, and how long it will still take: ``1 GB of 3 GB, 1 GB/s, 2 s left``."""
    said = f"{amount(done)} of {amount(total)}, {amount(rate)}/s"
    return f"{said}, {clock_text((total - done) / rate)} left" if rate else said
