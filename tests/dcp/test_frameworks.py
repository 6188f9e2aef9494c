"""Unchanged frameworks on ``install``: torchtitan, Lightning and accelerate; a test without its package is skipped.

``pip install -e '.[dev,integrations]'`` installs the packages. Each test first runs the framework on stock, which has
to read what ours wrote.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import assert_same_state
from rank_processes import Ranks, ranks
from saved_files import ROOT_MANIFEST, without_save_id
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aio_ckpt.dcp import default

pytestmark = [pytest.mark.slow]
LONG_SECS = 300.0


def needs(*packages: str) -> None:
    """Skip the test if one of ``packages`` cannot be imported: also where it is built for another torch than this."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # noqa: BLE001 - whatever an import of somebody else's raises
            pytest.skip(f"{package} cannot be imported: {error}")


def is_ours(path: Path) -> bool:
    return {ROOT_MANIFEST, ".metadata"} <= set(map(without_save_id, os.listdir(path)))


def trained(count: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded model after one step of AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 36), torch.nn.ReLU(), torch.nn.Linear(36, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns. A CheckpointException is no Exception, which alone a rank reports."""
    warnings.simplefilter("ignore")
    try:
        return fn()
    except dcp.api.CheckpointException as error:
        raise RuntimeError(str(error)) from error


# -- torchtitan -------------------------------------------------------------------------------------


def titan_manager(count: int, folder: Path, mode: str, seed: int) -> tuple[Any, Any]:
    """torchtitan's own manager, over a model of this seed."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    model, _ = trained(count, seed)
    optimizers = default_adamw(implementation="for-loop").build(model_parts=[model])
    model(torch.ones(2, 10)).sum().backward()
    optimizers.step()
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0 / (1 + step))
    config = CheckpointManager.Config(
        enable=True, folder="checkpoint", interval=1, async_mode=mode, keep_latest_k=2, last_save_model_only=False
    )
    manager = CheckpointManager(
        config,
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
    return manager, {"model": model.state_dict(), "optimizer": optimizers.state_dict()}


def titan_saves(rank: int, count: int, folder: Path, mode: str) -> None:
    def save() -> None:
        with default():
            manager, _ = titan_manager(count, folder, mode, seed=1)
            for step in (1, 2, 3):
                assert manager.save(step)
                manager.maybe_wait_for_staging()
            assert manager.save(4, last_step=True)
            manager.close()

    told(save)


def titan_loads(rank: int, count: int, folder: Path, is_stock: bool) -> None:
    def load() -> None:
        _, wanted = titan_manager(count, folder / "elsewhere", "disabled", seed=1)
        with nullcontext() if is_stock else default():
            manager, before = titan_manager(count, folder, "disabled", seed=2)
            assert manager.load()
        model, optimizers = manager.states["model"], manager.states["optimizer"]
        found = {"model": model.model[0].state_dict(), "optimizer": optimizers.state_dict()}
        assert_same_state(found, wanted)
        assert before.keys() == found.keys()
        manager.close()

    told(load)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Ranks that no other module uses: the frameworks set environment variables and globals."""
    with ranks(2) as running:
        yield running


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitans_manager(two: Ranks, tmp_path: Path, mode: str) -> None:
    needs("torchtitan.components.checkpointer.dcp", "torchtitan.components.optimizer")
    two.run(titan_saves, tmp_path, mode, timeout=LONG_SECS)
    steps = sorted(os.listdir(tmp_path / "checkpoint"))
    assert steps[-2:] == ["step-3", "step-4"]
    assert mode == "async" or "step-1" not in steps  # titan's own purge; of pending saves it knows nothing
    assert all(is_ours(tmp_path / "checkpoint" / step) for step in steps)
    for is_stock in (False, True):
        two.run(titan_loads, tmp_path, is_stock, timeout=LONG_SECS)


# -- Lightning ----------------------------------------------------------------------------------------


def lightning_trains(rank: int, count: int, folder: Path, is_stock: bool, resume: bool) -> dict[str, Any]:
    """Train 2 epochs by ModelParallelStrategy; the sum of the parameters and the number of steps."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 36), torch.nn.ReLU(), torch.nn.Linear(36, 3))

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Ranks(LightningEnvironment):
        """The process group stands already."""

        creates_processes_externally = True
        global_rank = world_size = local_rank = node_rank = lambda self: 0  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.global_rank = self.local_rank = lambda: rank  # type: ignore[assignment,method-assign]
            self.world_size = lambda: count  # type: ignore[assignment,method-assign]

        def set_global_rank(self, rank: int) -> None: ...
        def set_world_size(self, size: int) -> None: ...

    def train() -> dict[str, Any]:
        data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(16, 8) / 128)
        path = folder / "last.ckpt"
        with nullcontext() if is_stock else default():
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=count,
                strategy=ModelParallelStrategy(data_parallel_size=count, tensor_parallel_size=1),
                plugins=[Ranks()],
                max_epochs=4 if resume else 2,
                callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0)],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            module = Module()
            loader = torch.utils.data.DataLoader(data, batch_size=4)
            trainer.fit(module, loader, ckpt_path=path if resume else None)
        total = sum(p.full_tensor().double().sum().item() for p in module.parameters())
        return {"steps": trainer.global_step, "total": total}

    os.environ["LOCAL_RANK"] = str(rank)
    return told(train)


def test_lightnings_fsdp2_strategy(two: Ranks, tmp_path: Path) -> None:
    needs("lightning.pytorch")
    for name in ("ours", "stock"):
        two.run(lightning_trains, tmp_path / name, name == "stock", False, timeout=LONG_SECS)
    assert is_ours(tmp_path / "ours" / "last.ckpt")
    assert not is_ours(tmp_path / "stock" / "last.ckpt")
    wanted = two.run(lightning_trains, tmp_path / "stock", True, True, timeout=LONG_SECS)
    assert two.run(lightning_trains, tmp_path / "ours", True, True, timeout=LONG_SECS) == wanted


# -- accelerate ---------------------------------------------------------------------------------------


def accelerate_round(rank: int, count: int, folder: Path) -> list[bool]:
    """Save by stock and by ours, load each by the other one.

    ``Accelerator.prepare`` shards on GPUs only, so this calls what ``save_state`` and ``load_state`` call.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils

    class Accelerator(PartialState):
        """What fsdp_utils asks of an Accelerator."""

        is_fsdp2 = True

    def run() -> list[bool]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator, seen = Accelerator(cpu=True), []
        for name in ("ours", "stock"):
            model, optimizer = trained(count, 1)
            path = str(folder / name)
            with default(package=True) if name == "ours" else nullcontext():
                fsdp_utils.save_fsdp_model(plugin, accelerator, model, path)
                fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
            other, other_optimizer = trained(count, 2)
            with nullcontext() if name == "ours" else default(package=True):
                fsdp_utils.load_fsdp_model(plugin, accelerator, other, path)
                fsdp_utils.load_fsdp_optimizer(plugin, accelerator, other_optimizer, other, path)
            assert_same_state(other.state_dict(), model.state_dict())
            assert_same_state(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
            seen += [is_ours(folder / name / "pytorch_model_fsdp_0"), is_ours(folder / name / "optimizer_0")]
        return seen

    return told(run)


def test_accelerates_sharded_fsdp_state(two: Ranks, tmp_path: Path) -> None:
    needs("accelerate")
    assert two.run(accelerate_round, tmp_path, timeout=LONG_SECS) == [[True, True, False, False]] * 2
