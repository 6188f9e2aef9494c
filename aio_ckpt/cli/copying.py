"""``cp``: copy a checkpoint into another root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.cli.arguments import Directory, MistypedPathError, check_root, example, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress, printable
from aio_ckpt.format.names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.cli.work.copies import Copied
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


@click.command("cp", epilog=example("aio-ckpt cp runs/ckpt/step_000000100 /backup/ckpt"))
@click.argument("path", type=Directory())
@click.argument("root", type=Directory(must_exist=False))
@click.option("--step", type=click.IntRange(0), help="Its step there, if neither manifest nor directory tells it.")
@step_dir_option
@json_option
def cp_command(path: Path, root: Path, step: int | None, names: StepNames, *, as_json: bool) -> None:
    """Copy a checkpoint into another ROOT, and verify the copy.

    If PATH is a root, its newest checkpoint is copied. The copy becomes visible as a whole, once every
    byte is durable and was read back. ROOT is made if its parent exists.
    """
    from aio_ckpt.cli.work import call
    from aio_ckpt.cli.work.copies import copy_checkpoint

    if not root.exists():
        if not root.parent.is_dir():
            raise MistypedPathError(f"{root}: {root.parent} does not exist either: make it first")
    elif os.listdir(root):
        check_root(root, names)
    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "copy and verify") as on_progress:

        async def work(storage: Storage, executor: Executor) -> Copied:
            return await copy_checkpoint(storage, executor, path, root, names, step=step, on_progress=on_progress)

        copied = call(work)
    if as_json:
        screen.json(copied)
    else:
        screen.line(
            f"step {copied.step}: {amount(copied.nbytes)} copied and verified, {printable(copied.path)}", style="green"
        )
