"""Rename: the argument ``rename`` of a load, applied to the names of a checkpoint. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import ConfigError, MissingNameError
from aio_ckpt.message_texts import shown
from aio_ckpt.state.names import branches_of, joined, node_names

Rename: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""Maps the stored name of a leaf to its name in the template; None leaves it out. A mapping may name branches, too."""


def check_rename(rename: object) -> None:
    """Raise ConfigError unless ``rename`` is None, a mapping of names or a function."""
    if isinstance(rename, Mapping):
        odd = [name for name in rename if not isinstance(name, str)]
        odd += [new for new in rename.values() if not isinstance(new, str | None)]
        if not odd:
            return
        raise ConfigError(
            f"rename= holds {shown(odd[0])}: give the stored name and the template's, both as text, or None in the "
            "place of the latter to leave it out"
        )
    if rename is not None and (not callable(rename) or isinstance(rename, type)):
        raise ConfigError(f"rename={shown(rename)}: give a mapping from stored names to the template's, or a function")


def renamed(checkpoint: Checkpoint, rename: Rename, rank: int) -> Checkpoint:
    """Return ``checkpoint`` with its leaves, and the compound tensors of ``rank``, renamed to those of the template.

    A name that is renamed takes the place of one that is not.

    Raises:
        ConfigError: two names become one, or a function returns no text.
        MissingNameError: a mapping names a leaf or branch that is not stored.
    """
    stored = [*sorted(checkpoint.catalog.names()), *checkpoint.compounds(rank)]
    convert = _by_branches(checkpoint, rename, stored) if isinstance(rename, Mapping) else rename
    names: dict[str, str | None] = {}
    taken: dict[str, str] = {}
    for name in stored:
        new = convert(name)
        if new is None:
            names[name] = None
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename={shown(rename)} makes {shown(new)} of {name!r}: return the name in the template")
        if new == name:
            continue
        if new in taken:
            raise ConfigError(f"rename= makes one name, {new!r}, of {taken[new]!r} and {name!r}")
        names[name], taken[new] = new, name
    names |= {name: None for name in stored if name in taken and name not in names}
    return replace(checkpoint, names=names)


def _by_branches(
    checkpoint: Checkpoint, rename: Mapping[str, str | None], stored: Iterable[str]
) -> Callable[[str], str | None]:
    """Return a function that renames by the longest branch that contains the name."""

    def convert(name: str) -> str | None:
        for branch in branches_of(name):
            if branch in rename:
                new = rename[branch]
                if new is None:
                    return None
                rest = name[len(branch) :] if branch else f".{name}"
                return (new + rest).removeprefix("" if new else ".")
        return name

    there = {branch for name in stored for branch in branches_of(name)}
    for branch, new in rename.items():
        if branch not in there:
            hint = "aio-ckpt inspect lists all"
            if new and new in there:
                hint = (
                    f"{new!r} is stored, and rename= maps stored names to the template's: give {{{new!r}: {branch!r}}}"
                )
            raise MissingNameError(f"{checkpoint.path}: rename= names {branch!r}, and nothing is stored there; {hint}")
    return convert


# -- branches --------------------------------------------------------------------------------------


class Branches(NamedTuple):
    """Branches of a checkpoint of which ``rename=`` changes names."""

    counts: Mapping[str, int]
    """Stored leaves at or below each name."""
    left_out: frozenset[str]
    """Names that hold a leaf, or are one, that ``rename=`` leaves out, or whose place another leaf took."""
    held: frozenset[str] | None
    """Names of all containers and leaves that the rank saved; None if the checkpoint notes no containers."""


def branches_of_rank(checkpoint: Checkpoint, rank: int) -> Branches | None:
    """Return the branches of a checkpoint; None if ``rename=`` changes no name of it."""
    if not checkpoint.names:
        return None
    everything = {*map(checkpoint.stored_name, checkpoint.names_of(rank)), *checkpoint.names}
    counts = Counter(branch for name in everything for branch in branches_of(name))
    held = frozenset(node_names(checkpoint.skeleton(rank), rank=rank)) if checkpoint.has_skeleton else None
    left_out = frozenset(
        branch for name, new in checkpoint.names.items() if new is None for branch in branches_of(name)
    )
    return Branches(counts, left_out, held)


def stored_branch(checkpoint: Checkpoint, prefix: str, below: Sequence[str], branches: Branches | None) -> str | None:
    """Return the stored name of the branch that is called ``prefix`` in the template.

    None if the stored leaves are not one whole branch. ``below``: names of the leaves of this rank below ``prefix``.
    """
    if branches is None:
        return prefix
    stored = [checkpoint.stored_name(name) for name in below]
    if stored == below:
        return None if prefix in branches.left_out else prefix
    rests = ["" if name == prefix else name.removeprefix(f"{prefix}.") for name in below]
    branch = stored[0].removesuffix(rests[0]).removesuffix(".") if rests[0] else stored[0]
    moved = {joined(branch, rest) for rest in rests}
    # Keys of a module hold dots, so the common beginning of its names need not be the name of a container.
    is_one = branches.held is None or branch in branches.held
    return branch if is_one and moved == {*stored} and len(moved) == branches.counts[branch] else None
