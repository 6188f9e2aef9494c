"""Doors of ``bench.adapters``: for each framework a trainer, its own save, and the save with our adapter."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aio_ckpt.dcp
from aio_ckpt import EngineConfig, SyncCheckpointEngine

__all__ = ["DOORS", "OURS", "STOCK", "Door", "Job"]

dist: Any = torch.distributed  # whose stubs leave most of it out
dcp: Any = torch.distributed.checkpoint

STOCK, OURS = "stock", "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks of one door are told."""

    door: str
    """Name in :data:`DOORS`."""
    folder: Path
    """Of this door alone."""
    mib: int
    """Size of the state, about: of all ranks together."""
    rounds: int
    """Timed rounds, after one that warms up."""
    steps: int
    """Steps beside a save, and without one."""
    device: str
    """``cpu`` or ``cuda``."""

    @property
    def is_cuda(self) -> bool:
        """Whether each rank has a GPU."""
        return self.device == "cuda"

    @property
    def saved(self) -> Path:
        """Where checkpoints go that the bench deletes."""
        return self.folder / "saved"

    @property
    def width(self) -> int:
        """Of the layers: small states have many layers too."""
        return 2048 if self.mib >= 400 else 512

    def count_of(self, layer_bytes: int) -> int:
        """Number of layers that fill the state."""
        return max(1, round((self.mib << 20) / layer_bytes))


Wait = Callable[[], object]
"""Returns once the save is done, by the framework's own word."""
Save = Callable[[Path], Wait]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A trainer of a framework with its saves."""

    saves: Mapping[str, Save]
    """By :data:`STOCK` and :data:`OURS`."""
    drive: Callable[[Iterator[None]], object]
    """Makes one step for each item of the iterator, to its end."""
    close: Callable[[], object] = lambda: None
    """Releases what the saves hold."""


def _layers(job: Job) -> torch.nn.Sequential:
    torch.manual_seed(0)
    count = job.count_of(12 * job.width**2)  # fp32, and two moments of AdamW
    layers = [torch.nn.Linear(job.width, job.width, bias=False) for _ in range(count)]
    for layer in layers:  # with torch's own start, deep gradients are denormal numbers, which slow the CPU down
        torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    return torch.nn.Sequential(*layers)


def _sharded(job: Job, mesh: Any = None) -> torch.nn.Module:
    model = _layers(job).to(job.device)
    fully_shard(model, mesh=mesh or init_device_mesh(job.device, (dist.get_world_size(),)))
    return model


def _adamw(model: torch.nn.Module, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=job.is_cuda)


def _batch(job: Job) -> torch.Tensor:
    return torch.rand(2048 if job.is_cuda else 8, job.width, device=job.device)


def _own_loop(
    job: Job, model: torch.nn.Module, optimizer: Any, before_update: Callable[[], object] = lambda: None
) -> Callable[[Iterator[None]], object]:
    """Return a loop as in a plain script."""
    batch = _batch(job)

    def drive(steps: Iterator[None]) -> None:
        for _ in steps:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            before_update()
            optimizer.step()

    return drive


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _dcp(job: Job) -> Door:
    """``dcp.async_save`` in a plain script with FSDP2, without and with ``aio_ckpt.dcp.install()``."""
    model = _sharded(job)
    optimizer = _adamw(model, job)
    group = dist.new_group(backend="gloo")  # a thread of DCP uses it beside the training's collectives
    handle = aio_ckpt.dcp.install()
    placed = [*handle._placed]

    def put(*, is_ours: bool) -> None:
        for place, stand_in, stock in placed:
            place.put(stand_in if is_ours else stock)

    def save(path: Path, *, is_ours: bool) -> Wait:
        put(is_ours=is_ours)  # the installation stands through all rounds, as in a script
        wait: Wait = dcp.async_save(_state(model, optimizer), checkpoint_id=path, process_group=group).result
        return wait

    def close() -> None:
        put(is_ours=True)
        handle.uninstall()

    return Door(saves=_both(save), drive=_own_loop(job, model, optimizer), close=close)


def _both(save: Callable[..., Wait]) -> Mapping[str, Save]:
    return {STOCK: functools.partial(save, is_ours=False), OURS: functools.partial(save, is_ours=True)}


def _files(job: Job) -> Door:
    """``torch.save``, and ``engine.save_file``; of one rank."""
    model = _layers(job).to(job.device)
    optimizer = _adamw(model, job)
    engine = SyncCheckpointEngine(job.folder / "engine")

    def stock(path: Path) -> Wait:
        torch.save(_state(model, optimizer), path)
        return lambda: None

    def ours(path: Path) -> Wait:
        return engine.save_file(_state(model, optimizer), path.with_suffix(".pt")).result

    return Door(saves={STOCK: stock, OURS: ours}, drive=_own_loop(job, model, optimizer), close=engine.close)


def _torchtitan(job: Job) -> Door:
    """Managers of torchtitan in the mode ``async``, of one trainer; each deletes its own checkpoints."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from aio_ckpt.integrations.torchtitan import AioCheckpointManager

    model = _sharded(job)
    optimizers = default_adamw(implementation="fused" if job.is_cuda else "for-loop").build(model_parts=[model])
    common: dict[str, Any] = {
        "dataloader": None,
        "model_parts": [model],
        "optimizers": optimizers,
        "states": {},
        "sd_adapter": None,
    }
    common["lr_schedulers"] = LRSchedulersContainer(optimizers, lambda _: 1.0)
    managers, steps = {}, itertools.count(1)
    for way, kind in ((STOCK, CheckpointManager), (OURS, AioCheckpointManager)):
        settings: dict[str, Any] = {
            "interval": 1,
            "async_mode": "async",
            "keep_latest_k": 2,
            "last_save_model_only": False,
        }
        managers[way] = kind.Config(enable=True, **settings).build(base_folder=str(job.folder / way), **common)
    _check_ours(isinstance(managers[OURS], AioCheckpointManager))

    def save(_: Path, *, way: str) -> Wait:
        assert managers[way].save(next(steps))
        wait: Wait = managers[way].maybe_wait_for_saving
        return wait

    def each(name: str) -> None:
        for manager in managers.values():
            getattr(manager, name)()

    drive = _own_loop(job, model, optimizers, functools.partial(each, "maybe_wait_for_staging"))
    saves = {way: functools.partial(save, way=way) for way in managers}
    return Door(saves=saves, drive=drive, close=functools.partial(each, "close"))


def _check_ours(is_ours: bool) -> None:
    if not is_ours:
        raise RuntimeError("the adapter has fallen back to the framework's own saving: the log says why")


def _lightning(job: Job) -> Door:
    """``trainer.save_checkpoint`` with DDP: ``TorchCheckpointIO`` and ``AioCheckpointIO``."""
    strategies = importlib.import_module("lightning.pytorch.strategies")
    plugins = importlib.import_module("lightning.fabric.plugins")
    adapter = importlib.import_module("aio_ckpt.integrations.lightning")
    stock, ours = plugins.TorchCheckpointIO(), adapter.AioCheckpointIO()
    strategy = strategies.DDPStrategy()

    def use(*, is_ours: bool) -> None:
        strategy.checkpoint_io = ours if is_ours else stock

    return _lightning_door(job, strategy, use, ours.flush)


def _fsdp2(job: Job) -> Door:
    """``trainer.save_checkpoint`` with FSDP2: ``ModelParallelStrategy``, and ours, which derives from it."""
    adapter = importlib.import_module("aio_ckpt.integrations.lightning")
    size = dist.get_world_size()
    strategy = adapter.AioModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    _check_ours(strategy._is_known)

    def use(*, is_ours: bool) -> None:
        strategy._is_known = is_ours  # without it, every method is that of ModelParallelStrategy

    return _lightning_door(job, strategy, use, strategy._saves.flush)


def _lightning_door(job: Job, strategy: Any, use: Callable[..., None], flush: Wait) -> Door:
    pl = importlib.import_module("lightning.pytorch")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="gpu" if job.is_cuda else "cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=-1,
        use_distributed_sampler=False,
        default_root_dir=job.folder,
        **quiet,
    )

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        net: torch.nn.Module
        steps: Iterator[None]

        def configure_model(self) -> None:
            if "net" not in self._modules:
                sharded = self.device_mesh and self.device_mesh["data_parallel"]
                self.net = _sharded(job, sharded) if sharded else _layers(job)

        def configure_optimizers(self) -> Any:
            return _adamw(self, job)

        def training_step(self, *_: Any) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = next(self.steps, True) is not None

    def drive(steps: Iterator[None]) -> None:
        module = Module()
        module.steps = steps
        trainer.fit(module, torch.utils.data.DataLoader(range(1 << 30), batch_size=None))  # type: ignore[arg-type]

    def save(path: Path, *, is_ours: bool) -> Wait:
        use(is_ours=is_ours)
        trainer.save_checkpoint(path)
        return flush if is_ours else lambda: None

    batch = _batch(job)
    return Door(saves=_both(save), drive=drive, close=functools.partial(use, is_ours=True))


def _huggingface(job: Job) -> Door:
    """transformers' Trainer of a GPT-2, without and with ``AioTrainerMixin``: ``checkpoint-N`` with all its files."""
    import transformers

    from aio_ckpt.integrations.huggingface import AioTrainerMixin

    class Trainer(AioTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        steps: Iterator[None]

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = next(trainer.steps, True) is not None

    sizes = {"n_embd": job.width, "n_layer": job.count_of(12 * 12 * job.width**2), "n_head": 8}
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0, **sizes)
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (4096, 64))]
    arguments = transformers.TrainingArguments(
        str(job.saved),
        use_cpu=not job.is_cuda,
        per_device_train_batch_size=8 if job.is_cuda else 1,
        max_steps=1 << 30,
        save_strategy="no",  # the bench saves, where Trainer would
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Steps()])
    _check_ours(not trainer._aio_saves_by_stock())

    def drive(steps: Iterator[None]) -> None:
        trainer.steps = steps
        trainer.train()

    def save(_: Path, *, is_ours: bool) -> Wait:
        trainer._aio_is_stock = not is_ours
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        wait: Wait = trainer.wait_for_checkpoint
        return wait

    return Door(saves=_both(save), drive=drive)


def _megatron(job: Job) -> Door:
    """``--async-save`` of a GPT with the distributed optimizer; without CUDA, ours alone, of the parameters."""
    gpt = importlib.import_module("tests.integrations.megatron_gpt")
    if not job.is_cuda:
        gpt.stub_triton()
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # Megatron allocates there
    megatron = importlib.import_module("aio_ckpt.integrations.megatron")
    shared = importlib.import_module("aio_ckpt.integrations.async_calls").SaverResources(EngineConfig())
    core = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    # Two layers of 12 matrices; bf16 with fp32 parameters and moments, or fp32 alone.
    hidden = round(((job.mib << 20) / (24 * (14 if job.is_cuda else 4))) ** 0.5 / 64) * 64 or 64
    # So many sequences that the GPU bounds a step, as in the other doors: a launch-bound one waits for any Python.
    batch = 512 if job.is_cuda else 4
    trainer = gpt.Trainer(job.device, 1 if job.is_cuda else dist.get_world_size(), hidden, batch=batch)
    ways: dict[str, tuple[Any, Any, dict[str, Any]]]
    ways = {OURS: (megatron.SaveStrategy(shared=shared), megatron.AsyncCallsQueue(shared=shared), {})}
    if job.is_cuda:
        name = "mcore" if importlib.util.find_spec("nvidia_resiliency_ext") is None else "nvrx"
        queue = core.get_async_strategy(name)[1]["AsyncCallsQueue"](persistent=True)
        ways[STOCK] = (core.TorchDistSaveShardedStrategy(), queue, {"async_strategy": name})
    numbers = itertools.count(1)

    def drive(steps: Iterator[None]) -> None:
        for _ in steps:
            trainer.train(0)
            for _, queue, _ in ways.values():
                queue.maybe_finalize_async_calls()

    def save(path: Path, *, way: str) -> Wait:
        strategy, queue, options = ways[way]
        gpt.save(trainer, path, next(numbers), strategy, queue, **options)
        return functools.partial(queue.maybe_finalize_async_calls, blocking=True)

    def close() -> None:
        for _, queue, _ in ways.values():
            queue.close()
        shared.close()

    return Door(saves={way: functools.partial(save, way=way) for way in ways}, drive=drive, close=close)


DOORS: Mapping[str, tuple[Callable[[Job], Door], str, str]] = {
    "dcp": (_dcp, "torch", ""),
    "torchtitan": (_torchtitan, "torchtitan", "pip install torchtitan"),
    "lightning": (_lightning, "lightning", "pip install lightning"),
    "fsdp2": (_fsdp2, "lightning", "pip install lightning"),
    "huggingface": (_huggingface, "transformers", "pip install 'transformers[torch]'"),
    "megatron": (_megatron, "megatron", "pip install megatron-core, and triton on a GPU"),
    "files": (_files, "torch", ""),
}
"""What makes each door, the package that it needs, and what installs that."""
