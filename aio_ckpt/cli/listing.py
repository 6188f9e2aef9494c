"""``ls`` and ``du``: the checkpoints of a root, and what it holds on the disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aio_ckpt.cli.arguments import check_root, json_option, root_argument, step_dir_option
from aio_ckpt.cli.console import Cells, Screen
from aio_ckpt.cli.texts import age_text, extra_text, metrics_text, plural, printable, time_text
from aio_ckpt.config import KeepBest
from aio_ckpt.errors import ConfigError
from aio_ckpt.format.root_names import ABANDONED_DIR, CORRUPT_DIR, PENDING_DIR, TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.cli.root_rows import RootRow, RootTable
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage

_EXTRA_CHARS = 40
"""Width of the column ``extra`` of ``ls``, in characters."""
_TITLES = ("directory", "bytes", "ranks", "age", "marks", "metrics", "written", "torch", "extra")
_OPTIONAL = ("extra", "torch", "written", "metrics")
"""Columns of ``ls`` that a narrow terminal leaves out, the first one first."""


def best_rule(_: click.Context, __: click.Parameter, value: str | None) -> KeepBest | None:
    """Return the rule of an option such as ``--best acc:max``."""
    if value is None:
        return None
    metric, colon, mode = value.rpartition(":")
    if not colon or mode not in ("min", "max"):
        metric, mode = value, "min"
    try:
        return KeepBest(metric=metric, mode="max" if mode == "max" else "min")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


@click.command("ls", epilog="Example: aio-ckpt ls runs/ckpt --best accuracy:max")
@root_argument
@click.option(
    "--best",
    "rule",
    callback=best_rule,
    metavar="METRIC[:max]",
    help="Metric by which the best step is marked, lowest first, or highest with :max. Default: the first metric.",
)
@step_dir_option
@json_option
def ls_command(root: Path, rule: KeepBest | None, names: StepNames, *, as_json: bool) -> None:
    """List the checkpoints under ROOT, and what was set aside.

    The newest, the best, protected and damaged ones are marked. Damage is what manifests
    and lengths of files tell; verify reads every byte.
    """
    from aio_ckpt.cli.access import call, hint_below
    from aio_ckpt.cli.root_rows import STEPS_AT_ONCE, list_root, metric_fault

    check_root(root, names)
    screen = Screen(as_json=as_json)

    async def work(storage: Storage, executor: Executor) -> tuple[RootTable, str]:
        listing = await list_root(storage, executor, root, names, rule=rule)
        if as_json:
            return listing, ""
        if not listing.checkpoints:
            return listing, await hint_below(storage, root)
        damaged = [row.path for row in listing.checkpoints if row.is_damaged]
        good = [row.step for row in listing.checkpoints if row.fault is None]
        return listing, await advice(storage, root, names, damaged, good)

    found, hint = call(work, readers=STEPS_AT_ONCE)
    if as_json:
        screen.json(found)
        return
    if found.checkpoints:
        titles, rows = _table(found.checkpoints, time.time())
        styles = ["bold red" if row.fault else "green" if row.is_newest else "" for row in found.checkpoints]
        optional = [title for title in _OPTIONAL if title in titles]
        screen.table(titles, rows, numbers=("bytes", "ranks", "age"), optional=optional, styles=styles)
        screen.line(_totals(found))
    else:
        screen.line(f"no committed checkpoint under {printable(str(root))}{printable(hint)}")
    for row in found.checkpoints:
        if row.fault:
            screen.line(f"step {row.step}: {printable(row.fault)}", style="bold red")
    for pending, owner in zip(found.pending, found.pending_owners, strict=True):
        screen.line(f"pending (not a checkpoint): {printable(pending)} ({printable(owner)})")
    for kind, others in (
        ("abandoned by rollback", found.abandoned),
        ("damaged, set aside", found.quarantined),
    ):
        for other in others:
            screen.line(f"{kind} ('aio-ckpt rm ROOT --aside' deletes it): {printable(other)}")
    if rule is not None and (fault := metric_fault(rule.metric, found.checkpoints)):
        screen.line(fault)
    if found.checkpoints and hint:
        screen.line(hint)


async def advice(
    storage: Storage, root: Path, names: StepNames, damaged: Sequence[str], good: Sequence[int] | None
) -> str:
    """Return one line on the steps in the directories ``damaged`` of ``root``; empty if there is nothing to advise.

    Args:
        good: steps that are not damaged; None if nobody looked.
    """
    from aio_ckpt.commit.discovery import discover
    from aio_ckpt.storage.local import names_in

    found = {name: step for name in (Path(path).name for path in damaged) if (step := names.step(name)) is not None}
    if not found:
        return ""
    committed = {each.path.name: each.step for each in await discover(storage, root, names)}
    directories = Counter(names.step(name) for name in await names_in(storage, root))
    parts = []
    if good and max(found.values()) > max(good):
        parts.append(f"load() falls back to step {max(good)} if it meets the damage")
    elif good:
        parts.append(f"load() takes step {max(good)}")
    elif good is not None:
        parts.append("load() finds no step that is not damaged")
    # By rm: committed steps, of which no other directory holds a copy, which rm would delete, too.
    steps = sorted(step for name, step in found.items() if name in committed and directories[step] == 1)
    if steps:
        allowed = ["--allow-newest"] * (max(committed.values()) in steps)
        command = command_line("rm", root, *steps, *allowed, *names.option)
        parts.append(f"{printable(command)} deletes {'it' if len(steps) == 1 else 'them'}")
    if by_hand := [printable(str(root / name)) for name, step in found.items() if step not in steps]:
        parts.append(f"delete by hand: {', '.join(by_hand)}")
    return "; ".join(parts)


def _table(rows: tuple[RootRow, ...], now_unix: float) -> tuple[Cells, list[Cells]]:
    """Return the titles and the rows of the table of ``aio-ckpt ls``. Columns that say nothing are left out."""
    cells = [
        (
            printable(Path(row.path).name),
            amount(row.nbytes),
            "-" if row.world_size is None else str(row.world_size),
            "-" if row.created_unix is None else age_text(now_unix - row.created_unix),
            ", ".join(_marks(row)) or "-",
            metrics_text(row.metrics),
            time_text(row.created_unix),
            printable(row.torch or "-"),
            _cut(extra_text(row.extra)),
        )
        for row in rows
    ]
    chosen = [
        number
        for number, title in enumerate(_TITLES)
        if title not in ("metrics", "extra") or any(row[number] != "-" for row in cells)
    ]
    return tuple(_TITLES[number] for number in chosen), [tuple(row[number] for number in chosen) for row in cells]


def _cut(words: str) -> str:
    return words if len(words) <= _EXTRA_CHARS else words[: _EXTRA_CHARS - 3] + "..."


def _marks(row: RootRow) -> list[str]:
    marks: list[tuple[Any, str]] = [
        (row.is_damaged, "damaged"),
        (row.fault and not row.is_damaged, "unreadable"),
        (row.is_newest, "newest"),
        (row.best_of, f"best ({printable(row.best_of or '')})"),
        (row.is_protected, "protected"),
    ]
    return [word for applies, word in marks if applies]


def _totals(found: RootTable) -> str:
    """Return the last line of ``aio-ckpt ls``: ``3 checkpoints, 25.6 GB, 1 damaged``."""
    rows = found.checkpoints
    counts = (
        (sum(row.is_protected for row in rows), "protected"),
        (sum(row.is_damaged for row in rows), "damaged"),
        (sum(row.fault is not None and not row.is_damaged for row in rows), "unreadable"),
    )
    parts = [plural(len(rows), "checkpoint"), amount(found.nbytes)]
    return ", ".join([*parts, *(f"{count} {word}" for count, word in counts if count)])


@click.command("du", epilog="Example: aio-ckpt du runs/ckpt")
@root_argument
@step_dir_option
@json_option
def du_command(root: Path, names: StepNames, *, as_json: bool) -> None:
    """Show what ROOT holds, and what is free on its disk.

    Checkpoints, pending saves and what was set aside count by the lengths of their files. A file that several steps
    share counts once, for the oldest of them.
    """
    from aio_ckpt.cli.access import call
    from aio_ckpt.cli.root_rows import use_of

    check_root(root, names)
    screen = Screen(as_json=as_json)
    found = call(lambda storage, executor: use_of(storage, executor, root, names))
    if as_json:
        screen.json(found)
        return
    is_listed = isinstance(root, RemotePath)  # the set-aside directory is a list of files, which stay where they were
    remedy = f"'aio-ckpt rm ROOT --aside' deletes it{', and its data, which counts as other' if is_listed else ''}"
    parts = (
        ("checkpoints", found.checkpoints, "'aio-ckpt ls' lists them"),
        ("protected", found.protected, "part of the checkpoints"),
        ("pending", found.pending, f"{PENDING_DIR}: 'aio-ckpt ls' tells whether a writer lives"),
        ("abandoned", found.abandoned, f"{ABANDONED_DIR}: {remedy}"),
        ("damaged", found.quarantined, f"{CORRUPT_DIR}: {remedy}"),
        ("trash", found.trash, f"{TRASH_DIR}: the next writer deletes it"),
        ("other", found.other, "not a checkpoint"),
        ("total", found.nbytes, printable(str(root))),
        *([] if found.free is None else [("free", found.free, "on this file system")]),
    )
    rows = [
        (word, amount(nbytes), f"{100 * nbytes / found.nbytes:.0f}%" if found.nbytes and word != "free" else "-", where)
        for word, nbytes, where in parts
        if nbytes or word in ("checkpoints", "total", "free")
    ]
    screen.table(("what", "bytes", "part", "where"), rows, numbers=("bytes", "part"), optional=("where",))
