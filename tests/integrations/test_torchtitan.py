"""The manager for torchtitan, driven as torchtitan's Trainer drives it; skipped if torchtitan is not installed.

``pip install -e '.[dev,integrations]'`` installs it.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dcp_states import assert_same_state
from rank_processes import Ranks, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aio_ckpt

pytestmark = [pytest.mark.slow]
LONG_SECS = 300.0
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def needs_torchtitan() -> None:
    """Skip also where torchtitan is built for another torch than this."""
    for name in ("torchtitan.components.checkpointer", "torchtitan.components.optimizer"):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an import of somebody else's raises
            pytest.skip(f"{name} cannot be imported: {error}")


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with ranks(1) as running:
        yield running


# -- a trainer in the order of torchtitan's ---------------------------------------------------------


class Data:
    """Stateful data, with the names of torchtitan's ParallelAwareDataloader."""

    def __init__(self, rank: int, count: int) -> None:
        self.name, self.count, self.position = f"dp_rank_{rank}", count, 1000 * rank

    def batch(self) -> torch.Tensor:
        self.position += 1
        return torch.linspace(-1, 1, 40).reshape(4, 10) * (self.position % 97) + torch.rand(4, 10)

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(self.position), "world_size": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == self.count
        self.position = pickle.loads(state[self.name])


class Names:
    """torchtitan's adapter for files of Hugging Face, of a model whose names are the same there."""

    fqn_to_index_mapping = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


class Trainer:
    """One rank's trainer: states, order of the calls, and arguments of the manager are torchtitan's."""

    def __init__(
        self,
        rank: int,
        count: int,
        base: Path,
        *,
        stock: bool = False,
        seed: int = 1,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from aio_ckpt.integrations.torchtitan import AioCheckpointManager

        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(10, 36), torch.nn.Dropout(0.3), torch.nn.LayerNorm(36), torch.nn.Linear(36, 7)]
        self.model, self.device = torch.nn.Sequential(*layers).to(device), device
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh(device, (count,)))
        self.optimizers = default_adamw(implementation="for-loop").build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1.0 / (1 + step))
        self.data = Data(rank, count)
        self.step, self.ntokens_seen = 0, 0
        self.losses: dict[int, float] = {}
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(100 * seed + rank)
        known = {"enable": True, "interval": 2, "keep_latest_k": 0, "last_save_model_only": False}
        kind = CheckpointManager if stock else AioCheckpointManager
        self.load_step = settings.pop("load_step", -1)
        config = settings.pop("config", None) or kind.Config(**(known | settings))
        self.checkpointer = config.build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=Names(),
            base_folder=str(base),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def load(self) -> bool:
        return self.checkpointer.load(step=self.load_step)

    def train(self, until: int, steps: int = STEPS) -> None:
        """Train ``until`` this step; ``steps`` is torchtitan's ``training.steps``."""
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            loss = self.model(self.data.batch().to(self.device)).square().mean() * (
                1 + random.random() + np.random.rand()
            )
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += 4 + self.data.position // 1000  # another number on each rank, as in torchtitan
            self.losses[self.step] = loss.item()
            self.checkpointer.save(self.step, last_step=self.step == steps)

    def contents(self) -> dict[str, Any]:
        """Everything that is the same on any number of ranks."""
        tensors = {**self.model.state_dict(), **self.optimizers.state_dict()}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
        return whole | {"lr": self.schedulers.state_dict()["last_epoch"], "step": self.step}


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns. DCP's CheckpointException is no Exception, which alone a rank reports."""
    try:
        return fn()
    except dist.checkpoint.api.CheckpointException as error:
        raise RuntimeError(str(error)) from error


def runs(rank: int, count: int, folder: Path, until: int, settings: dict[str, Any]) -> Any:
    """Load if there is a checkpoint, train, close. Returns whether it loaded, the losses and the contents."""

    def run() -> Any:
        trainer = Trainer(rank, count, folder, **settings)
        has_loaded = trainer.load()
        trainer.train(until)
        trainer.checkpointer.close()
        return has_loaded, trainer.losses, trainer.contents()

    return told(run)


def kills(rank: int, count: int, folder: Path, until: int, settings: dict[str, Any]) -> None:
    """Train ``until`` this step, and die in the middle of the next one."""
    trainer = Trainer(rank, count, folder, **settings)
    trainer.load()
    trainer.train(until)
    trainer.checkpointer.maybe_wait_for_saving()
    os.kill(os.getpid(), signal.SIGKILL)


def keeps_its_random_numbers(rank: int, count: int, folder: Path, settings: dict[str, Any]) -> bool:
    trainer = Trainer(rank, count, folder, **settings)
    before = torch.get_rng_state(), random.getstate()
    assert trainer.load()
    trainer.checkpointer.close()
    return torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def warned(rank: int, count: int, folder: Path, settings: dict[str, Any]) -> list[str]:
    """What the engine warns of in a run."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aio_ckpt")
    logger.addHandler(handler)
    try:
        runs(rank, count, folder, 4, settings)
    finally:
        logger.removeHandler(handler)
    return lines


def run_and_die(count: int, folder: Path, until: int, **settings: Any) -> None:
    with ranks(count) as running:
        for rank in range(count):
            running.start(rank, kills, folder, until, settings)
        for rank in range(count):
            running.wait_until_dead(rank)


def committed(folder: Path) -> list[int]:
    """The steps of the folder of checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoint/step-*/.metadata"))


# -- save, resume -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_run_goes_on_with_equal_losses(one: Ranks, two: Ranks, tmp_path: Path, count: int, mode: str) -> None:
    alive = {1: one, 2: two}[count]
    wanted = alive.run(runs, tmp_path / "whole", 8, {"async_mode": mode}, timeout=LONG_SECS)
    run_and_die(count, tmp_path / "killed", 5, async_mode=mode)
    found = alive.run(runs, tmp_path / "killed", 8, {"seed": 2, "async_mode": mode}, timeout=LONG_SECS)
    assert len({losses[8] for _, losses, _ in found}) == count  # each rank has random numbers of its own
    for (has_loaded, losses, contents), (_, all_losses, all_contents) in zip(found, wanted, strict=True):
        assert has_loaded
        assert losses == {step: all_losses[step] for step in (5, 6, 7, 8)}
        assert_same_state(contents, all_contents)


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_and_its_resume_warn_of_nothing(one: Ranks, two: Ranks, tmp_path: Path, count: int) -> None:
    for seed in (1, 2):
        assert {1: one, 2: two}[count].run(warned, tmp_path, {"seed": seed}, timeout=LONG_SECS) == [[]] * count


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(
    one: Ranks, two: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    of = {1: one, 2: two}
    saved = of[before].run(runs, tmp_path, 4, {}, timeout=LONG_SECS)
    settings = {"seed": 2, "exclude_from_loading": ["dataloader"]}
    assert of[after].run(keeps_its_random_numbers, tmp_path, settings, timeout=LONG_SECS) == [True] * after
    for has_loaded, _, contents in of[after].run(runs, tmp_path, 4, settings, timeout=LONG_SECS):
        assert has_loaded
        assert_same_state(contents, saved[0][2])
    found = of[after].run(runs, tmp_path, 6, settings, timeout=LONG_SECS)
    assert [[*losses] for _, losses, _ in found] == [[5, 6]] * after


# -- between stock and ours ---------------------------------------------------------------------------


@pytest.mark.parametrize("writer_is_stock", [True, False])
def test_stock_and_ours_load_each_others_checkpoints(two: Ranks, tmp_path: Path, writer_is_stock: bool) -> None:
    saved = two.run(runs, tmp_path, 4, {"stock": writer_is_stock}, timeout=LONG_SECS)
    settings = {"seed": 2, "stock": not writer_is_stock}
    for (has_loaded, _, contents), (_, _, wanted) in zip(
        two.run(runs, tmp_path, 4, settings, timeout=LONG_SECS), saved, strict=True
    ):
        assert has_loaded
        assert_same_state(contents, wanted)
    found = two.run(runs, tmp_path, 8, settings, timeout=LONG_SECS)  # the other one goes on in the same folder
    assert [[*losses] for _, losses, _ in found] == [[5, 6, 7, 8]] * 2
    assert {f"step-{step}" for step in (2, 4, 6, 8)} <= {*os.listdir(tmp_path / "checkpoint")}


def test_what_a_killed_save_of_stock_left_behind_is_replaced(one: Ranks, tmp_path: Path) -> None:
    one.run(runs, tmp_path, 2, {"stock": True}, timeout=LONG_SECS)
    torn = tmp_path / "checkpoint/step-4"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"torn")
    [(_, losses, _)] = one.run(runs, tmp_path, 6, {}, timeout=LONG_SECS)
    assert [*losses] == [3, 4, 5, 6]
    assert (torn / ".metadata").is_file()
    assert [path.read_bytes() for path in torn.parent.glob("aside-4-*/*")] == [b"torn"]
    [(has_loaded, _, _)] = one.run(runs, tmp_path, 6, {"stock": True}, timeout=LONG_SECS)
    assert has_loaded


# -- policies of torchtitan -----------------------------------------------------------------------------


def makes_a_seed(rank: int, count: int, folder: Path) -> dict[str, Any]:
    """What torchtitan's ``train.py`` does with ``create_seed_checkpoint``."""
    trainer = Trainer(rank, count, folder, create_seed_checkpoint=True, last_save_model_only=True, seed=7)
    assert trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.checkpointer.close()
    return trainer.contents()


def test_a_seed_checkpoint_gives_the_model_to_any_number_of_ranks(one: Ranks, two: Ranks, tmp_path: Path) -> None:
    for _ in range(2):  # as with stock, the second one replaces the first
        [wanted] = one.run(makes_a_seed, tmp_path, timeout=LONG_SECS)
    for has_loaded, _, contents in two.run(runs, tmp_path, 0, {"seed": 2}, timeout=LONG_SECS):
        assert has_loaded
        weights = {name: each for name, each in wanted.items() if name in ("0.weight", "2.weight", "3.bias")}
        assert_same_state({name: contents[name] for name in weights}, weights)
        assert contents["step"] == 0
    found = two.run(runs, tmp_path, 4, {"seed": 2}, timeout=LONG_SECS)
    assert [[*losses] for _, losses, _ in found] == [[1, 2, 3, 4]] * 2


def test_the_last_save_holds_the_model_alone_in_the_dtype_of_export(two: Ranks, tmp_path: Path) -> None:
    settings = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    saved = two.run(runs, tmp_path, STEPS, settings, timeout=LONG_SECS)[0][2]
    state = aio_ckpt.read(tmp_path / f"checkpoint/step-{STEPS}")
    assert_same_state(state, {name: saved[name].bfloat16() for name in state})
    assert len(state) == 6
    path = str(tmp_path / f"checkpoint/step-{STEPS}")
    settings = {"initial_load_path": path, "export_dtype": "float32", "seed": 2}
    with pytest.raises(AssertionError, match="TemplateMismatchError"):  # as with stock, no dtype is converted
        two.run(runs, tmp_path / "new", 0, settings, timeout=LONG_SECS)


def test_an_initial_checkpoint_lies_anywhere(two: Ranks, tmp_path: Path) -> None:
    saved = two.run(runs, tmp_path / "old", 4, {}, timeout=LONG_SECS)[0][2]
    (tmp_path / "new/checkpoint").mkdir(parents=True)
    path = str((tmp_path / "old/checkpoint/step-4").rename(tmp_path / "new/checkpoint/pretrained"))
    for model_only in (True, False):
        settings = {"initial_load_path": path, "initial_load_model_only": model_only, "seed": 2}
        for has_loaded, _, contents in two.run(runs, tmp_path / "new", 0, settings, timeout=LONG_SECS):
            assert has_loaded
            assert_same_state(contents["0.weight"], saved["0.weight"])
            assert contents["step"] == (0 if model_only else 4)


def test_a_last_save_in_files_of_hugging_face_is_torchtitans_and_the_next_run_goes_on_before_it(
    two: Ranks, tmp_path: Path
) -> None:
    settings = {"last_save_model_only": True, "last_save_in_hf": True}
    two.run(runs, tmp_path, STEPS, settings, timeout=LONG_SECS)
    assert list((tmp_path / f"checkpoint/step-{STEPS}").glob("*.safetensors"))
    found = two.run(runs, tmp_path, STEPS, {"seed": 2}, timeout=LONG_SECS)
    assert [[*losses] for _, losses, _ in found] == [[7, 8]] * 2
    assert committed(tmp_path) == [2, 4, 6, 8]
    assert list(tmp_path.glob("checkpoint/aside-8-*/*.safetensors"))


def trains_stages(rank: int, count: int, folder: Path, stages: list[list[str]], seed: int) -> dict[str, Any]:
    """One pipeline stage a rank, which holds some layers; load, take a step, save."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from aio_ckpt.integrations.torchtitan import AioCheckpointManager

    torch.manual_seed(seed + rank)
    parts = [torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)}) for name in stages[rank]]
    optimizers = default_adamw(implementation="for-loop").build(model_parts=parts)
    manager = AioCheckpointManager.Config(enable=True, interval=1, last_save_model_only=False).build(
        dataloader=None,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1.0),
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
    if not manager.load():
        sum(each(torch.ones(2, 4)).sum() for part in parts for each in part.values()).backward()
        optimizers.step()
        manager.save(1)
    manager.close()
    return {name: each for part in parts for name, each in part.state_dict().items()} | optimizers.state_dict()


def test_layers_move_between_pipeline_stages(one: Ranks, two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(trains_stages, tmp_path, [["a", "b"], ["c"]], 1, timeout=LONG_SECS)
    moved = two.run(trains_stages, tmp_path, [["a"], ["b", "c"]], 5, timeout=LONG_SECS)
    [together] = one.run(trains_stages, tmp_path, [["a", "b", "c"]], 5, timeout=LONG_SECS)
    assert_same_state(moved[0] | moved[1], first | second)
    assert_same_state(together, first | second)


def test_names_that_are_excluded_from_loading_stay(one: Ranks, tmp_path: Path) -> None:
    one.run(runs, tmp_path, 4, {}, timeout=LONG_SECS)
    excluded = ["train_state", "dataloader", "lr_scheduler", "aio_ckpt_rng"]
    [(has_loaded, _, contents)] = one.run(runs, tmp_path, 0, {"exclude_from_loading": excluded}, timeout=LONG_SECS)
    assert has_loaded
    assert (contents["step"], contents["lr"]) == (0, 0)
    with pytest.raises(AssertionError, match="data_loader not found"):  # what torchtitan's page names
        one.run(runs, tmp_path, 0, {"exclude_from_loading": ["data_loader"]}, timeout=LONG_SECS)


def test_the_newest_k_steps_are_kept(two: Ranks, tmp_path: Path) -> None:
    two.run(runs, tmp_path, 4, {"stock": True}, timeout=LONG_SECS)
    two.run(runs, tmp_path, STEPS, {"keep_latest_k": 2}, timeout=LONG_SECS)
    assert committed(tmp_path) == [6, 8]


def test_a_run_that_loads_an_earlier_step_sets_the_later_ones_aside_when_it_saves(two: Ranks, tmp_path: Path) -> None:
    wanted = two.run(runs, tmp_path, STEPS, {}, timeout=LONG_SECS)
    two.run(runs, tmp_path, 4, {"load_step": 4, "load_only": True}, timeout=LONG_SECS)
    assert committed(tmp_path) == [2, 4, 6, 8]
    found = two.run(runs, tmp_path, 6, {"load_step": 4, "seed": 2}, timeout=LONG_SECS)
    assert committed(tmp_path) == [2, 4, 6]
    assert len(os.listdir(tmp_path / "checkpoint/.aio_ckpt/abandoned")) == 2
    for (_, losses, _), (_, all_losses, _) in zip(found, wanted, strict=True):
        assert losses == {step: all_losses[step] for step in (5, 6)}
    # The pattern by which stock finds and deletes steps is not anchored: nothing that was set aside may match it.
    found = two.run(runs, tmp_path, STEPS, {"stock": True, "keep_latest_k": 2}, timeout=LONG_SECS)
    assert [[*losses] for _, losses, _ in found] == [[7, 8]] * 2
    assert len(os.listdir(tmp_path / "checkpoint/.aio_ckpt/abandoned")) == 2


def test_a_damaged_newest_step_is_passed_by(two: Ranks, tmp_path: Path) -> None:
    wanted = two.run(runs, tmp_path, 6, {}, timeout=LONG_SECS)
    for path in (tmp_path / "checkpoint/step-6").glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(AssertionError, match="CorruptCheckpointError"):  # a step that was asked for has no other
        two.run(runs, tmp_path, 6, {"load_step": 6}, timeout=LONG_SECS)
    found = two.run(runs, tmp_path, 6, {"seed": 2}, timeout=LONG_SECS)
    for (_, losses, _), (_, all_losses, _) in zip(found, wanted, strict=True):
        assert losses == {step: all_losses[step] for step in (5, 6)}
    with pytest.raises(AssertionError, match="FileNotFoundError"):
        two.run(runs, tmp_path, 6, {"load_step": 5}, timeout=LONG_SECS)


# -- failures -------------------------------------------------------------------------------------------


def in_the_way(trainer: Trainer, step: int) -> None:
    """A file stands where ``step`` will be renamed to: that save fails in the background."""
    (Path(trainer.checkpointer.folder) / f"step-{step}").write_text("")


def test_a_failed_save_is_raised_once_and_the_next_one_works(tmp_path: Path, quiet: None) -> None:
    trainer = Trainer(0, 1, tmp_path)
    trainer.train(3)
    in_the_way(trainer, 4)
    trainer.train(5)
    with pytest.raises(aio_ckpt.WriteError, match="step-4"):
        trainer.train(6)
    assert trainer.checkpointer.save(6)
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.checkpointer.close()
    assert committed(tmp_path) == [2, 6]


def test_close_finishes_the_pending_save_and_raises_its_failure(tmp_path: Path, quiet: None) -> None:
    trainer = Trainer(0, 1, tmp_path)
    trainer.train(5)  # torchtitan's trainer ends here if it runs out of data
    trainer.checkpointer.close()
    assert committed(tmp_path) == [2, 4]
    other = Trainer(0, 1, tmp_path)
    assert other.load()
    in_the_way(other, 6)
    other.train(7)
    with pytest.raises(aio_ckpt.WriteError, match="step-6"):
        other.checkpointer.close()
    other.checkpointer.close()


def test_failures_are_only_logged_if_the_engine_is_told_so(tmp_path: Path, quiet: None) -> None:
    trainer = Trainer(0, 1, tmp_path, engine=aio_ckpt.EngineConfig(on_failure="log"))
    trainer.train(3)
    in_the_way(trainer, 4)
    trainer.train(7)
    trainer.checkpointer.close()
    assert committed(tmp_path) == [2, 6]


# -- without a wait ---------------------------------------------------------------------------------------


def test_staging_is_waited_for_by_the_stream_and_each_inner_optimizer_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced: list[int] = []
    guarded: list[object] = []
    monkeypatch.setattr(aio_ckpt.SaveTicket, "fence", lambda ticket, stream=None: fenced.append(ticket.step))
    monkeypatch.setattr(aio_ckpt.SyncCheckpointEngine, "guard", lambda _, optimizer: guarded.append(optimizer))
    trainer = Trainer(0, 1, tmp_path)
    trainer.train(5)
    trainer.checkpointer.close()
    assert guarded == list(trainer.optimizers)
    assert fenced == [2, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_on_a_gpu_a_run_goes_on_with_equal_losses(tmp_path: Path, mode: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        whole = Trainer(0, 1, tmp_path / "whole", device="cuda", async_mode=mode)
        whole.train(STEPS)
        whole.checkpointer.close()
        first = Trainer(0, 1, tmp_path / "cut", device="cuda", async_mode=mode)
        first.train(5)
        first.checkpointer.close()
        other = Trainer(0, 1, tmp_path / "cut", device="cuda", async_mode=mode, seed=2)
        assert other.load()
        other.train(STEPS)
        other.checkpointer.close()
    finally:
        torch.use_deterministic_algorithms(False)
    assert other.losses == {step: whole.losses[step] for step in (5, 6, 7, 8)}
    assert_same_state(other.contents(), whole.contents())


def test_no_thread_and_no_process_group_of_torchtitan_is_started(tmp_path: Path) -> None:
    trainer = Trainer(0, 1, tmp_path, keep_latest_k=3)
    assert (trainer.checkpointer.purge_thread, trainer.checkpointer.pg) == (None, None)
    trainer.checkpointer.close()


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path: Path) -> None:
    trainer = Trainer(0, 1, tmp_path, enable=False)
    assert not trainer.load()
    trainer.train(4)
    trainer.checkpointer.close()
    assert os.listdir(tmp_path) == []


# -- settings, and what torchtitan may change -------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("keep_last", 3), ("step_dir", "at-{step}")])
def test_what_torchtitan_decides_is_no_setting_of_the_engine(name: str, value: Any) -> None:
    from aio_ckpt.integrations.torchtitan import AioCheckpointManager

    with pytest.raises(aio_ckpt.ConfigError, match=f"engine.{name}.*keep_latest_k"):
        AioCheckpointManager.Config(enable=True, engine=aio_ckpt.EngineConfig(**{name: value}))


def test_settings_of_the_engine_come_from_the_command_line() -> None:
    tyro = importlib.import_module("tyro")
    from aio_ckpt.integrations.torchtitan import AioCheckpointManager

    config = tyro.cli(AioCheckpointManager.Config, args=["--interval", "7", "--engine.workers", "9"])
    assert (config.interval, config.engine.workers) == (7, 9)


def test_this_torchtitan_has_every_private_name_that_is_used() -> None:
    from aio_ckpt.integrations import torchtitan
    from aio_ckpt.integrations.patch_points import moved_names

    assert moved_names(torchtitan.PRIVATE_NAMES) == [], f"known to work: {torchtitan.KNOWN_TO_WORK}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("moved", ["method", "parameters", "attribute", "setting"])
def test_if_a_private_name_has_moved_torchtitans_own_manager_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moved: str
) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    from aio_ckpt.integrations import torchtitan

    stock = "torchtitan.components.checkpointer:CheckpointManager"
    names = {"method": {f"{stock}.of_old": ()}, "setting": {f"{stock}.Config.of_old": None}}
    if moved == "parameters":
        monkeypatch.setattr(CheckpointManager, "_find_load_step", lambda self, *, root: -1)
    elif moved == "attribute":
        monkeypatch.setitem(torchtitan.PRIVATE_NAMES, f"{stock}.__init__", frozenset({"of_old"}))
    else:
        monkeypatch.setattr(torchtitan, "PRIVATE_NAMES", names[moved])
    trainer = Trainer(0, 1, tmp_path, async_mode="disabled")
    assert type(trainer.checkpointer) is CheckpointManager
    [line] = [record for record in caplog.records if record.name == "aio_ckpt"]
    assert line.levelno == logging.WARNING
    assert "torchtitan 0.3.0" in line.getMessage()
    named = {"parameters": "_find_load_step", "attribute": "CheckpointManager.__init__"}.get(moved, "of_old")
    assert named in line.getMessage()
    if moved != "parameters":
        trainer.train(2)
        assert (tmp_path / "checkpoint/step-2/.metadata").is_file()
    trainer.checkpointer.close()


def test_a_remote_folder_stays_with_torchtitan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    trainer = Trainer(0, 1, tmp_path, async_mode="disabled", folder="memory://ckpt")
    assert type(trainer.checkpointer) is CheckpointManager
    assert "local file systems" in caplog.text


# -- the page -------------------------------------------------------------------------------------------


def runs_a_block(rank: int, count: int, folder: Path, text: str) -> tuple[bool, int]:
    """Train 500 steps more, by the config that a block of the page makes. Returns whether it loaded, and the step."""
    names: dict[str, Any] = {}
    exec(text, names)
    trainer = Trainer(rank, count, folder, config=names["checkpoint"])
    has_loaded = trainer.load()
    trainer.step += 499
    trainer.train(trainer.step + 1)
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.checkpointer.close()
    return has_loaded, trainer.step


def test_the_lines_of_the_page_run_and_each_loads_what_the_other_saved(one: Ranks, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/coming-from/torchtitan.md"
    blocks = [text for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "torchtitan" in text]
    before, after = blocks
    assert max(len(text.splitlines()) for text in blocks) <= 10
    found = [one.run(runs_a_block, tmp_path, text, timeout=LONG_SECS)[0] for text in (after, before, after)]
    assert found == [(False, 500), (True, 1000), (True, 1500)]
