"""``verify``: every byte of a checkpoint, or of all checkpoints of a root."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aio_ckpt.cli.advice import advice
from aio_ckpt.cli.arguments import Directory, example, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress, plural, printable
from aio_ckpt.config import MAX_WORKERS
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.checkpoint.verify import Fault
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


class _Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the verification of one checkpoint."""

    path: str
    nbytes: int
    """Length of all its files, in bytes."""
    secs: float
    """Duration of the verification."""
    faults: tuple[Fault, ...]
    """Faults; empty if every byte is as it was written."""
    is_gone: bool = False
    """Whether its writer deleted it before it was verified."""


@click.command("verify", epilog=example("aio-ckpt verify runs/ckpt --workers 8"))
@click.argument("path", type=Directory())
@click.option(
    "--workers", type=click.IntRange(1, MAX_WORKERS), default=4, show_default=True, help="Reads in flight at once."
)
@step_dir_option
@json_option
def verify_command(path: Path, workers: int, names: StepNames, *, as_json: bool) -> int:
    """Read every byte of a checkpoint, or of all of a root.

    Exit code 1 if any byte is not as it was written.
    """
    from aio_ckpt.cli.access import call, locate

    screen = Screen(as_json=as_json)
    found = call(lambda storage, _: locate(storage, path, names))
    sizes = [*map(_bytes_now, found)]
    total, done = sum(sizes), 0
    results: list[_Verified] = []
    with bytes_progress(screen, "verify") as on_progress:
        for checkpoint, nbytes in zip(found, sizes, strict=True):
            results.append(_verify(checkpoint, names, nbytes, workers, _from(done, nbytes, total, on_progress)))
            done += nbytes
            on_progress(done, total)  # files that hold no data, and what could not be read, count as done
            _tell(results[-1], screen)
    bad = sum(bool(result.faults) for result in results)
    if as_json:
        screen.json({"is_good": not bad, "checkpoints": results})
    elif len(results) > 1:
        screen.line(f"{len(results)} checkpoints, {bad} with faults")
    if bad and not as_json:
        _advise(path, results, names, screen)
    return 1 if bad else 0


def _from(begin: int, most: int, total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return a function that takes the number of bytes read since its last call, of one checkpoint."""
    done = 0

    def on_read(more: int) -> None:
        nonlocal done
        done = min(done + more, most)  # a checkpoint that was replaced meanwhile is read again
        on_progress(begin + done, total)

    return on_read


def _verify(
    checkpoint: Path, names: StepNames, nbytes: int, workers: int, on_progress: Callable[[int], None]
) -> _Verified:
    from aio_ckpt.checkpoint import verify as work
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.discovery import MAX_RETRIES

    begin, is_gone = time.perf_counter(), False

    async def verify(storage: Storage, executor: Executor) -> tuple[Fault, ...]:
        try:
            return await work.verify_checkpoint(
                storage,
                checkpoint,
                step=names.step(checkpoint.name),
                executor=executor,
                readers=workers,
                on_progress=on_progress,
            )
        except AioCkptError as error:  # an unreadable checkpoint must not hide the faults of the others
            return (work.fault_of(error, file=checkpoint.name, tensor=None),)

    async def verify_present(storage: Storage, executor: Executor) -> tuple[Fault, ...]:
        nonlocal is_gone
        faults: tuple[Fault, ...] = ()
        for _ in range(MAX_RETRIES):
            before = await storage.status(checkpoint)
            faults = await verify(storage, executor)
            after = await storage.status(checkpoint)
            is_gone = after is None
            if is_gone or after == before or not faults:
                break  # otherwise its writer replaced it while it was read: verify it again
        return () if is_gone else faults

    faults = call(verify_present, readers=workers)
    secs = time.perf_counter() - begin
    return _Verified(path=str(checkpoint), nbytes=nbytes, secs=secs, faults=faults, is_gone=is_gone)


def _bytes_now(checkpoint: Path) -> int:
    from aio_ckpt.cli.root_table import file_lengths

    try:
        return sum(file_lengths(checkpoint).values())
    except (FileNotFoundError, PermissionError):  # deleted since it was listed, or to be reported by verify
        return 0


def _advise(path: Path, results: Sequence[_Verified], names: StepNames, screen: Screen) -> None:
    damaged = [Path(result.path) for result in results if any(fault.is_damage for fault in result.faults)]
    if damaged == [path]:  # one checkpoint was named: nothing is known of its siblings
        told = advice(path.parent, names, damaged, None)
    else:
        steps = [names.step(Path(result.path).name) for result in results if not (result.faults or result.is_gone)]
        told = advice(path, names, damaged, [step for step in steps if step is not None])
    if told:
        screen.line(told)


def _tell(result: _Verified, screen: Screen) -> None:
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
        tensor = f" {fault.tensor!r}" if fault.tensor else ""
        screen.line(
            f"  {printable(fault.file)}{printable(tensor)}: {printable(fault.message.removeprefix(f'{fault.file}: '))}"
        )
