"""Rename: the argument ``rename`` of a load, applied to the names of a checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checks import shown
from aio_ckpt.errors import ConfigError, MissingNameError

__all__ = ["Rename", "check_rename", "renamed"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""Maps the stored name of a leaf to its name in the template. A mapping may name branches, too."""


def check_rename(rename: object) -> None:
    """Raise ConfigError unless ``rename`` is None, a mapping of names or a function."""
    if isinstance(rename, Mapping):
        odd = [part for pair in rename.items() for part in pair if not isinstance(part, str)]
        if not odd:
            return
        raise ConfigError(f"rename= holds {shown(odd[0])}: give the stored name and the template's, both as text")
    if rename is not None and (not callable(rename) or isinstance(rename, type)):
        raise ConfigError(f"rename={shown(rename)}: give a mapping from stored names to the template's, or a function")


def renamed(checkpoint: Checkpoint, rename: Rename, further: Iterable[str]) -> Checkpoint:
    """Return ``checkpoint`` with its leaves, and ``further`` names of it, renamed to those of the template.

    A name that is renamed takes the place of one that is not.

    Raises:
        ConfigError: two names become one, or a function returns no text.
        MissingNameError: a mapping names a leaf or branch that is not stored.
    """
    stored = [*sorted(checkpoint.catalog.names()), *further]
    convert = _by_branches(checkpoint, rename, stored) if isinstance(rename, Mapping) else rename
    names: dict[str, str | None] = {}
    taken: dict[str, str] = {}
    for name in stored:
        new = convert(name)
        if not isinstance(new, str):
            raise ConfigError(f"rename={shown(rename)} makes {shown(new)} of {name!r}: return the name in the template")
        if new == name:
            continue
        if new in taken:
            raise ConfigError(f"rename= makes one name, {new!r}, of {taken[new]!r} and {name!r}")
        names[name], taken[new] = new, name
    names |= {name: None for name in stored if name in taken and name not in names}
    return replace(checkpoint, names=names)


def _by_branches(checkpoint: Checkpoint, rename: Mapping[str, str], stored: Iterable[str]) -> Callable[[str], str]:
    """Return a function that renames by the longest branch that contains the name."""
    branches = sorted(rename, key=len, reverse=True)

    def convert(name: str) -> str:
        for branch in branches:
            if name == branch:
                return rename[branch]
            if not branch or name.startswith(f"{branch}."):
                rest = name.removeprefix(f"{branch}.") if branch else name
                return f"{rename[branch]}.{rest}" if rename[branch] else rest
        return name

    names = list(stored)
    for branch in branches:
        if not any(name == branch or not branch or name.startswith(f"{branch}.") for name in names):
            raise MissingNameError(
                f"{checkpoint.path}: rename= names {branch!r}, and nothing is stored there; aio-ckpt inspect lists all"
            )
    return convert
