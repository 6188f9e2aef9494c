"""``diff``: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.cli.arguments import Directory, example, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress, plural, printable
from aio_ckpt.format.names import StepNames

if TYPE_CHECKING:
    from aio_ckpt.cli.work.differences import Comparison
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


@click.command("diff", epilog=example("aio-ckpt diff runs/a runs/b --values"))
@click.argument("a", type=Directory())
@click.argument("b", type=Directory())
@click.option("--values", is_flag=True, help="Read both, and show how far tensors of one name differ.")
@step_dir_option
@json_option
def diff_command(a: Path, b: Path, names: StepNames, *, values: bool, as_json: bool) -> int:
    """Compare names, shapes and dtypes of two checkpoints.

    Of a root, it is the newest one. Exit code 1 if they differ. Objects are compared by their stored bytes.
    """
    from aio_ckpt.cli.work import call
    from aio_ckpt.cli.work.differences import compare

    screen = Screen(as_json=as_json)

    def compared(on_progress: Callable[[int, int], None]) -> Comparison:
        async def work(storage: Storage, executor: Executor) -> Comparison:
            return await compare(storage, executor, a, b, names, with_values=values, on_progress=on_progress)

        return call(work)

    if values:
        with bytes_progress(screen, "compare") as on_progress:
            found = compared(on_progress)
    else:
        found = compared(lambda *_: None)
    if as_json:
        screen.json(found)
    else:
        _tell(found, screen)
    return 0 if found.are_alike else 1


def _tell(found: Comparison, screen: Screen) -> None:
    screen.line(f"A  {printable(found.a)}")
    screen.line(f"B  {printable(found.b)}")
    for where, only in (("A", found.only_in_a), ("B", found.only_in_b)):
        for name in only:
            screen.line(f"only in {where}: {printable(name)}", style="bold red")
    if found.kinds:
        rows = [(printable(change.name), change.a, change.b) for change in found.kinds]
        screen.table(("name", "A", "B"), rows)
    if found.values:
        cells = [
            (
                printable(change.name),
                "object" if change.largest is None else f"{change.differing:,} of {change.elements:,}",
                "-" if change.largest is None else f"{change.largest:.3g}",
                "-" if change.relative is None else f"{change.relative:.3g}",
            )
            for change in found.values
        ]
        screen.table(("name", "differ", "by at most", "relative"), cells, numbers=("differ", "by at most", "relative"))
    what = "names, shapes and dtypes" if found.values is None else "names, shapes, dtypes and values"
    differ = len(found.only_in_a) + len(found.only_in_b) + len(found.kinds) + len(found.values or ())
    screen.line(f"{plural(found.alike, 'leaf')} alike, {differ:,} not ({what})")
