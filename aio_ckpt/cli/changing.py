"""``protect``, ``unprotect``, ``rm``, ``prune`` and ``rollback``: changes of a root from outside of its trainer.

They go by the engine's own routes, and delete and roll back under its lock.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aio_ckpt.cli.arguments import check_root, json_option, root_argument, step_dir_option
from aio_ckpt.cli.console import OnProgress, Screen, bytes_progress, counted
from aio_ckpt.cli.listing import best_rule
from aio_ckpt.cli.texts import plural, printable
from aio_ckpt.config import KeepBest
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, ProtectedStepError, StepOrderError
from aio_ckpt.format.root_names import ABANDONED_DIR, CORRUPT_DIR, TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line, steps_shown
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.cli.root_rows import RootRow
    from aio_ckpt.commit.retention import Policy
    from aio_ckpt.commit.root_claim import Claim
    from aio_ckpt.runtime.portal import Executor
    from aio_ckpt.storage.local import Storage


class _Step(click.IntRange):
    """Number of a step. The name of its directory is refused, because ``--step-dir`` tells how to read that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail."""
        if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
            self.fail(f"{value!r} is no step: give the number, such as 100 for step_000000100", param, ctx)
        return int(super().convert(value, param, ctx))


_STEP = _Step(0)


@click.command("protect", epilog="Example: aio-ckpt protect runs/ckpt 100")
@root_argument
@click.argument("step", type=_STEP)
@step_dir_option
@json_option
def protect_command(root: Path, step: int, names: StepNames, *, as_json: bool) -> None:
    """Never let retention delete STEP under ROOT. Works beside a trainer that saves there."""
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.protection import protect

    check_root(root, names)

    async def work(storage: Storage, _: Executor) -> None:
        await _check_committed(storage, root, names, step)
        await protect(storage, root, names, step)

    call(work)
    _print_protection(step, is_protected=True, as_json=as_json)


@click.command("unprotect", epilog="Example: aio-ckpt unprotect runs/ckpt 100")
@root_argument
@click.argument("step", type=_STEP)
@step_dir_option
@json_option
def unprotect_command(root: Path, step: int, names: StepNames, *, as_json: bool) -> None:
    """Let STEP under ROOT expire again."""
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.protection import unprotect

    check_root(root, names)
    call(lambda storage, _: unprotect(storage, root, step))
    _print_protection(step, is_protected=False, as_json=as_json)


def _print_protection(step: int, *, is_protected: bool, as_json: bool) -> None:
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"step": step, "is_protected": is_protected})
    else:
        screen.line(f"step {step} is {'protected' if is_protected else 'not protected'}")


@click.command("rm", epilog="Example: aio-ckpt rm runs/ckpt 100 200")
@root_argument
@click.argument("steps", metavar="STEP...", type=_STEP, nargs=-1)
@click.option("--allow-newest", is_flag=True, help="Delete the newest step, too.")
@click.option("--aside", is_flag=True, help="Delete what rollback or a load has set aside, in the place of a STEP.")
@step_dir_option
@json_option
def rm_command(
    root: Path, steps: tuple[int, ...], names: StepNames, *, allow_newest: bool, aside: bool, as_json: bool
) -> None:
    """Delete each STEP under ROOT, durably. Refuses protected steps, and all if it refuses one.

    No trainer may save there meanwhile: inside of it, call engine.delete(step).
    """
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.root_writer import as_writer

    if bool(steps) == aside:
        raise click.UsageError("Give one STEP or more, or --aside.", click.get_current_context())
    check_root(root, names)
    if aside:
        _print_deleted(call(lambda storage, _: _delete_aside(storage, root, names)), Screen(as_json=as_json))
        return

    async def work(storage: Storage, _: Executor) -> None:
        await _check_removable(storage, root, names, steps, allow_newest=allow_newest)
        async with as_writer(storage, root, names, instead=f"engine.delete({steps[0]})") as claim:
            await _delete_steps(storage, root, names, claim, set(steps), allow_newest=allow_newest)

    call(work)
    _print_deleted(sorted(set(steps)), Screen(as_json=as_json))


async def _check_removable(
    storage: Storage, root: Path, names: StepNames, steps: Collection[int], *, allow_newest: bool
) -> None:
    """Refuse to delete ``steps`` if one is not committed, is protected, or is the newest. Changes nothing.

    Raises:
        CheckpointNotFoundError, ProtectedStepError, StepOrderError: the three cases. Each names the remedy.
    """
    from aio_ckpt.commit.protection import protected_steps

    committed = await _check_committed(storage, root, names, *sorted(steps))
    marked = await protected_steps(storage, root)
    for step in sorted(steps):
        if step in marked:
            raise ProtectedStepError(
                f"step {step} is protected: {command_line('unprotect', root, step, *names.option)} ends that"
            )
        if step == committed[-1] and not allow_newest:
            raise StepOrderError(f"step {step} is the newest of {root}: --allow-newest deletes it all the same")


async def _check_committed(storage: Storage, root: Path, names: StepNames, *steps: int) -> list[int]:
    """Return the committed steps, ascending. Raises CheckpointNotFoundError unless ``steps`` are among them."""
    from aio_ckpt.cli.access import hint_below
    from aio_ckpt.commit.discovery import discover

    committed = [found.step for found in await discover(storage, root, names)]
    for step in steps:
        if step not in committed:
            known = steps_shown(committed) if committed else f"none{await hint_below(storage, root)}"
            raise CheckpointNotFoundError(f"step {step}: no such committed step under {root}; committed: {known}")
    return committed


async def _delete_steps(
    storage: Storage, root: Path, names: StepNames, claim: Claim, steps: Collection[int], *, allow_newest: bool
) -> None:
    """Delete steps, oldest first, durably, as the writer that holds the ``claim``.

    Raises:
        RootError: another writer has taken over meanwhile.
        CheckpointNotFoundError, ProtectedStepError, StepOrderError, WriteError: see :class:`Retention`. The steps
            before are in the trash, which the next writer deletes.
    """
    import anyio

    from aio_ckpt.commit.discovery import discover
    from aio_ckpt.commit.retention import Policy, Retention

    retention = Retention(
        storage,
        root,
        names,
        Policy(keep_last=None, keep_every=None, keep_best=None),
        check=claim.check,
        committed=lambda: discover(storage, root, names),
        renames=anyio.Lock(),
        must_wait=lambda: False,
    )
    await retention.discard(*steps, allow_newest=allow_newest)
    await retention.delete_discarded(*steps)


async def _delete_aside(storage: Storage, root: Path, names: StepNames) -> list[str]:
    """Delete what was set aside, durably. Return the directories, as paths below the root."""
    from aio_ckpt.commit.root_writer import as_writer
    from aio_ckpt.commit.trash import delete_trash
    from aio_ckpt.storage.local import names_in

    aside = [f"{at}/{name}" for at in (ABANDONED_DIR, CORRUPT_DIR) for name in await names_in(storage, root / at)]
    if not aside:
        return []
    async with as_writer(storage, root, names, instead=None) as claim:
        for directory in aside:
            trash = root / TRASH_DIR / directory.rpartition("/")[2]
            await claim.check()
            await storage.rename(root / directory, trash)
            await delete_trash(storage, trash)
    return aside


def _print_deleted(deleted: list[int] | list[str], screen: Screen) -> None:
    if screen.as_json:
        screen.json({"deleted": deleted})
    elif deleted:
        screen.line(f"deleted: {', '.join(map(str, deleted))}")
    else:
        screen.line("nothing to delete")


@click.command("prune", epilog="Example: aio-ckpt prune runs/ckpt --keep-last 3 --keep-every 1000")
@root_argument
@click.option("--keep-last", type=click.IntRange(1), required=True, help="Newest steps to keep.")
@click.option("--keep-every", type=click.IntRange(1), help="Keep the steps that are multiples of this, too.")
@click.option(
    "--keep-best",
    callback=best_rule,
    metavar="METRIC[:max]",
    help="Keep the best step, too: the one with the lowest metric, or the highest with :max.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@step_dir_option
@json_option
def prune_command(
    root: Path,
    keep_last: int,
    keep_every: int | None,
    keep_best: KeepBest | None,
    names: StepNames,
    *,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete the steps under ROOT that the rules do not keep. Shows them and asks first.

    Reads every byte of the newest step first: if it is damaged, nothing is deleted. Of other steps it reads the
    manifests; those that look damaged stay and do not count. Protected steps stay. No trainer may save there meanwhile:
    give it EngineConfig(keep_last=...) instead.
    """
    from aio_ckpt.cli.access import call, hint_below
    from aio_ckpt.cli.root_rows import STEPS_AT_ONCE, metric_fault, rows_of
    from aio_ckpt.commit.protection import protected_steps
    from aio_ckpt.commit.retention import Policy
    from aio_ckpt.commit.root_writer import as_writer

    check_root(root, names)
    screen = Screen(as_json=as_json)

    async def plan(storage: Storage, executor: Executor) -> tuple[list[RootRow], list[RootRow]]:
        """Return what ``EngineConfig`` with the same settings would delete, and what stays. Changes nothing."""
        rows, marked = await rows_of(storage, executor, root, names), await protected_steps(storage, root)
        if not rows and (hint := await hint_below(storage, root)):
            raise CheckpointNotFoundError(f"no committed checkpoint under {root}{hint}")
        policy = Policy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        gone = _expired_steps(rows, policy, marked)
        if gone and keep_best is not None and (fault := metric_fault(keep_best.metric, rows)):
            raise click.ClickException(f"{fault}; nothing is deleted")
        return [row for row in rows if row.step in gone], [row for row in rows if row.step not in gone]

    expired, kept = call(plan, readers=STEPS_AT_ONCE)
    if not expired:
        _print_deleted([], screen)
        return 0
    if kept[-1].is_damaged:
        raise _damaged_newest(root, names, kept[-1], str(kept[-1].fault))
    steps = [row.step for row in expired]
    if not yes:
        summary = f"{plural(len(steps), 'checkpoint')}, {amount(sum(row.nbytes for row in expired))}"
        click.echo(f"to be deleted: {', '.join(map(str, steps))}\n{summary}; {len(kept)} stay", err=as_json)
        if not _is_confirmed(to_stderr=as_json):
            return 1

    async def delete(storage: Storage, executor: Executor) -> list[int]:
        async with as_writer(storage, root, names, instead="engine.delete(step)") as claim:
            # Judged anew under the lock: a step may have been protected since. What was not shown is not deleted.
            still, kept = await plan(storage, executor)
            chosen = [row.step for row in still if row.step in steps]
            if chosen:
                await _check_data(storage, executor, root, names, kept[-1], on_progress)
            await _delete_steps(storage, root, names, claim, chosen, allow_newest=False)
            return chosen

    with bytes_progress(screen, "verify") as on_progress:
        deleted = call(delete, readers=STEPS_AT_ONCE)
    _print_deleted(deleted, screen)
    return 0


async def _check_data(
    storage: Storage, executor: Executor, root: Path, names: StepNames, newest: RootRow, on_progress: OnProgress
) -> None:
    """Read every byte of the newest step. Raises CorruptCheckpointError if it has a fault."""
    from aio_ckpt.checkpoint.verify import verify_checkpoint
    from aio_ckpt.cli.access import READERS

    faults = await verify_checkpoint(
        storage,
        root / Path(newest.path).name,
        step=newest.step,
        executor=executor,
        readers=READERS,
        on_progress=counted(0, newest.nbytes, newest.nbytes, on_progress),
    )
    if faults:
        raise _damaged_newest(root, names, newest, str(faults[0]))


def _damaged_newest(root: Path, names: StepNames, newest: RootRow, fault: str) -> CorruptCheckpointError:
    # The steps before it may be all that is good.
    return CorruptCheckpointError(
        f"step {newest.step}, the newest, is damaged ({printable(fault)}), and nothing is deleted: "
        f"run {command_line('verify', root, *names.option)}, then delete {newest.path}"
    )


def _expired_steps(rows: Sequence[RootRow], policy: Policy, protected: Collection[int]) -> set[int]:
    """Return the steps to delete. A checkpoint that looks damaged is not counted and stays: good ones are kept."""
    from aio_ckpt.commit.discovery import CommittedCheckpoint
    from aio_ckpt.commit.retention import expired

    good = [CommittedCheckpoint(step=row.step, path=Path(row.path)) for row in rows if row.fault is None]
    best = policy.keep_best
    metrics = {row.step: row.metrics.get(best.metric) for row in rows} if best is not None else None
    newest = max((checkpoint.step for checkpoint in good), default=-1)
    return {found.step for found in expired(good, policy, good=newest, protected=protected, metrics=metrics)}


def _is_confirmed(*, to_stderr: bool) -> bool:
    """Ask on the terminal.

    Raises:
        click.ClickException: standard input ended without an answer: it is no terminal.
    """
    try:
        # Not ``err=``: click writes a part of the question to standard output all the same in older versions.
        with contextlib.redirect_stdout(sys.stderr) if to_stderr else contextlib.nullcontext():
            return click.confirm("Delete them?")
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError):
            raise
        click.echo(err=True)
        raise click.ClickException("no answer on standard input, and nothing is deleted: give --yes") from error


@click.command("rollback", epilog="Example: aio-ckpt rollback runs/ckpt 100")
@root_argument
@click.argument("step", type=_STEP)
@step_dir_option
@json_option
def rollback_command(root: Path, step: int, names: StepNames, *, as_json: bool) -> None:
    """Go back to STEP: set all later steps of ROOT aside.

    A run resumes from STEP then. Nothing is deleted. No trainer may save there meanwhile: inside of it, call
    engine.rollback(step).
    """
    from aio_ckpt.cli.access import call
    from aio_ckpt.commit.protection import unprotect_after
    from aio_ckpt.commit.rollback import abandon_after
    from aio_ckpt.commit.root_writer import as_writer

    check_root(root, names)

    async def work(storage: Storage, _: Executor) -> list[int]:
        await _check_committed(storage, root, names, step)
        async with as_writer(storage, root, names, instead=f"engine.rollback({step})") as claim:
            abandoned = await abandon_after(storage, root, names, step, str(time.time_ns()), claim.check)
            await claim.check()
            await unprotect_after(storage, root, step)
            return abandoned

    abandoned = call(work)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"newest": step, "abandoned": abandoned})
    elif abandoned:
        screen.line(f"step {step} is the newest; set aside in {ABANDONED_DIR}: {', '.join(map(str, abandoned))}")
    else:
        screen.line(f"step {step} is the newest already")
