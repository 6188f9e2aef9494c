"""``inspect``: what a checkpoint holds. Reads manifests, never tensors."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aio_ckpt.cli.arguments import Directory, json_option, step_dir_option
from aio_ckpt.cli.console import Cells, Screen
from aio_ckpt.cli.texts import extra_text, metrics_text, plural, printable, time_text
from aio_ckpt.errors import MissingNameError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.checkpoint.open import Checkpoint
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage

_KEYS: dict[str, Any] = {
    "name": lambda leaf: leaf.name,
    "bytes": lambda leaf: -leaf.nbytes,
    "dtype": lambda leaf: leaf.dtype or "",
    "shards": lambda leaf: -leaf.shards,
}
"""Sort keys by the value of ``--sort``."""


class LeafRow(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a checkpoint."""

    name: str
    kind: str
    """``tensor`` or ``object``."""
    dtype: str | None
    """Dtype without ``torch.``; None for an object."""
    shape: tuple[int, ...] | None
    """Global shape; None for an object."""
    nbytes: int
    """Length of the whole tensor, or of the stored object, in bytes."""
    shards: int
    """Number of items that hold it."""
    tied_to: str | None
    """Name under which the same item is stored; None unless this is a second name."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of one checkpoint."""

    path: str
    step: int | None
    """Step; None if neither manifest nor directory name holds one."""
    format: str
    """``aio_ckpt 1.0`` or ``plain DCP``."""
    written_by: dict[str, str]
    """Versions of aio_ckpt, torch and python; empty for plain DCP."""
    created_unix: float | None
    """Seconds since 1970; None for plain DCP."""
    world_size: int | None
    """Ranks that wrote it; None for plain DCP."""
    tensor_bytes: int
    """Of all tensors, tied ones once."""
    object_bytes: int
    """Of all objects as stored."""
    metrics: dict[str, float | None]
    """What ``save(metrics=)`` was given; None stands for a value that is not finite."""
    extra: dict[str, Any]
    """What ``save(extra=)`` was given; empty for plain DCP."""
    leaves: tuple[LeafRow, ...]
    """Leaves, sorted by name."""


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """All leaves whose names begin alike."""

    name: str
    """First parts of their names."""
    leaves: int
    nbytes: int
    """Length of all of them, tied ones once, in bytes."""


@click.command("inspect", epilog="Example: aio-ckpt inspect runs/ckpt/step_000000100 --only model --largest 10")
@click.argument("path", type=Directory(may_be_remote=True))
@click.option("--only", multiple=True, metavar="NAME", help="Leaf, branch above leaves, or pattern such as '*.bias'.")
@click.option("--sort", type=click.Choice([*_KEYS]), default="name", show_default=True, help="Order of the leaves.")
@click.option("--depth", type=click.IntRange(1), help="Sum the leaves by the first parts of their names.")
@click.option("--largest", type=click.IntRange(1), help="Show so many leaves (or branches), the largest first.")
@step_dir_option
@json_option
def inspect_command(
    path: Path,
    only: tuple[str, ...],
    sort: str,
    depth: int | None,
    largest: int | None,
    names: StepNames,
    *,
    as_json: bool,
) -> None:
    """Show names, dtypes, shapes and bytes of the checkpoint at PATH.

    Of a root, it is the newest one. Reads no tensor.
    """
    from aio_ckpt.cli.access import call, use_newest

    if depth is not None and sort in ("dtype", "shards"):
        raise click.UsageError(f"--sort {sort} with --depth: a branch has no {sort}; sort by name or bytes")
    screen = Screen(as_json=as_json)
    contents = call(
        lambda storage, executor: use_newest(
            storage, path, names, lambda newest: describe(storage, executor, newest, names)
        )
    )
    leaves = selected(contents.leaves, only)
    rows: list[LeafRow] | list[Branch] = [*(leaves if depth is None else branches_of(leaves, depth))]
    rows.sort(key=_KEYS[sort if largest is None else "bytes"])
    rows = rows[:largest]
    if as_json:
        table = {"leaves": rows} if depth is None else {"leaves": [], "branches": rows}
        screen.json(msgspec.structs.asdict(contents) | table)
        return
    _print_head(contents, screen)
    titles = ("name", "dtype", "shape", "bytes", "shards") if depth is None else ("name", "leaves", "bytes")
    cells = [_leaf_cells(row) if isinstance(row, LeafRow) else _branch_cells(row) for row in rows]
    screen.table(titles, cells, numbers=("bytes", "shards", "leaves"), optional=() if depth else ("shards",))
    if only or largest is not None:
        nbytes = sum(row.nbytes for row in rows if getattr(row, "tied_to", None) is None)
        shown = plural(len(rows), "leaf" if depth is None else "row")
        screen.line(f"{shown} of {plural(len(contents.leaves), 'leaf')}, {amount(nbytes)}")


def _print_head(contents: Contents, screen: Screen) -> None:
    writers = ", ".join(f"{name} {version}" for name, version in contents.written_by.items())
    tensors = sum(leaf.kind == "tensor" for leaf in contents.leaves)
    for label, words in (
        ("path", contents.path),
        ("step", "-" if contents.step is None else str(contents.step)),
        ("format", contents.format),
        ("written", time_text(contents.created_unix)),
        ("by", writers or "-"),
        ("ranks", "-" if contents.world_size is None else str(contents.world_size)),
        ("tensors", f"{tensors:,}, {amount(contents.tensor_bytes)}"),
        ("objects", f"{len(contents.leaves) - tensors:,}, {amount(contents.object_bytes)}"),
        *([("metrics", metrics_text(contents.metrics))] if contents.metrics else []),
        *([("extra", extra_text(contents.extra))] if contents.extra else []),
    ):
        screen.line(f"{label:<8} {printable(words)}")
    screen.line()


def _leaf_cells(leaf: LeafRow) -> Cells:
    shape = "-" if leaf.shape is None else f"({', '.join(map(str, leaf.shape))})"
    if leaf.tied_to is None:
        name, nbytes = leaf.name, f"{leaf.nbytes:,}"
    else:
        name, nbytes = f"{leaf.name} = {leaf.tied_to}", "-"
    return printable(name), leaf.dtype or leaf.kind, shape, nbytes, str(leaf.shards)


def _branch_cells(branch: Branch) -> Cells:
    return printable(branch.name), f"{branch.leaves:,}", f"{branch.nbytes:,}"


# -- contents ---------------------------------------------------------------------------------------


async def describe(storage: Storage, executor: Executor, path: Path, names: StepNames) -> Contents:
    """Describe the checkpoint at ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint.
        CorruptCheckpointError, FormatVersionError: the manifests are damaged, or of a newer version.
    """
    from aio_ckpt.checkpoint.open import open_checkpoint
    from aio_ckpt.runtime.error_notes import naming_checkpoint
    from aio_ckpt.runtime.portal import run_blocking

    with naming_checkpoint(path):
        checkpoint = await open_checkpoint(storage, path, executor=executor)
        leaves = await run_blocking(executor, leaves_of, checkpoint)
    root = checkpoint.root
    once = [leaf for leaf in leaves if leaf.tied_to is None]
    return Contents(
        path=str(path),
        step=checkpoint.step or names.step(path.name),
        format=f"aio_ckpt {root.format[0]}.{root.format[1]}" if root else "plain DCP",
        written_by=root.written_by if root else {},
        created_unix=root.created_unix if root else None,
        world_size=root.world_size if root else None,
        tensor_bytes=sum(leaf.nbytes for leaf in once if leaf.kind == "tensor"),
        object_bytes=sum(leaf.nbytes for leaf in once if leaf.kind == "object"),
        metrics=root.metrics if root else {},
        extra=dict(checkpoint.extra),
        leaves=leaves,
    )


def leaves_of(checkpoint: Checkpoint) -> tuple[LeafRow, ...]:
    """Return a row for each name of a checkpoint."""
    from aio_ckpt.checkpoint.catalog import global_shape

    catalog = checkpoint.catalog
    rows: list[LeafRow] = []
    first_names: dict[tuple[int, ...], str] = {}
    for name, shards in catalog.shards.items():
        first = first_names.setdefault(tuple(map(id, shards)), name)
        shape = global_shape(shards)
        rows.append(
            LeafRow(
                name=name,
                kind="tensor",
                dtype=str(shards[0].dtype).removeprefix("torch."),
                shape=shape,
                nbytes=math.prod(shape) * shards[0].dtype.itemsize,
                shards=len(shards),
                tied_to=first if first != name else None,
            )
        )
    for name, stored in catalog.objects.items():
        first = first_names.setdefault((id(stored),), name)
        tied_to = first if first != name else None
        rows.append(
            LeafRow(name=name, kind="object", dtype=None, shape=None, nbytes=stored.nbytes, shards=1, tied_to=tied_to)
        )
    return tuple(rows)


def selected(leaves: Sequence[LeafRow], only: Sequence[str]) -> tuple[LeafRow, ...]:
    """Return the leaves that ``only`` names: leaves, branches above them, or patterns with ``*``. Empty: all.

    Raises:
        MissingNameError: one of ``only`` selects nothing.
    """
    kept = set[str]()
    for wanted in only:
        found = {leaf.name for leaf in leaves if _is_selected(leaf.name, wanted)}
        if not found:
            close = difflib.get_close_matches(wanted, {part for leaf in leaves for part in _above(leaf.name)}, n=3)
            hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise MissingNameError(f"{wanted!r} is no leaf and no branch of the checkpoint{hint}")
        kept |= found
    return tuple(leaf for leaf in leaves if leaf.name in kept) if only else tuple(leaves)


def _is_selected(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.") or ("*" in wanted and fnmatch.fnmatchcase(name, wanted))


def _above(name: str) -> list[str]:
    """Return a name and the branches above it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def branches_of(leaves: Sequence[LeafRow], depth: int) -> tuple[Branch, ...]:
    """Return the leaves summed by the first ``depth`` parts of their names, in their order."""
    found: dict[str, list[LeafRow]] = {}
    for leaf in leaves:
        found.setdefault(_above(leaf.name)[:depth][-1], []).append(leaf)
    return tuple(
        Branch(name=name, leaves=len(below), nbytes=sum(leaf.nbytes for leaf in below if leaf.tied_to is None))
        for name, below in found.items()
    )
