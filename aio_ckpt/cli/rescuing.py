"""``rescue`` and ``recover``: what a killed trainer and a killed ``dcp.save`` left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.checks import check_seconds
from aio_ckpt.cli.arguments import (
    Directory,
    MistypedPathError,
    check_root,
    json_option,
    root_argument,
    step_dir_option,
)
from aio_ckpt.cli.console import Screen, printable
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import CheckpointNotFoundError
from aio_ckpt.format.names import ENGINE_DIR, StepNames
from aio_ckpt.format.root_manifest import METADATA_FILE
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.rescue import RescueReport
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


@click.command("rescue", epilog="Example: aio-ckpt rescue runs/ckpt")
@root_argument
@click.option("--shm-path", type=Directory(), multiple=True, help="Look here, too; the root tells where it was saved.")
@click.option(
    "--stale-after",
    type=float,
    default=EngineConfig().stale_after_secs,
    show_default=True,
    help="Seconds without a sign of life after which a trainer counts as dead that cannot be proven to be.",
)
@step_dir_option
@json_option
def rescue_command(
    root: Path, shm_path: tuple[Path, ...], stale_after: float, names: StepNames, *, as_json: bool
) -> int:
    """Commit what a killed trainer left in shared memory.

    Its engine needs shm_path=. Exit code 1 if a snapshot is lost.
    """
    check_seconds("--stale-after", stale_after)
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.owner import Owner
    from aio_ckpt.rescue import rescue_root

    check_root(root, names)
    screen, here = Screen(as_json=as_json), Owner.of_this_process(f"rescue{os.getpid()}")

    async def work(storage: Storage, executor: Executor) -> RescueReport:
        return await rescue_root(
            storage, executor, root, names, here, directories=shm_path, stale_after_secs=stale_after
        )

    report = call(work)
    if as_json:
        screen.json(report)
    else:
        for saved in report.rescued:
            screen.line(f"step {saved.step}: rescued, {amount(saved.nbytes)} in {printable(saved.path)}", style="green")
        for other in report.refused:
            which = f"step {other.step}" if other.step is not None else ", ".join(map(printable, other.segments))
            screen.line(f"{which}: not rescued: {printable(other.reason)}", style="bold red" if other.is_loss else "")
        if not report.rescued and not report.refused:
            screen.line(f"nothing to rescue for {printable(str(root))}")
    return 1 if any(other.is_loss for other in report.refused) else 0


@click.command("recover", epilog="Example: aio-ckpt recover runs/dcp")
@click.argument("directory", type=Directory())
@json_option
def recover_command(directory: Path, *, as_json: bool) -> None:
    """Bring back the checkpoint in whose place a dcp.save died.

    The save used aio_ckpt.dcp.Writer. Stock dcp.load can read DIRECTORY then. aio_ckpt.dcp.Reader and the
    next save need no such call. No save may run there.
    """
    names = StepNames(EngineConfig().step_dir)
    entries = os.listdir(directory)
    if ENGINE_DIR in entries or (
        METADATA_FILE not in entries and any(names.step(name) is not None for name in entries)
    ):
        raise MistypedPathError(f"{directory} is the root of an engine, which clears it by itself: nothing to recover")
    if not any(name.startswith((METADATA_FILE, "aio_ckpt.")) for name in entries):
        raise CheckpointNotFoundError(f"{directory}: no checkpoint, and no save that died: give the path of dcp.save")
    from aio_ckpt.dcp.writer import recover

    came_back = recover(directory)
    is_there = (directory / METADATA_FILE).exists()
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"path": str(directory), "came_back": came_back, "has_checkpoint": is_there})
    elif came_back:
        screen.line(f"{printable(str(directory))}: the checkpoint before the save that died is back", style="green")
    elif is_there:
        screen.line(f"{printable(str(directory))}: its checkpoint is in place")
    else:
        screen.line(f"{printable(str(directory))}: what the save that died left is removed; there is no checkpoint")
