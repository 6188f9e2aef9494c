"""``aio-ckpt``: list, inspect and verify checkpoints, and the demo.

Exit codes: 0 all is well, 1 faults were found or the command failed, 2 it was called the wrong way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from aio_ckpt._version import __version__
from aio_ckpt.checkpoint.verify import Fault, verify_checkpoint
from aio_ckpt.checks import check_seconds
from aio_ckpt.cli.console import Advance, Screen, printable
from aio_ckpt.cli.listing import (
    Contents,
    bytes_of,
    checkpoint_table,
    describe_newest,
    extra_text,
    leaf_table,
    list_root,
    locate,
    time_text,
)
from aio_ckpt.cli.local_path import LocalPath
from aio_ckpt.commit.discovery import MAX_RETRIES
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.retention import protect, unprotect
from aio_ckpt.commit.step_numbers import MAX_STEP
from aio_ckpt.config import MAX_WORKERS, EngineConfig
from aio_ckpt.demo.run import MIN_STEPS, DemoSpec, OutError, run_demo
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ConfigError
from aio_ckpt.format.names import StepNames
from aio_ckpt.reports import amount
from aio_ckpt.rescue import RescueReport, rescue_root
from aio_ckpt.runtime.portal import Executor, Portal
from aio_ckpt.storage.local import LocalStorage, Storage

__all__ = ["main", "run"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_HOUSEKEEPING_THREADS = 2
_CLOSE_SECS = 5.0
_DIRECTORY = LocalPath(exists=True, file_okay=False)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is one line on standard error."""
    try:
        code = commands.main(list(arguments) or ["--help"], prog_name="aio-ckpt", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except click.Abort:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader (head, less) has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointNotFoundError, ConfigError, OutError) as error:
        return _complain(str(error), 2)
    except (AioCkptError, OSError) as error:
        return _complain(str(error), 1)
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"aio-ckpt: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def _call(work: Callable[[Storage, Executor], Coroutine[Any, Any, T]], *, readers: int = 4) -> T:
    """Return the result of ``work``, run on a loop of its own."""
    portal = Portal("aio_ckpt-cli", readers + _HOUSEKEEPING_THREADS)
    try:
        portal.start()
        return portal.call(work, LocalStorage(portal.executor), portal.executor, timeout=None)
    finally:
        portal.close(_CLOSE_SECS)


def _json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")(command)


def _step_dir_option(command: F) -> F:
    words = "Name of the checkpoints' directories, as in EngineConfig."
    return click.option("--step-dir", default=EngineConfig().step_dir, show_default=True, help=words)(command)


def _names(step_dir: str) -> StepNames:
    return StepNames(EngineConfig(step_dir=step_dir).step_dir)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="aio-ckpt %(version)s")
def commands() -> None:
    """List, inspect and verify checkpoints; see the engine at work."""


# -- ls ---------------------------------------------------------------------------------------------


@commands.command("ls")
@click.argument("root", type=_DIRECTORY)
@_step_dir_option
@_json_option
def list_command(root: Path, step_dir: str, *, as_json: bool) -> int:
    """List the committed checkpoints under ROOT."""
    screen, names = Screen(as_json=as_json), _names(step_dir)
    found = _call(lambda storage, executor: list_root(storage, executor, root.absolute(), names))
    if as_json:
        screen.json(found)
        return 0
    if found.checkpoints:
        screen.table(*checkpoint_table(found.checkpoints), left=3)
    else:
        screen.line(f"no committed checkpoint under {printable(str(root))}")
    for row in found.checkpoints:
        if row.fault:
            screen.line(f"step {row.step}: {printable(row.fault)}", style="bold red")
    for kind, others in (
        ("pending (not a checkpoint)", found.pending),
        ("abandoned by rollback", found.abandoned),
        ("damaged, set aside", found.quarantined),
    ):
        if others:
            screen.line(f"{kind}: {', '.join(map(printable, others))}")
    return 0


# -- protect ----------------------------------------------------------------------------------------

_STEP = click.IntRange(0, MAX_STEP)


@commands.command("protect")
@click.argument("root", type=_DIRECTORY)
@click.argument("step", type=_STEP)
@_step_dir_option
@_json_option
def protect_command(root: Path, step: int, step_dir: str, *, as_json: bool) -> None:
    """Never let retention delete STEP under ROOT. Works beside a trainer that saves there."""
    names = _names(step_dir)
    _call(lambda storage, _: protect(storage, root.absolute(), names, step))
    _tell_protection(step, is_protected=True, as_json=as_json)


@commands.command("unprotect")
@click.argument("root", type=_DIRECTORY)
@click.argument("step", type=_STEP)
@_json_option
def unprotect_command(root: Path, step: int, *, as_json: bool) -> None:
    """Let STEP under ROOT expire again."""
    _call(lambda storage, _: unprotect(storage, root.absolute(), step))
    _tell_protection(step, is_protected=False, as_json=as_json)


def _tell_protection(step: int, *, is_protected: bool, as_json: bool) -> None:
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"step": step, "is_protected": is_protected})
    else:
        screen.line(f"step {step} is {'protected' if is_protected else 'not protected'}")


# -- rescue -----------------------------------------------------------------------------------------


@commands.command("rescue")
@click.argument("root", type=LocalPath(file_okay=False))
@click.option("--shm-path", type=_DIRECTORY, multiple=True, help="Look here, too; the root tells where it was saved.")
@click.option(
    "--stale-after",
    type=float,
    default=EngineConfig().stale_after_secs,
    show_default=True,
    help="Seconds without a sign of life after which a trainer counts as dead that cannot be proven to be.",
)
@_step_dir_option
@_json_option
def rescue_command(root: Path, shm_path: tuple[Path, ...], stale_after: float, step_dir: str, *, as_json: bool) -> int:
    """Commit what a trainer with shm_path= had staged when it was killed; exit code 1 if a snapshot is lost."""
    check_seconds("--stale-after", stale_after)
    screen, names, here = Screen(as_json=as_json), _names(step_dir), Owner.of_this_process(f"rescue{os.getpid()}")

    at, places = root.absolute(), [*map(Path.absolute, shm_path)]

    async def work(storage: Storage, executor: Executor) -> RescueReport:
        return await rescue_root(storage, executor, at, names, here, directories=places, stale_after_secs=stale_after)

    report = _call(work)
    if as_json:
        screen.json(report)
    else:
        for saved in report.rescued:
            screen.line(f"step {saved.step}: rescued, {amount(saved.nbytes)} in {printable(saved.path)}", style="green")
        for other in report.refused:
            which = f"step {other.step}" if other.step is not None else ", ".join(map(printable, other.segments))
            screen.line(f"{which}: not rescued: {printable(other.reason)}", style="bold red" if other.is_loss else "")
        if not report.rescued and not report.refused:
            screen.line(f"nothing to rescue for {root}")
    return 1 if any(other.is_loss for other in report.refused) else 0


# -- inspect ----------------------------------------------------------------------------------------


@commands.command("inspect")
@click.argument("path", type=_DIRECTORY)
@_step_dir_option
@_json_option
def inspect_command(path: Path, step_dir: str, *, as_json: bool) -> int:
    """Show what the checkpoint at PATH holds (of a root: its newest one). Reads no tensor."""
    screen, names, at = Screen(as_json=as_json), _names(step_dir), path.absolute()

    async def describe(storage: Storage, executor: Executor) -> Contents:
        return await describe_newest(storage, executor, at, names)

    contents = _call(describe)
    if as_json:
        screen.json(contents)
        return 0
    writers = ", ".join(f"{name} {version}" for name, version in contents.written_by.items())
    tensors = sum(leaf.kind == "tensor" for leaf in contents.leaves)
    for label, words in (
        ("path", contents.path),
        ("step", "-" if contents.step is None else str(contents.step)),
        ("format", contents.format),
        ("written", f"{time_text(contents.created_unix)} by {writers}" if writers else "-"),
        ("ranks", "-" if contents.world_size is None else str(contents.world_size)),
        ("tensors", f"{tensors}, {amount(contents.tensor_bytes)}"),
        ("objects", f"{len(contents.leaves) - tensors}, {amount(contents.object_bytes)}"),
        *([("extra", extra_text(contents.extra))] if contents.extra else []),
    ):
        screen.line(f"{label:<8} {printable(words)}")
    screen.line()
    screen.table(*leaf_table(contents.leaves), left=3)
    return 0


# -- verify -----------------------------------------------------------------------------------------


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


@commands.command("verify")
@click.argument("path", type=_DIRECTORY)
@click.option(
    "--workers", type=click.IntRange(1, MAX_WORKERS), default=4, show_default=True, help="Reads in flight at once."
)
@_step_dir_option
@_json_option
def verify_command(path: Path, workers: int, step_dir: str, *, as_json: bool) -> int:
    """Read every byte of the checkpoint at PATH, or of all under the root PATH; exit code 1 if any is not right."""
    screen, names = Screen(as_json=as_json), _names(step_dir)
    found = _call(lambda storage, _: locate(storage, path.absolute(), names))
    results: list[_Verified] = []
    for checkpoint in found:
        nbytes = _bytes_now(checkpoint)
        with screen.progress(f"verify {printable(checkpoint.name)}", nbytes) as advance:
            results.append(_verify(checkpoint, names, nbytes, workers, advance))
        _tell_verified(results[-1], screen)
    bad = sum(bool(result.faults) for result in results)
    if as_json:
        screen.json({"is_good": not bad, "checkpoints": results})
    elif len(results) > 1:
        screen.line(f"{len(results)} checkpoints, {bad} with faults")
    return 1 if bad else 0


def _verify(checkpoint: Path, names: StepNames, nbytes: int, workers: int, advance: Advance) -> _Verified:
    begin = time.perf_counter()
    done, is_gone = 0, False

    def on_progress(more: int) -> None:
        nonlocal done
        done += more
        advance(done, f"{amount(done)} of {amount(nbytes)}")

    async def verify(storage: Storage, executor: Executor) -> tuple[Fault, ...]:
        try:
            return await verify_checkpoint(
                storage,
                checkpoint,
                step=names.step(checkpoint.name),
                executor=executor,
                readers=workers,
                on_progress=on_progress,
            )
        except AioCkptError as error:  # an unreadable checkpoint must not hide the faults of the others
            return (Fault(file=checkpoint.name, tensor=None, message=str(error)),)

    async def work(storage: Storage, executor: Executor) -> tuple[Fault, ...]:
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

    faults = _call(work, readers=workers)
    secs = time.perf_counter() - begin
    return _Verified(path=str(checkpoint), nbytes=nbytes, secs=secs, faults=faults, is_gone=is_gone)


def _bytes_now(checkpoint: Path) -> int:
    try:
        return bytes_of(checkpoint)
    except FileNotFoundError:  # deleted since it was listed
        return 0


def _tell_verified(result: _Verified, screen: Screen) -> None:
    name = printable(Path(result.path).name)
    if result.is_gone:
        screen.line(f"{name}: deleted by its writer before it was verified")
        return
    if not result.faults:
        speed = amount(result.nbytes / max(result.secs, 1e-9))
        screen.line(f"{name}: good, {amount(result.nbytes)} in {result.secs:.2f} s ({speed}/s)", style="green")
        return
    screen.line(f"{name}: {len(result.faults)} fault(s)", style="bold red")
    for fault in result.faults:
        tensor = f" {fault.tensor!r}" if fault.tensor else ""
        screen.line(f"  {printable(fault.file)}{printable(tensor)}: {printable(fault.message)}")


# -- demo -------------------------------------------------------------------------------------------


@commands.command("demo")
@click.option("--out", type=LocalPath(), default=Path("demo-out"), show_default=True, help="Directory.")
@click.option("--steps", type=click.IntRange(min=MIN_STEPS), default=100, show_default=True, help="Of training.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 31) - 2), help="Of everything random; drawn and shown if not given."
)
@_json_option
def demo_command(out: Path, steps: int, seed: int | None, *, as_json: bool) -> int:
    """Train a small GPT with asynchronous saves, kill it, resume, and compare bit for bit."""
    screen = Screen(as_json=as_json)
    spec = DemoSpec(out=out, steps=steps) if seed is None else DemoSpec(out=out, steps=steps, seed=seed)
    report = run_demo(spec, screen)
    if as_json:
        screen.json(report)
    return 0 if report.is_identical else 1
