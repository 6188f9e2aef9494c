"""``rescue``: what a killed trainer left in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.argument_checks import check_seconds
from aio_ckpt.cli.arguments import Directory, check_root, json_option, step_dir_option
from aio_ckpt.cli.console import Screen
from aio_ckpt.cli.texts import printable
from aio_ckpt.config import EngineConfig
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.rescue.recover import RescueReport
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


@click.command("rescue", epilog="Example: aio-ckpt rescue runs/ckpt")
@click.argument("root", type=Directory())
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
    from aio_ckpt.rescue.recover import rescue_root

    check_root(root, names)
    screen, here = Screen(as_json=as_json), Owner.of_this_process()

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
