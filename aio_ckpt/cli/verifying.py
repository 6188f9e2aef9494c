"""``verify``: every byte of a checkpoint, or of all checkpoints of a root."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aio_ckpt.cli.arguments import Directory, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress, counted
from aio_ckpt.cli.listing import advice
from aio_ckpt.cli.texts import plural, printable
from aio_ckpt.config import MAX_WORKERS
from aio_ckpt.errors import AioCkptError, ReadError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.checkpoint.verify import Fault, SharedFile
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


class _Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the verification of one checkpoint."""

    path: str
    nbytes: int
    """Length of all its files, in bytes."""
    secs: float
    faults: tuple[Fault, ...]
    """Faults; empty if every byte is as it was written."""
    is_gone: bool = False
    """Whether its writer deleted it before it was verified."""


@click.command("verify", epilog="Example: aio-ckpt verify runs/ckpt/step_000000100 --workers 8")
@click.argument("path", type=Directory(may_be_remote=True))
@click.option(
    "--workers", type=click.IntRange(1, MAX_WORKERS), default=4, show_default=True, help="Reads in flight at once."
)
@step_dir_option
@json_option
def verify_command(path: Path, workers: int, names: StepNames, *, as_json: bool) -> int:
    """Read every byte of a checkpoint, or of all of a root.

    Exit code 1 if any byte is not as it was written, or may not be read.
    """
    from aio_ckpt.cli.access import call, locate
    from aio_ckpt.commit.discovery import REFUSED

    screen = Screen(as_json=as_json)
    results: list[_Verified] = []

    async def work(storage: Storage, executor: Executor) -> None:
        import aio_ckpt.checkpoint.verify  # noqa: F401 - before the rate is measured: torch takes a second

        found = list(itertools.chain(*await locate(storage, path, names)))
        sizes: list[int] = []
        for checkpoint in found:
            try:
                sizes.append(sum((await storage.lengths(checkpoint)).values()))
            except ReadError as error:  # deleted since it was listed, or to be reported by verify
                if error.errno not in (errno.ENOENT, *REFUSED):
                    raise
                sizes.append(0)
        total, done = sum(sizes), 0
        sound: set[SharedFile] = set()
        for checkpoint, nbytes in zip(found, sizes, strict=True):
            on_read = counted(done, nbytes, total, on_progress)
            results.append(await _verify(storage, executor, checkpoint, names, nbytes, workers, on_read, sound))
            done += nbytes
            on_progress(done, total)  # files that hold no data, and what could not be read, count as done
            _print(results[-1], screen)

    with bytes_progress(screen, "verify") as on_progress:
        call(work, readers=workers)
    bad = sum(bool(result.faults) for result in results)
    if as_json:
        screen.json({"is_good": not bad, "checkpoints": results})
    elif len(results) > 1:
        screen.line(f"{len(results)} checkpoints, {bad} with faults")
    if bad and not as_json:
        _advise(path, results, names, screen)
    return 1 if bad else 0


async def _verify(
    storage: Storage,
    executor: Executor,
    checkpoint: Path,
    names: StepNames,
    nbytes: int,
    workers: int,
    on_read: Callable[[int], None],
    sound: set[SharedFile],
) -> _Verified:
    from aio_ckpt.checkpoint import verify
    from aio_ckpt.cli.access import unless_replaced

    begin, step = time.perf_counter(), names.step(checkpoint.name)

    async def faults_now() -> tuple[Fault, ...]:
        try:
            return await verify.verify_checkpoint(
                storage,
                checkpoint,
                step=step,
                executor=executor,
                readers=workers,
                on_progress=on_read,
                sound=sound,
            )
        except AioCkptError as error:  # an unreadable checkpoint must not hide the faults of the others
            return (verify.fault_of(error, file=checkpoint.name, tensor=None),)

    try:
        faults = await unless_replaced(storage, checkpoint, faults_now, lambda found: not found)
    except ReadError as error:  # of the directory itself
        faults = (verify.fault_of(error, file=checkpoint.name, tensor=None),)
    secs = time.perf_counter() - begin
    return _Verified(path=str(checkpoint), nbytes=nbytes, secs=secs, faults=faults or (), is_gone=faults is None)


def _advise(path: Path, results: Sequence[_Verified], names: StepNames, screen: Screen) -> None:
    from aio_ckpt.cli.access import call

    damaged = [result.path for result in results if any(fault.is_damage for fault in result.faults)]
    root, good = path, None
    if damaged == [str(path)]:  # one checkpoint was named: nothing is known of its siblings
        root = path.parent
    else:
        steps = [names.step(Path(result.path).name) for result in results if not (result.faults or result.is_gone)]
        good = [step for step in steps if step is not None]
    if hint := call(lambda storage, _: advice(storage, root, names, damaged, good)):
        screen.line(hint)


def _print(result: _Verified, screen: Screen) -> None:
    if screen.as_json:
        return
    name = printable(Path(result.path).name)
    if result.is_gone:
        screen.line(f"{name}: deleted by its writer before it was verified")
        return
    if not result.faults:
        speed = amount(result.nbytes / max(result.secs, 1e-9))
        screen.line(f"{name}: good, {amount(result.nbytes)} in {result.secs:.2f} s ({speed}/s)", style="green")
        return
    screen.line(f"{name}: {plural(len(result.faults), 'fault')}", style="bold red")
    for fault in result.faults:
        screen.line(f"  {printable(str(fault))}")
