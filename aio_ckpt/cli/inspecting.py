"""``inspect``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aio_ckpt.cli.arguments import Directory, example, json_option, step_dir_option
from aio_ckpt.cli.console import Cells, Screen, extra_text, metrics_text, plural, printable, time_text
from aio_ckpt.format.names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.cli.work.contents import Branch, Contents, LeafRow

_KEYS: dict[str, Any] = {
    "name": lambda leaf: leaf.name,
    "bytes": lambda leaf: -leaf.nbytes,
    "dtype": lambda leaf: leaf.dtype or "",
    "shards": lambda leaf: -leaf.shards,
}
"""Sort keys by the value of ``--sort``."""


@click.command("inspect", epilog=example("aio-ckpt inspect runs/ckpt --only model --largest 10"))
@click.argument("path", type=Directory())
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
    from aio_ckpt.cli.work import call
    from aio_ckpt.cli.work.contents import branches_of, describe_newest, selected

    if depth is not None and sort in ("dtype", "shards"):
        raise click.UsageError(f"--sort {sort} with --depth: a branch has no {sort}; sort by name or bytes")
    screen = Screen(as_json=as_json)
    contents = call(lambda storage, executor: describe_newest(storage, executor, path, names))
    leaves = selected(contents.leaves, only)
    rows: list[LeafRow] | list[Branch] = [*(leaves if depth is None else branches_of(leaves, depth))]
    rows.sort(key=_KEYS[sort if largest is None else "bytes"])
    rows = rows[:largest]
    if as_json:
        document = contents.as_document()
        if depth is not None:
            document |= {"leaves": [], "branches": rows}
        screen.json(document if depth is not None else document | {"leaves": rows})
        return
    _tell_head(contents, screen)
    titles, cells = _branch_table(rows) if depth is not None else _leaf_table(rows)  # type: ignore[arg-type]
    screen.table(titles, cells, numbers=("bytes", "shards", "leaves"), optional=() if depth else ("shards",))
    if only or largest is not None:
        nbytes = sum(row.nbytes for row in rows if getattr(row, "tied_to", None) is None)
        shown = plural(len(rows), "leaf" if depth is None else "row")
        screen.line(f"{shown} of {plural(len(contents.leaves), 'leaf')}, {amount(nbytes)}")


def _tell_head(contents: Contents, screen: Screen) -> None:
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


def _leaf_table(leaves: list[LeafRow]) -> tuple[Cells, list[Cells]]:
    return ("name", "dtype", "shape", "bytes", "shards"), [*map(_leaf_cells, leaves)]


def _leaf_cells(leaf: LeafRow) -> Cells:
    shape = "-" if leaf.shape is None else f"({', '.join(map(str, leaf.shape))})"
    if leaf.tied_to is None:
        name, nbytes = leaf.name, f"{leaf.nbytes:,}"
    else:
        name, nbytes = f"{leaf.name} = {leaf.tied_to}", "-"
    return printable(name), leaf.dtype or leaf.kind, shape, nbytes, str(leaf.shards)


def _branch_table(branches: list[Branch]) -> tuple[Cells, list[Cells]]:
    rows = [(printable(branch.name), f"{branch.leaves:,}", f"{branch.nbytes:,}") for branch in branches]
    return ("name", "leaves", "bytes"), [*rows]
