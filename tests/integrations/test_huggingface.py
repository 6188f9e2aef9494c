"""transformers' real Trainer with our mixin. Skipped without transformers.

``pip install -e '.[dev,integrations]'`` installs it. ``tests/unit/integrations`` tests what needs no transformers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from child_python import child_environment, python
from gated_storage import GatedStorage

from aio_ckpt import CorruptCheckpointError, SyncCheckpointEngine, UnsupportedLeafError, WriteError, read
from aio_ckpt.integrations.patch_points import moved_names
from aio_ckpt.runtime.portal import Executor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", exc_type=ImportError)
    pytest.importorskip("accelerate", exc_type=ImportError)
    import safetensors.torch
    from huggingface_hub.utils import filter_repo_objects
    from huggingface_runs import AioTrainer, arguments, dataset, losses, model, trainer
    from transformers import GPT2LMHeadModel, Trainer, TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback
    from transformers.trainer_utils import get_last_checkpoint

    from aio_ckpt.integrations import huggingface as adapter

pytestmark = [pytest.mark.filterwarnings("ignore")]
LONG_SECS = 300.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedStorage]:
    """The storage of all engines of the test."""
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)

    def opened(*args: Any, **options: Any) -> SyncCheckpointEngine:
        return SyncCheckpointEngine(*args, storage=storage, **options)

    monkeypatch.setattr(adapter, "SyncCheckpointEngine", opened)
    yield storage
    storage.open_gates()
    assert executor.close(LONG_SECS)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of stock Trainer that nothing interrupts."""
    made = trainer(tmp_path_factory.mktemp("stock"), Trainer)
    made.train()
    return made


class At(TrainerCallback):  # type: ignore[misc]
    """Callback that acts at the end of some steps."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.actions.get(state.global_step, bool)()


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder), key=lambda name: int(name.rpartition("-")[2]) if name[0] != "_" else -1)


def wait_written(run: Any) -> None:
    """Wait until the engine has written the pending checkpoint of a Trainer."""
    for ticket in run._aio_pending.tickets.values():
        ticket.result()


def open_gate(disk: GatedStorage, gate: Any) -> None:
    gate.wait_reached()
    disk.release(gate)
    gate.open()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- what is written ----------------------------------------------------------------------------------


def test_a_checkpoint_has_the_files_of_stock_and_their_checksums(tmp_path: Path, stock: Any) -> None:
    run = trainer(tmp_path)
    run.train()
    assert losses(run) == losses(stock)
    assert visible(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"]
    ours, theirs = tmp_path / "checkpoint-12", Path(stock.args.output_dir) / "checkpoint-12"
    assert set(os.listdir(ours)) == {*os.listdir(theirs), "checksums.sfv"}
    got, wanted = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (ours, theirs))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    weights = GPT2LMHeadModel.from_pretrained(ours).state_dict()
    torch.testing.assert_close(weights, GPT2LMHeadModel.from_pretrained(theirs).state_dict(), rtol=0, atol=0)


def test_stock_resumes_from_ours_and_ours_from_stock(tmp_path: Path, stock: Any) -> None:
    trainer(tmp_path, max_steps=6, lr_scheduler_type="constant").train()
    for kind in (Trainer, AioTrainer):
        run = trainer(tmp_path, kind, max_steps=9, lr_scheduler_type="constant")
        run.train(resume_from_checkpoint=True)
        assert min(losses(run)) == 1
        assert run.state.global_step == 9
        shutil.rmtree(tmp_path / "checkpoint-9")
    theirs = Path(stock.args.output_dir) / "checkpoint-9"
    resumed = [trainer(tmp_path / kind.__name__, kind) for kind in (Trainer, AioTrainer)]
    for run in resumed:
        run.train(resume_from_checkpoint=str(theirs))
        assert losses(run) == losses(stock)


def test_only_the_model_is_saved_if_the_user_wants_that(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=3, save_only_model=True).train()
    names = set(os.listdir(tmp_path / "checkpoint-3"))
    assert "model.safetensors" in names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-3")


def test_a_subclass_below_adds_files_to_the_same_commit(tmp_path: Path) -> None:
    class Adds(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            name = f"checkpoint-{self.state.global_step}"
            Path(self._get_output_dir(trial), name, "card.md").write_text("# card")

    class Mixed(adapter.AioTrainerMixin, Adds):  # type: ignore[misc]
        pass

    trainer(tmp_path, Mixed, max_steps=3).train()
    folder = tmp_path / "checkpoint-3"
    assert (folder / "card.md").read_text() == "# card"
    assert "card.md" in (folder / "checksums.sfv").read_text()


@pytest.mark.parametrize("has_links", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_files_that_a_user_puts_into_the_checkpoint_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, has_links: bool
) -> None:
    class Adds(adapter.AioTrainerMixin, Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if when == "after":
                super()._save_checkpoint(model, trial)
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            (folder / "ema").mkdir(parents=True, exist_ok=True)
            (folder / "ema" / "weights.txt").write_text(f"{self.state.global_step}")
            if when == "before":
                super()._save_checkpoint(model, trial)

    def link(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    if not has_links:
        monkeypatch.setattr(os, "link", link)
    trainer(tmp_path, Adds, max_steps=6).train()
    for step in (3, 6):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "ema" / "weights.txt").read_text() == f"{step}"
        (folder / "ema" / "weights.txt").write_text("edited")  # no checksum covers it
    trainer(tmp_path, max_steps=9).train(resume_from_checkpoint=True)
    assert visible(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]


def test_rotation_deletes_no_checkpoint_for_a_folder_that_holds_a_users_file_alone(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Adds(adapter.AioTrainerMixin, Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.wait_for_checkpoint()
            (tmp_path / f"checkpoint-{self.state.global_step}").mkdir()
            super()._save_checkpoint(model, trial)

        def wait_for_checkpoint(self) -> None:
            super().wait_for_checkpoint()
            seen.append([name for name in visible(tmp_path) if (tmp_path / name / "trainer_state.json").is_file()])

    trainer(tmp_path, Adds, save_total_limit=1).train()
    first = next(at for at, names in enumerate(seen) if names)
    assert all(seen[first:])  # once there was a whole one, there always is
    assert visible(tmp_path) == ["checkpoint-12"]


def test_what_a_killed_save_of_stock_left_is_not_taken_for_the_users(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_text("torn")
    mine = ["model_ema.safetensors", "ema/optimizer.pt"]
    (tmp_path / "checkpoint-3" / "ema").mkdir()
    for name in mine:
        (tmp_path / "checkpoint-3" / name).write_text("mine")
    trainer(tmp_path, max_steps=3, save_only_model=True).train()
    assert all((tmp_path / "checkpoint-3" / name).read_text() == "mine" for name in mine)
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()


@pytest.mark.parametrize("has_sums", [False, True])
def test_a_rerun_replaces_what_the_run_before_wrote_and_keeps_what_the_user_added(
    tmp_path: Path, has_sums: bool
) -> None:
    trainer(tmp_path, max_steps=3).train()
    folder = tmp_path / "checkpoint-3"
    (folder / "mine.txt").write_text("mine")
    trainer(tmp_path, max_steps=3, save_only_model=True).train()
    assert (folder / "mine.txt").read_text() == "mine"
    assert "optimizer.pt" not in os.listdir(folder)
    if has_sums:
        (folder / "checksums.sfv").write_text("damaged")
    else:
        (folder / "checksums.sfv").unlink()  # as a checkpoint of stock: nobody knows which files are the user's
    trainer(tmp_path, max_steps=3).train()
    assert "mine.txt" not in os.listdir(folder)


# -- the commit, and what waits for it ------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written_and_rotation_follows_the_commit(
    tmp_path: Path, disk: GatedStorage
) -> None:
    seen: dict[str, list[str]] = {}

    def hold() -> None:
        run.wait_for_checkpoint()  # else the gate may hold that one
        seen["first"] = visible(tmp_path)
        held.append(disk.hold("replace", "optimizer.pt"))

    def look() -> None:
        held[0].wait_reached()
        seen["pending"] = visible(tmp_path)
        open_gate(disk, held[0])

    held: list[Any] = []
    run = trainer(tmp_path, save_total_limit=1, callbacks=[At({5: hold, 8: look})])
    run.train()
    assert seen == {"first": ["checkpoint-3"], "pending": ["_aio_ckpt-draft", "checkpoint-3"]}
    assert visible(tmp_path) == ["checkpoint-12"]


def test_a_save_that_is_due_is_made_though_the_one_before_becomes_visible_now(tmp_path: Path) -> None:
    class Asks(TrainerCallback):  # type: ignore[misc]
        """As a callback that saves on demand."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                control.should_save = True
                wait_written(run)  # so that this step makes the one before visible

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 3 == 0:
                run.wait_for_checkpoint()

    run = trainer(tmp_path, callbacks=[Asks()])
    run.train()
    assert visible(tmp_path) == [f"checkpoint-{step}" for step in (3, 6, 7, 9, 12)]


def test_a_checkpoint_becomes_visible_in_a_trainer_with_a_step_of_its_own(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Own(adapter.AioTrainerMixin, Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()  # type: ignore[no-any-return]

    def look() -> None:
        seen.append(visible(tmp_path))

    run = trainer(tmp_path, Own, max_steps=6, callbacks=[At({4: lambda: wait_written(run), 5: look})])
    run.train()
    assert seen == [["checkpoint-3"]]


def test_a_users_methods_find_the_files_that_they_save_beside_and_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(AioTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            torch.save({"step": self.state.global_step}, folder / "ema.pt")

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            sizes.append(os.path.getsize(Path(output_dir or self.args.output_dir, "model.safetensors")))

    sizes: list[int] = []
    trainer(tmp_path, Mine).train()
    for step in (3, 6, 9, 12):
        assert torch.load(tmp_path / f"checkpoint-{step}" / "ema.pt") == {"step": step}
    assert len(sizes) == 4
    assert caplog.text.count("Mine._save_checkpoint may use the files") == 1
    assert caplog.text.count("Mine._save may use the files") == 1

    class Below(Trainer):  # type: ignore[misc]
        _save = Mine._save

    class Apart(adapter.AioTrainerMixin, Below):  # type: ignore[misc]
        pass

    caplog.clear()
    assert not Apart.__new__(Apart)._aio_is_overridden("_save")
    assert not caplog.text
    resumed = trainer(tmp_path, max_steps=15)
    resumed.train(resume_from_checkpoint=True)
    assert min(losses(resumed)) == 1
    assert max(losses(resumed)) == 15


def test_an_empty_placeholder_of_transformers_is_none_of_the_engines_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZeRO-3, transformers saves an empty dict of weights, and removes its file."""

    run, real = trainer(tmp_path), Trainer._save

    def save(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        real(self, output_dir, state_dict)
        file = Path(output_dir) / "placeholder.safetensors"
        safetensors.torch.save_file({}, file)
        file.unlink()

    save.__module__ = "transformers.trainer"
    monkeypatch.setattr(Trainer, "_save", save)
    run.train()
    assert not (tmp_path / "checkpoint-12/placeholder.safetensors").exists()
    assert (tmp_path / "checkpoint-12/model.safetensors").exists()


@pytest.mark.parametrize("module", ["my_callbacks", "transformers.integrations"])
def test_callbacks_hear_of_a_save_once_it_is_visible(
    tmp_path: Path, module: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[int, bool]] = []
    later: list[int] = []

    class Hears(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            heard.append((state.global_step, Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()))
            if run.state.global_step != state.global_step or begun[-1] > state.global_step:
                later.append(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step + 1)

    begun: list[int] = []
    Hears.__module__ = module
    run = trainer(tmp_path, callbacks=[Hears()])
    run.train()
    assert heard == [(3, True), (6, True), (9, True), (12, True)]
    is_of_user = module == "my_callbacks"
    assert later == ([] if is_of_user else [3, 6, 9]), "a user's callback may save the model beside its checkpoint"
    assert caplog.text.count("Hears.on_save may use the model") == is_of_user


def test_a_module_that_transformers_cannot_resume_is_refused_by_its_first_save(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(300, 8)
            self.head = torch.nn.Linear(8, 300, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.embed(input_ids))
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    run = AioTrainer(model=Net(), args=arguments(tmp_path), train_dataset=dataset())
    with pytest.raises(RuntimeError, match="share memory"):
        run.train()
    assert [name for name in visible(tmp_path) if name.startswith("checkpoint-")] == []


def test_the_hub_gets_visible_checkpoints(tmp_path: Path, disk: GatedStorage) -> None:
    pushed = []

    class Hub(Trainer):  # type: ignore[misc]
        def init_hf_repo(self, *args: Any, **options: Any) -> None:
            self.push_in_progress = None

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            step = self.state.global_step  # which the commit's message names
            pushed.append((Path(checkpoint_folder).name, Path(checkpoint_folder, "optimizer.pt").is_file(), step))

    class Mixed(adapter.AioTrainerMixin, Hub):  # type: ignore[misc]
        pass

    gates = [disk.hold("replace", "optimizer.pt")]
    run = trainer(
        tmp_path, Mixed, max_steps=6, push_to_hub=True, callbacks=[At({5: lambda: open_gate(disk, gates[0])})]
    )
    run.train()
    assert pushed == [("checkpoint-3", True, 3), ("checkpoint-6", True, 6)]
    assert run.state.global_step == 6


def test_the_draft_has_a_name_that_transformers_does_not_push() -> None:
    names = ["config.json", "checkpoint-3/a.pt", f"{adapter._DRAFTS}/checkpoint-6/a.pt"]
    assert [*filter_repo_objects(names, ignore_patterns=["_*", "checkpoint-*"])] == ["config.json"]


@pytest.mark.parametrize("limit", [None, 1])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, limit: int | None) -> None:
    options: Any = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_total_limit": limit,
    }
    options |= {"learning_rate": 0.3, "metric_for_best_model": "loss"}
    theirs = trainer(tmp_path / "stock", Trainer, **options)
    theirs.train()
    ours = trainer(tmp_path / "ours", **options)
    ours.train()
    assert ours.state.best_metric == theirs.state.best_metric
    assert ours.state.best_model_checkpoint == str(tmp_path / "ours" / Path(theirs.state.best_model_checkpoint).name)
    assert visible(tmp_path / "ours") == visible(tmp_path / "stock")
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    newest = tmp_path / "ours" / visible(tmp_path / "ours")[-1]
    saved = json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert saved == ours.state.best_model_checkpoint


def test_the_best_checkpoint_is_found_in_a_directory_that_was_moved(tmp_path: Path) -> None:
    options: Any = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_total_limit": 2,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }

    class Scored(AioTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            found: dict[str, float] = super().evaluate(*args, **kwargs)
            return {**found, "eval_score": float(self.state.global_step == 3)}

    trainer(tmp_path / "one", Scored, max_steps=6, **options).train()
    os.rename(tmp_path / "one", tmp_path / "other")
    run = trainer(tmp_path / "other", Scored, max_steps=12, **options)
    run.train(resume_from_checkpoint=True)
    assert visible(tmp_path / "other") == ["checkpoint-3", "checkpoint-12"]
    assert run.state.best_model_checkpoint == str(tmp_path / "other" / "checkpoint-3")


class Interrupted:
    """Ticket whose first waits Ctrl-C ends."""

    def __init__(self, ticket: Any, gate: Any, times: int) -> None:
        self.ticket, self.gate, self.times, self.waits = ticket, gate, times, 0

    def result(self) -> Any:
        self.waits += 1
        if self.waits <= self.times:
            raise KeyboardInterrupt
        self.gate.open()
        return self.ticket.result()

    def cancel(self) -> bool:
        is_cancelled = self.ticket.cancel()
        self.gate.open()
        return bool(is_cancelled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ticket, name)


@pytest.mark.parametrize(("times", "left"), [(1, ["checkpoint-3"]), (2, [])])
def test_ctrl_c_while_training_waits_for_a_checkpoint_does_not_lose_it_unless_it_comes_again(
    tmp_path: Path, disk: GatedStorage, times: int, left: list[str]
) -> None:
    gates: list[Any] = []

    def interrupt() -> None:
        tickets = run._aio_pending.tickets
        path = next(iter(tickets))
        tickets[path] = Interrupted(tickets[path], gates[0], times)

    hold = At({2: lambda: gates.append(disk.hold("replace", "optimizer.pt")), 5: interrupt})
    run = trainer(tmp_path, callbacks=[hold])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.state.global_step == 6
    assert visible(tmp_path) == left


def test_sigterm_leaves_a_whole_checkpoint(tmp_path: Path, stock: Any) -> None:
    def terminate() -> None:
        jit = next(each for each in run.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
        jit.jit_manager.kill_wait = 0
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()

    seen: dict[str, list[str]] = {}

    class Looks(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            seen["saving"] = visible(tmp_path)
            super()._save_checkpoint(model, trial)

    class Mixed(adapter.AioTrainerMixin, Looks):  # type: ignore[misc]
        pass

    before = signal.getsignal(signal.SIGTERM)
    actions = {4: terminate, 5: lambda: seen.update(saved=visible(tmp_path))}
    run = trainer(tmp_path, Mixed, enable_jit_checkpoint=True, callbacks=[At(actions)])
    run.train()
    signal.signal(signal.SIGTERM, before)
    assert seen == {"saving": ["checkpoint-3"], "saved": ["checkpoint-3", "checkpoint-4"]}
    assert visible(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert "checkpoint-is-incomplete.txt" not in os.listdir(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(stock)


def test_a_checkpoint_of_the_same_step_is_replaced_whole(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=3).train()
    inode = os.stat(tmp_path / "checkpoint-3").st_ino
    trainer(tmp_path, max_steps=3).train()
    assert os.stat(tmp_path / "checkpoint-3").st_ino != inode
    assert visible(tmp_path) == ["checkpoint-3"]


# -- failures -----------------------------------------------------------------------------------------


def test_a_failed_save_ends_training_and_leaves_the_older_checkpoint(tmp_path: Path, disk: GatedStorage) -> None:
    def fail() -> None:
        run.wait_for_checkpoint()
        disk.fail("replace", "optimizer.pt", WriteError(28, "No space left on device"))

    run = trainer(tmp_path, save_total_limit=1, callbacks=[At({4: fail})])
    with pytest.raises(WriteError, match="No space left"):
        run.train()
    assert visible(tmp_path) == ["checkpoint-3"]
    assert run.state.global_step < 12


def test_resume_passes_over_damaged_checkpoints(tmp_path: Path, stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path).train()
    flip(tmp_path / "checkpoint-12" / "model.safetensors")
    flip(tmp_path / "checkpoint-9" / "optimizer.pt")
    (tmp_path / "checkpoint-15").mkdir()
    run = trainer(tmp_path)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        run.train(resume_from_checkpoint=True)
    assert "model.safetensors is damaged" in caplog.text
    assert "optimizer.pt is damaged" in caplog.text
    assert "if you changed the checkpoint on purpose, delete its checksums.sfv" in caplog.text
    assert "checkpoint-15 is incomplete" in caplog.text
    assert losses(run) == losses(stock)
    assert get_last_checkpoint(tmp_path).endswith("checkpoint-15")
    with pytest.raises(CorruptCheckpointError, match=r"resume_from_checkpoint=True"):
        flip(tmp_path / "checkpoint-9" / "optimizer.pt")
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_no_checkpoint_is_the_error_of_stock(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


def test_what_the_engine_cannot_save_is_saved_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedLeafError("it is a tensor of another kind")

    monkeypatch.setattr(SyncCheckpointEngine, "save_file", refuse)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        trainer(tmp_path, max_steps=3).train()
    assert "transformers writes it now: it is a tensor of another kind" in caplog.text
    assert {"model.safetensors", "optimizer.pt", "checksums.sfv"} <= set(os.listdir(tmp_path / "checkpoint-3"))


def test_if_a_private_name_has_moved_transformers_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert moved_names(adapter.PRIVATE_NAMES) == [], f"{adapter.KNOWN_TO_WORK} are known to work"
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: None)
    monkeypatch.setitem(adapter.PRIVATE_NAMES, "transformers:trainer_utils.turns_checkpoints", None)
    moved = ["transformers.Trainer._push_from_checkpoint", "transformers.trainer_utils.turns_checkpoints"]
    assert moved_names(adapter.PRIVATE_NAMES) == moved
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        trainer(tmp_path, max_steps=6).train()
    assert caplog.text.count("transformers itself saves") == 1
    assert "checksums.sfv" not in os.listdir(tmp_path / "checkpoint-6")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from gated_storage import GatedStorage
    from huggingface_runs import trainer
    from transformers import TrainerCallback
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.integrations import huggingface
    from aio_ckpt.runtime.portal import Executor

    disk = GatedStorage(Executor("gated", 4))
    huggingface.SyncCheckpointEngine = lambda *args, **options: SyncCheckpointEngine(*args, storage=disk, **options)

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 8:
                run.wait_for_checkpoint()
                self.gate = disk.hold("replace", "optimizer.pt")
            if state.global_step == 11:
                self.gate.wait_reached()
                os.kill(os.getpid(), signal.SIGKILL)

    run = trainer(Path(sys.argv[1]), save_total_limit=1, callbacks=[Kill()])
    run.train()
"""


def test_a_run_that_is_killed_in_the_middle_of_a_save_resumes_with_equal_losses(tmp_path: Path, stock: Any) -> None:
    done = subprocess.run(python(KILLED, str(tmp_path), options=()), env=child_environment(), capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert visible(tmp_path) == ["_aio_ckpt-draft", "checkpoint-6"]
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(stock)
    assert visible(tmp_path) == ["checkpoint-6", "checkpoint-9", "checkpoint-12"]


# -- two ranks ------------------------------------------------------------------------------------------

RANK = """
    import json, sys
    from pathlib import Path
    from huggingface_runs import load_to_numbered_cpus, losses, trainer

    load_to_numbered_cpus()
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    run = trainer(folder, max_steps=6, save_total_limit=2)
    run.train(resume_from_checkpoint=wanted)
    if run.args.process_index == 0:
        print("LOSSES", json.dumps(losses(run)))
"""


def of_two_ranks(folder: Path, wanted: Any) -> str:
    """What rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            python(RANK, str(folder), json.dumps(wanted), options=()),
            env=child_environment(RANK=str(rank), LOCAL_RANK=str(rank), **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LONG_SECS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return next(line for line in outputs[0][0].splitlines() if line.startswith("LOSSES"))


@pytest.mark.slow
def test_two_ranks_save_one_checkpoint_and_resume_alike(tmp_path: Path) -> None:
    whole = of_two_ranks(tmp_path, None)
    names = set(os.listdir(tmp_path / "checkpoint-6"))
    assert {"rng_state_0.pth", "rng_state_1.pth", "checksums.sfv"} <= names
    flip(tmp_path / "checkpoint-6" / "rng_state_1.pth")
    assert of_two_ranks(tmp_path, True) == whole
    assert visible(tmp_path) == ["checkpoint-3", "checkpoint-6"]


# -- the page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> dict[str, str]:
    """The blocks of Python of each section of the page, one after the other."""
    text = (Path(__file__).parents[2] / "docs/coming-from/huggingface.md").read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    return {title: "\n".join(re.findall(r"```python\n(.*?)```", part, re.S)) for title, part in sections.items()}


def test_the_page_trains_resumes_and_keeps_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(page["Trainer"], {"model": model(), "data": dataset(), "__name__": "page"})
    assert visible(tmp_path / "runs/after") == visible(tmp_path / "runs/before") == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "runs/after/checkpoint-6/checksums.sfv").is_file()


def test_the_page_saves_what_accelerate_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    names = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "torch": torch, "__name__": "page"}
    exec(page["accelerate"], names)
    saved = read(tmp_path / "runs/acc-aio/step_000000010")
    torch.testing.assert_close(saved["model"], dict(net.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(saved["optimizer"]["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert saved["scheduler"]["last_epoch"] == scheduler.last_epoch
    assert torch.equal(names["state"]["rng"].value, torch.get_rng_state())
