"""``cp``: copy a checkpoint into another root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.cli.arguments import Directory, MistypedPathError, check_root, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress
from aio_ckpt.cli.texts import printable
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.reports import CopyReport, amount

if TYPE_CHECKING:
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.object_store import AnyStorage


@click.command("cp", epilog="Example: aio-ckpt cp runs/ckpt/step_000000100 /backup/ckpt")
@click.argument("path", type=Directory(may_be_remote=True))
@click.argument("root", type=Directory(must_exist=False, may_be_remote=True))
@click.option("--step", type=click.IntRange(0), help="Its step there, if neither manifest nor directory tells it.")
@step_dir_option
@json_option
def cp_command(path: Path, root: Path, step: int | None, names: StepNames, *, as_json: bool) -> None:
    """Copy a checkpoint into another ROOT, and verify the copy.

    If PATH is a root, its newest checkpoint is copied. The copy becomes visible as a whole, once every
    byte is durable and was read back. ROOT is made if its parent exists. One of both may be
    in an object store: s3://BUCKET/RUN, gs://..., az://...
    """
    from aio_ckpt import copying
    from aio_ckpt.cli.access import call, use_newest

    if not isinstance(root, RemotePath):
        _check_target(root, names)
    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "copy and verify") as on_progress:

        async def work(storage: AnyStorage, executor: Executor) -> CopyReport:
            async def copy(newest: Path) -> CopyReport:
                return await copying.copy_checkpoint(
                    storage, executor, newest, root, names, step=step, on_progress=on_progress
                )

            return await use_newest(storage, path, names, copy)

        copied = call(work)
    if as_json:
        screen.json(
            {"step": copied.step, "source": str(copied.source), "path": str(copied.path), "nbytes": copied.nbytes}
        )
    else:
        screen.line(
            f"step {copied.step}: {amount(copied.nbytes)} copied and verified, {printable(str(copied.path))}",
            style="green",
        )


def _check_target(root: Path, names: StepNames) -> None:
    """Raise MistypedPathError unless ``root`` is a root, is empty, or can be made in a directory that exists."""
    if not root.exists():
        if not root.parent.is_dir():
            raise MistypedPathError(f"{root}: {root.parent} does not exist either: make it first")
    elif os.listdir(root):
        check_root(root, names)
