"""The demo: a real child, a real SIGKILL, a real resume."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from child_python import import_path
from warm_python import WarmPython

from aio_ckpt.cli.console import Screen
from aio_ckpt.config import EngineConfig
from aio_ckpt.demo import run
from aio_ckpt.demo.run import DemoError, DemoReport, _child, compare, run_demo
from aio_ckpt.demo.train import Event, ModelSize, Trainer, TrainSpec, decode_event, train
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.errors import ConfigError

SMALL = ModelSize(layers=1, width=64, heads=2, context=32, batch=4)
TINY = ModelSize(layers=1, width=16, heads=2, context=8, batch=2)


@pytest.fixture(scope="module", autouse=True)
def children_import_what_this_process_does() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", import_path())
        yield


@dataclass
class Shown:
    report: DemoReport
    text: str
    out: Path


def start_warm(command: list[str], **popen: Any) -> WarmPython:
    """Start ``python -m MODULE SPEC``, the demo's child, as a process that has imported torch already."""
    python, dash_m, module, spec = command
    assert (python, dash_m) == (sys.executable, "-m")
    child = WarmPython(f"from {module} import main\nmain()", spec, options=(), **popen)
    assert child.stdout is not None
    child.stdout = child.stdout.detach()  # the demo reads bytes
    return child


def start_first_fresh(command: list[str], **popen: Any) -> subprocess.Popen[Any]:
    """Start the undisturbed run as the demo does, and the others, whose losses must equal its own, warm."""
    is_undisturbed = msgspec.json.decode(command[-1], type=TrainSpec).save_every == 0
    return (subprocess.Popen if is_undisturbed else start_warm)(command, **popen)


def use_start(patch: pytest.MonkeyPatch, start: Callable[..., subprocess.Popen[Any]]) -> None:
    """Let the demo start its children by ``start``."""
    patch.setattr(run, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    out, text = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        use_start(patch, start_first_fresh)
        report = run_demo(out, Screen(as_json=False), steps=30, seed=11, size=SMALL)
    return Shown(report, text.getvalue(), out)


def test_a_run_killed_by_sigkill_and_resumed_equals_the_undisturbed_one_bit_for_bit(shown):
    report = shown.report
    assert report.is_identical, report.difference
    assert report.resumed_from % 3 == 0
    assert 0 < report.resumed_from <= report.killed_after < 30
    assert report.killed_after >= 15
    assert report.losses_compared == 30 + report.killed_after - report.resumed_from
    assert "killed (SIGKILL)" in shown.text
    assert "bit for bit: all" in shown.text


def test_progress_is_plain_lines_where_nobody_looks(shown):
    assert "undisturbed run: step" in shown.text
    assert "resumed     run: step" in shown.text
    assert "\x1b" not in shown.text
    assert "\r" not in shown.text


def test_the_report_is_kept(shown):
    kept = json.loads((shown.out / "demo.json").read_text())
    assert kept["is_identical"] is True
    assert kept["seed"] == 11


def test_the_last_line_is_a_command_that_runs_where_the_demo_did(shown):
    assert f"{sys.executable} -m aio_ckpt verify {shown.out / 'checkpoints'}" in shown.text.splitlines()[-1]


def test_the_checkpoints_stay_for_a_look(shown):
    assert (shown.out / "checkpoints" / "step_000000030" / ".metadata").exists()


# -- what is compared -------------------------------------------------------------------------------


def run_of(first: int, losses: list[float], digest: str = "") -> list[Event]:
    events = [Event(step=first + number, loss=loss, secs=0.1) for number, loss in enumerate(losses)]
    return [Event(step=first - 1, text="begins"), *events, Event(step=events[-1].step, digest=digest)]


WHOLE = [3.5, 2.25, 1.125, 0.75]


def test_equal_runs_are_found_equal():
    assert compare(run_of(1, WHOLE, "d"), run_of(1, WHOLE[:3]), run_of(3, WHOLE[2:], "d")) == (None, 5)


def test_one_changed_bit_of_one_loss_is_found():
    changed = [WHOLE[2], WHOLE[3] * (1 + sys.float_info.epsilon)]
    difference, _ = compare(run_of(1, WHOLE, "d"), run_of(1, WHOLE[:3]), run_of(3, changed, "d"))
    assert "step 4" in (difference or "")


def test_a_step_that_nobody_trained_is_found():
    difference, _ = compare(run_of(1, WHOLE, "d"), run_of(1, WHOLE[:1]), run_of(3, WHOLE[2:], "d"))
    assert difference == "3 of 4 steps were trained"


def test_a_different_final_state_behind_equal_losses_is_found():
    difference, _ = compare(run_of(1, WHOLE, "d"), run_of(1, WHOLE[:2]), run_of(3, WHOLE[2:], "e"))
    assert "final states" in (difference or "")


def test_a_loss_survives_the_pipe_bit_for_bit():
    loss = torch.tensor(2.0).log().item() / 3
    received = decode_event(msgspec.json.encode(Event(step=1, loss=loss)))
    assert received.loss is not None
    assert received.loss.hex() == loss.hex()


# -- the trainer ------------------------------------------------------------------------------------


def tiny(root: Path, **changes: object) -> TrainSpec:
    spec = TrainSpec(root=str(root), seed=3, steps=6, save_every=0, threads=1, size=TINY)
    return msgspec.structs.replace(spec, **changes)


async def trained(spec: TrainSpec) -> list[Event]:
    events: list[Event] = []
    await train(spec, events.append)
    return events


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if event.loss is not None}


async def test_saving_changes_no_loss_and_every_save_is_durable_at_the_end(tmp_path):
    without = await trained(tiny(tmp_path / "a"))
    saving = await trained(tiny(tmp_path / "b", save_every=2))
    assert losses(without) == losses(saving)
    assert [path.name for path in sorted((tmp_path / "b").glob("step_*"))] == [f"step_{n:09}" for n in (2, 4, 6)]
    assert without[-1] == saving[-1]
    assert saving[-1].digest


@pytest.mark.parametrize("forgotten", ["rng", "batches", "schedule", "optimizer"])
async def test_each_part_of_the_state_is_needed_to_continue_bit_for_bit(tmp_path, forgotten):
    spec = tiny(tmp_path, save_every=3)
    whole = losses(await trained(msgspec.structs.replace(spec, steps=6)))
    trainer = Trainer(spec)
    fresh_rng = torch.get_rng_state()
    async with CheckpointEngine(spec.root, EngineConfig()) as engine:
        template = {name: value for name, value in trainer.state().items() if name != forgotten}
        await engine.load(template, 3)
        torch.set_rng_state(fresh_rng if forgotten == "rng" else template["rng"].value)
    assert [trainer.train_step() for _ in range(3)] != [whole[step] for step in (4, 5, 6)]


async def test_the_whole_state_is_enough_to_continue_bit_for_bit(tmp_path):
    whole = await trained(tiny(tmp_path, save_every=3, steps=6))
    async with CheckpointEngine(tmp_path) as engine:
        (await engine.rollback(3))
    resumed = await trained(tiny(tmp_path, resumes=True, steps=6))
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 3}
    assert resumed[-1] == whole[-1]


# -- what goes wrong --------------------------------------------------------------------------------


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="--out"):
        run_demo(tmp_path, Screen(as_json=False), size=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_that_fails_is_told_with_its_last_words(tmp_path, capsys, monkeypatch):
    use_start(monkeypatch, start_warm)
    odd = ModelSize(layers=1, width=17, heads=2, context=8, batch=2)
    with pytest.raises(DemoError, match=r"undisturbed run ended with 1: .*Error.*undisturbed\.log"):
        run_demo(tmp_path / "out", Screen(as_json=False), steps=20, size=odd)


def test_no_child_outlives_a_parent_that_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), _child(tiny(tmp_path / "root"), tmp_path / "log") as child:
        assert child.poll() is None
        raise KeyboardInterrupt
    assert child.returncode is not None
    assert child.returncode != 0
