"""Type of the command line's paths: a path of this machine, or its ``file:`` URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from aio_ckpt.checks import local_name

__all__ = ["LocalPath"]


class LocalPath(click.Path):
    """A ``click.Path`` that takes a ``file:`` URL and refuses every other URL by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Return the path. Fails as a usage error of click."""
        try:
            name = local_name(os.fspath(value))
        except ValueError as error:
            self.fail(f"{value}: {error}", param, ctx)
        return super().convert(name, param, ctx)
