"""``probe``: whether a directory keeps what the engine depends on, alone or with the same command on another host."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aio_ckpt.cli.arguments import Directory, json_option
from aio_ckpt.cli.console import Screen
from aio_ckpt.cli.texts import printable
from aio_ckpt.config import MAX_WORKERS
from aio_ckpt.errors import RootError

if TYPE_CHECKING:
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage
    from aio_ckpt.storage.probe import Finding

_FOLDER = ".aio_ckpt-probe-"
_STYLES = {"bad": "bold red", "slower": "yellow"}


@click.command("probe", epilog="Example: aio-ckpt probe runs/ckpt --peer")
@click.argument("directory", type=Directory())
@click.option("--peer", is_flag=True, help="Meet the same command on another host, and try what both see.")
@click.option("--wait", "wait_secs", type=click.FloatRange(1), default=120.0, show_default=True, metavar="SECONDS",
              help="Longest wait for the other host.")  # fmt: skip
@click.option("--mib", type=click.IntRange(8, 1 << 20), default=256, show_default=True, help="MiB to write and read.")
@click.option("--workers", type=click.IntRange(1, MAX_WORKERS), default=4, show_default=True,
              help="Writes and reads in flight at once.")  # fmt: skip
@json_option
def probe_command(directory: Path, wait_secs: float, mib: int, workers: int, *, peer: bool, as_json: bool) -> int:
    """Try on a directory what the engine depends on.

    Names, renames, locks, fsync, O_DIRECT, and the speed of write and read. All files are removed again. Exit code 1 if
    a promise of the engine does not hold there.
    """
    from aio_ckpt.cli.access import call
    from aio_ckpt.storage.probe import try_names, try_speed

    screen = Screen(as_json=as_json)
    with _scratch(directory) as folder:
        findings = list(try_names(folder))

        async def work(storage: Storage, _: Executor) -> None:
            findings.extend(await try_speed(storage, folder / "data", mib << 20, workers))

        call(work, readers=workers)
    if not as_json:
        _show(findings, screen)
    if peer:
        together = _with_peer(directory, wait_secs, screen)
        if not as_json:
            _show(together, screen)
        findings += together
    if as_json:
        screen.json({"directory": str(directory), "findings": findings})
    else:
        _conclude(findings, screen)
    return int(any(finding.verdict == "bad" for finding in findings))


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_peer(directory: Path, wait_secs: float, screen: Screen) -> list[Finding]:
    from aio_ckpt.storage.probe_peer import Meeting

    folder = directory / f"{_FOLDER}meeting"
    is_left_to_peer = False
    try:
        meeting = Meeting(folder, wait_secs, screen.line)
        screen.line(f"met {printable(meeting.peer)}")
        findings = list(meeting.findings())
        meeting.end()
        is_left_to_peer = not meeting.leads
    except RootError:  # others meet there
        is_left_to_peer = True
        raise
    finally:
        if not is_left_to_peer:  # also after an error, since a process that was killed may have left the directory
            shutil.rmtree(folder, ignore_errors=True)
    return findings


def _show(findings: list[Finding], screen: Screen) -> None:
    rows = [(each.check, printable(each.found), each.verdict, printable(each.remedy)) for each in findings]
    styles = [_STYLES.get(each.verdict, "") for each in findings]
    screen.table(("check", "found", "verdict", "what follows"), rows, styles=styles)


def _conclude(findings: list[Finding], screen: Screen) -> None:
    bad = sum(each.verdict == "bad" for each in findings)
    slower = sum(each.verdict == "slower" for each in findings)
    if bad:
        text = f"{bad} of {len(findings)} checks are bad: do not save here before that is mended"
        screen.line(text, style="bold red")
    else:
        costs = f"; {slower} of {len(findings)} checks cost speed" if slower else ""
        screen.line(f"checkpoints can be saved here{costs}")
