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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from aio_ckpt.demo.model import ModelSize
from aio_ckpt.demo.report import Continuation, DemoReport, Run, draw, report_on
from aio_ckpt.demo.train import Event, Started, Stepped, TrainSpec, decode_event
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.names import PENDING_DIR
from aio_ckpt.reports import amount

Advance: TypeAlias = Callable[[int, str], None]
"""``advance(done, words)``: shows the number of steps done so far, and a text."""

MIN_STEPS = 20
"""Least number of steps. With fewer, no save is certainly durable before the kill."""

_MARKER = "demo.json"
_MAX_THREADS = 4


class Screen(Protocol):
    """Interface of the demo's output. The command line implements it."""

    def line(self, text: str = "", *, style: str = "") -> None:
        """Write one line."""

    def progress(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Show the progress towards ``total`` during the block."""


class DemoError(AioCkptError, RuntimeError):
    """The demo could not run to its end. The text names a remedy."""


class OutError(DemoError):
    """The directory for the demo cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpec:
    """Parameters of the demo."""

    out: Path
    """Directory for checkpoints, logs, ``demo.json`` and the plot."""
    steps: int = 100
    """Steps of training, at least ``MIN_STEPS``. There are ten saves."""
    seed: int = field(default_factory=lambda: secrets.randbelow(1 << 31))
    """Seed of the model, of the batches and of the step at which the run is killed."""
    size: ModelSize = field(default_factory=ModelSize)


def run_demo(spec: DemoSpec, screen: Screen) -> DemoReport:
    """Run the demo with its progress on ``screen`` and return its report. All files stay in ``spec.out``.

    Raises:
        OutError: ``out`` holds files of no demo, or cannot be written.
        DemoError: a run failed.
    """
    begin = time.perf_counter()
    _prepare(spec.out)
    base = _train_spec(spec)
    kill_step = random.Random(spec.seed).randint(spec.steps // 2, spec.steps * 4 // 5)
    screen.line(
        f"seed {spec.seed}, {spec.steps} steps, a save every {base.save_every}; {base.threads} torch thread(s), "
        "so that one core is the engine's"
    )
    undisturbed = _run(spec, "undisturbed", msgspec.structs.replace(base, save_every=0), screen)
    killed = _run(spec, "killed", base, screen, kill_step=kill_step)
    _tell_kill(killed, spec, screen)
    resumed_spec = msgspec.structs.replace(base, resumes=True)
    resumed = _run(spec, "resumed", resumed_spec, screen)

    report = report_on(undisturbed, killed, resumed, seed=spec.seed)
    _tell(report.continuation, resumed, screen)
    plot = draw(spec.out / "demo.png", undisturbed, killed, resumed)
    screen.line(_plot_line(plot))
    report = msgspec.structs.replace(report, secs=time.perf_counter() - begin, plot=str(plot) if plot else None)
    (spec.out / _MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    screen.line(f"{report.secs:.0f} s in all; look around with: {_command()} verify {spec.out / 'checkpoints'}")
    return report


def _command() -> str:
    """Return how a shell starts the command line: by its name if that is on the path."""
    started = sys.argv[0]
    if Path(started).name != "aio-ckpt":
        return f"{sys.executable} -m aio_ckpt"
    return "aio-ckpt" if shutil.which("aio-ckpt") == os.path.abspath(started) else started


def _prepare(out: Path) -> None:
    """Make ``out``, or clear the files that an earlier demo left there. Other files are not touched."""
    if out.exists() and not out.is_dir():
        raise OutError(f"{out} is a file: give a directory with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).is_file():
        raise OutError(f"{out} is not empty and not an earlier demo's: give another directory with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARKER).write_text("{}\n")
        if (out / "checkpoints").exists():
            shutil.rmtree(out / "checkpoints")
    except OSError as error:
        raise OutError(f"{error.filename or out}: {error.strerror}: give another directory with --out") from error


def _train_spec(spec: DemoSpec) -> TrainSpec:
    cores = len(os.sched_getaffinity(0))
    return TrainSpec(
        root=str((spec.out / "checkpoints").absolute()),
        seed=spec.seed,
        steps=spec.steps,
        save_every=spec.steps // 10,
        threads=max(1, min(_MAX_THREADS, cores - 1)),
        size=spec.size,
    )


# -- one run ----------------------------------------------------------------------------------------


def _run(spec: DemoSpec, name: str, train: TrainSpec, screen: Screen, *, kill_step: int | None = None) -> Run:
    """Run a child to its end, or kill it within the step after ``kill_step``."""
    run, log = Run(), spec.out / f"{name}.log"
    instant = random.Random(spec.seed + 1).random()
    with _child(train, log) as child, screen.progress(f"{name:<11} run", train.steps) as advance:
        for event in _events(child):
            run.add(event)
            _show(event, train.steps, advance, screen)
            if isinstance(event, Stepped) and event.step == kill_step:
                time.sleep(instant * event.secs)  # the kill may hit a write, a commit or neither
                child.kill()
        code = child.wait()
    if code not in (0, -signal.SIGKILL) or (code and kill_step is None):
        words = log.read_text(errors="replace").strip().splitlines()
        raise DemoError(f"the {name} run ended with {code}: {words[-1] if words else 'it said nothing'} ({log})")
    if kill_step is not None and code == 0:
        raise DemoError(f"the {name} run ended before it could be killed at step {kill_step}: give more --steps")
    return run


@contextmanager
def _child(train: TrainSpec, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that trains. It is killed at the end of the block, if it still runs."""
    # Threads of OpenMP that spin while they wait for each other would take the engine's core.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "aio_ckpt.demo.train", msgspec.json.encode(train).decode()]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def _events(child: subprocess.Popen[bytes]) -> Iterator[Event]:
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith(b"\n"):  # a line without an end was cut by the kill
            yield decode_event(line)


def _show(event: Event, steps: int, advance: Advance, screen: Screen) -> None:
    if isinstance(event, Started) and event.resumed_from is None:
        screen.line(
            f"{event.parameters / 1e6:.1f} M parameters, {amount(event.corpus_bytes)} of text "
            f"from {event.corpus_files} modules of this Python"
        )
    elif isinstance(event, Started):
        screen.line(
            f"resumed from step {event.resumed_from}: {amount(event.bytes_read)} read and verified"
            + "".join(f"; step {step} did not verify" for step in event.skipped)
        )
    elif isinstance(event, Stepped):
        advance(event.step, f"step {event.step}/{steps}, loss {event.loss:.4f}, {event.secs * 1e3:.0f} ms")


# -- words ------------------------------------------------------------------------------------------


def _tell_kill(killed: Run, spec: DemoSpec, screen: Screen) -> None:
    root = spec.out / "checkpoints"
    names = sorted(path.name for path in root.iterdir())
    pending = sorted(f"{PENDING_DIR}/{path.name}" for path in (root / PENDING_DIR).iterdir())
    torn = f"torn save left behind, invisible: {', '.join(pending)}" if pending else "no save was being written"
    committed = ", ".join(name for name in names if not name.startswith("."))
    screen.line(f"killed (SIGKILL) after step {killed.steps[-1].step}; committed: {committed}; {torn}")


def _plot_line(plot: Path | None) -> str:
    return f"plot: {plot}" if plot else "no plot: matplotlib is missing (pip install 'aio-ckpt[plot]')"


def _tell(found: Continuation, resumed: Run, screen: Screen) -> None:
    if found.is_identical:
        screen.line(
            f"bit for bit: all {found.losses_compared} losses of the killed and the resumed run, and every bit of "
            f"the final state ({resumed.digest[:16]}), equal the undisturbed run's",
            style="bold green",
        )
    else:
        screen.line(f"NOT bit for bit: {found.difference}", style="bold red")
