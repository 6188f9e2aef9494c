"""Python programs that tests start: they import what the test imports, whether or not it is installed."""

from __future__ import annotations

import os
import sys
import textwrap


def python(
    source: str, *args: str, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ("-W", "error")
) -> list[str]:
    """The command that runs ``source``, which may be indented."""
    return [*prefix, sys.executable, *options, "-c", textwrap.dedent(source), *args]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment and import path, with ``changes``."""
    return {**os.environ, "PYTHONPATH": import_path(), **changes}


def import_path() -> str:
    """What ``PYTHONPATH`` has to be for a child to find packages where this process does."""
    return os.pathsep.join(os.path.abspath(place) for place in sys.path)
