"""``aio-ckpt demo``: train, kill the trainer, resume it, and check that nothing was lost."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aio_ckpt.demo.train import Event, ModelSize, TrainSpec, decode_event
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.format.root_names import PENDING_DIR

if TYPE_CHECKING:
    from aio_ckpt.cli.console import Screen

_MARKER = "demo.json"
_MAX_THREADS = 4


class DemoError(AioCkptError, RuntimeError):
    """The demo could not run to its end. The text names a remedy."""


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the demo, as ``aio-ckpt demo --json`` prints it."""

    seed: int
    """Seed that repeats this run."""
    is_identical: bool
    """Whether the killed and the resumed run equal the undisturbed one bit for bit."""
    difference: str | None
    """Description of the first difference; None if every bit is the same."""
    losses_compared: int
    killed_after: int
    """Last step that the killed run finished."""
    resumed_from: int
    secs: float


def run_demo(
    out: Path, screen: Screen, *, steps: int = 100, seed: int | None = None, size: ModelSize | None = None
) -> DemoReport:
    """Run the demo with its progress on ``screen`` and return its report. All files stay in ``out``.

    Args:
        out: directory for checkpoints, logs and ``demo.json``.
        steps: steps of training. There are ten saves.
        seed: of the model, of the batches and of the step at which the run is killed; None: draw it.
        size: of the model; None: the default.

    Raises:
        ConfigError: ``out`` holds files of no demo, or cannot be written.
        DemoError: a run failed.
    """
    begin = time.perf_counter()
    _prepare(out)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    spec = TrainSpec(
        root=str((out / "checkpoints").absolute()),
        seed=seed,
        steps=steps,
        save_every=steps // 10,
        threads=max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 1)),
        size=size or ModelSize(),
    )
    screen.line(
        f"seed {seed}, {steps} steps, a save every {spec.save_every}; {spec.threads} torch thread(s), "
        "so that one core is the engine's"
    )
    kill_step = random.Random(seed).randint(steps // 2, steps * 4 // 5)
    undisturbed = _run(out, "undisturbed", msgspec.structs.replace(spec, save_every=0), screen)
    killed = _run(out, "killed", spec, screen, kill_step=kill_step)
    _print_kill(killed, Path(spec.root), screen)
    resumed = _run(out, "resumed", msgspec.structs.replace(spec, resumes=True), screen)
    difference, losses_compared = compare(undisturbed, killed, resumed)
    if difference is None:
        screen.line(
            f"bit for bit: all {losses_compared} losses of the killed and the resumed run, and every bit of "
            f"the final state ({resumed[-1].digest[:16]}), equal the undisturbed run's",
            style="bold green",
        )
    else:
        screen.line(f"NOT bit for bit: {difference}", style="bold red")
    report = DemoReport(
        seed=seed,
        is_identical=difference is None,
        difference=difference,
        losses_compared=losses_compared,
        killed_after=killed[-1].step,
        resumed_from=resumed[0].step,
        secs=time.perf_counter() - begin,
    )
    (out / _MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    command = sys.argv[0] if Path(sys.argv[0]).name == "aio-ckpt" else f"{sys.executable} -m aio_ckpt"
    screen.line(f"{report.secs:.0f} s in all; look around with: {command} verify {out / 'checkpoints'}")
    return report


def compare(undisturbed: Sequence[Event], killed: Sequence[Event], resumed: Sequence[Event]) -> tuple[str | None, int]:
    """Compare every loss and the final state, bit for bit.

    Returns:
        Description of the first difference, or None if there is none; and the number of losses that were compared.
    """
    expected = {event.step: event.loss.hex() for event in undisturbed if event.loss is not None}
    found = [(event.step, event.loss.hex()) for event in (*killed, *resumed) if event.loss is not None]
    steps, difference = {step for step, _ in found}, None
    if different := [(step, loss) for step, loss in found if expected.get(step) != loss]:
        step, loss = different[0]
        difference = f"loss of step {step} is {loss}, undisturbed {expected.get(step)}"
    elif steps != set(expected):
        difference = f"{len(steps)} of {len(expected)} steps were trained"
    elif resumed[-1].digest != undisturbed[-1].digest:
        difference = "the losses are equal, the final states are not"
    return difference, len(found)


def _prepare(out: Path) -> None:
    """Make ``out``, or clear the files that an earlier demo left there. Other files are not touched."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a directory with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).is_file():
        raise ConfigError(f"{out} is not empty and not an earlier demo's: give another directory with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).write_text("{}\n")
        if (out / "checkpoints").exists():
            shutil.rmtree(out / "checkpoints")
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror}: give another directory with --out") from error


def _run(out: Path, name: str, spec: TrainSpec, screen: Screen, *, kill_step: int | None = None) -> list[Event]:
    """Run a child to its end, or kill it within the step after ``kill_step``. Return its events."""
    events: list[Event] = []
    log = out / f"{name}.log"
    instant = random.Random(spec.seed + 1).random()
    with _child(spec, log) as child, screen.progress(f"{name:<11} run", spec.steps) as advance:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.endswith(b"\n"):
                break  # the kill cut it
            event = decode_event(line)
            events.append(event)
            if event.text and kill_step is None:
                screen.line(event.text)
            if event.loss is not None:
                words = f"step {event.step}/{spec.steps}, loss {event.loss:.4f}, {event.secs * 1e3:.0f} ms"
                advance(event.step, words)
                if event.step == kill_step:
                    time.sleep(instant * event.secs)  # the kill may hit a write, a commit or neither
                    child.kill()
        code = child.wait()
    if code not in (0, -signal.SIGKILL) or (code and kill_step is None):
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise DemoError(f"the {name} run ended with {code}: {last} ({log})")
    if kill_step is not None and code == 0:
        raise DemoError(f"the {name} run ended before it could be killed at step {kill_step}: give more --steps")
    return events


@contextmanager
def _child(spec: TrainSpec, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that trains. It is killed at the end of the block, if it still runs."""
    # Threads of OpenMP that spin while they wait for each other would take the engine's core.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "aio_ckpt.demo.train", msgspec.json.encode(spec).decode()]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def _print_kill(killed: Sequence[Event], root: Path, screen: Screen) -> None:
    committed = ", ".join(sorted(path.name for path in root.iterdir() if not path.name.startswith(".")))
    pending = sorted(f"{PENDING_DIR}/{path.name}" for path in (root / PENDING_DIR).iterdir())
    torn = f"torn save left behind, invisible: {', '.join(pending)}" if pending else "no save was being written"
    screen.line(f"killed (SIGKILL) after step {killed[-1].step}; committed: {committed}; {torn}")
