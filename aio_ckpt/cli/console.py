"""Output of the commands: coloured lines, tables and a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Advance", "Cells", "Screen", "printable"]

Advance: TypeAlias = Callable[[int, str], None]
"""``advance(done, words)``: shows the total amount done so far, and a text."""
Cells: TypeAlias = tuple[str, ...]
"""One row of a table."""

_PLAIN_LINES = 10
"""Most lines that a plain progress prints."""
_BAR_CHARS = 20
_GAP = "  "
"""Space between two columns. No cell has two spaces in a row, so that a script can split lines there."""
_CODES = {"bold": "1", "bold red": "1;31", "green": "32"}
"""Escape codes of the terminal by style."""


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
        """Write one line. It is never wrapped, so that a name can be copied."""
        if self._live is not None:
            from rich.text import Text

            self._live.print(Text(text, style=style), soft_wrap=True)
        elif style and _is_terminal(self._stream) and _has_colour():
            print(f"\x1b[{_CODES[style]}m{text}\x1b[0m", file=self._stream, flush=True)
        else:
            print(text, file=self._stream, flush=True)

    def json(self, document: Any) -> None:
        """Write ``document`` to standard output, in ASCII: ``json.loads`` restores file names that are no UTF-8."""
        import msgspec

        print(json.dumps(msgspec.to_builtins(document), indent=2))

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
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        """Show the progress towards ``total``: a bar on a terminal, some lines on standard error otherwise.

        Any one thread may call the yielded function. Lines that are written meanwhile stand above the bar.
        """
        stream = next((each for each in (self._stream, sys.stderr) if _is_terminal(each)), None)
        if stream is None:
            yield _plain_advance(label, total)
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


def _plain_advance(label: str, total: int) -> Advance:
    said = 0

    def advance(done: int, words: str) -> None:
        nonlocal said
        part = _PLAIN_LINES * done // max(total, 1)
        if part > said:
            said = part
            print(f"{label}: {words}", file=sys.stderr, flush=True)

    return advance


def _is_terminal(stream: TextIO) -> bool:
    forced = os.environ.get("FORCE_COLOR")
    return stream.isatty() if forced is None else forced != ""


def _has_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _cells(text: str) -> int:
    """Return the number of columns that a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped: names come from files of others and could steer a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
