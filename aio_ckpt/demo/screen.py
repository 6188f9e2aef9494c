"""What the demo needs of a console; the command line has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

__all__ = ["Advance", "Screen"]

Advance: TypeAlias = Callable[[int, str], None]
"""``advance(done, words)``: how much is done in all, and what to say about it."""


class Screen(Protocol):
    """Where the demo writes."""

    def line(self, text: str = "", *, style: str = "") -> None:
        """Write one line."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
        """Write a table; the first ``left`` columns are text, the others numbers."""

    def progress(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Show how far something is."""
