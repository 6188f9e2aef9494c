"""``python -m bench.adapters``: how long a save keeps a trainer, in each framework's own way and with our adapter.

Each door (a framework, and what saves in it) trains one model. Its saves take turns, in another order in each round.
From the same rest, three things are timed: some steps, a save with as many steps, and a save that is waited for.
``torchrun`` starts the ranks of a door. A door whose package is not installed is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aio_ckpt.dcp
from aio_ckpt import EngineConfig, SyncCheckpointEngine
from bench.common.measure import Spread, ratio
from bench.common.options import log
from bench.common.results import BENCH, FigureRow, Figures, Report, figure_rows, out_folder, publish, slowest

__all__ = ["DOORS", "main"]

dist: Any = torch.distributed  # whose stubs leave most of it out
dcp: Any = torch.distributed.checkpoint

STOCK, OURS = "stock", "ours"
FIGURES = {"training lost": "lost", "the call": "call", "until done": "done"}
"""What is measured of a save, as tables show it, and its name in the samples."""
LIMIT_SECS = 600.0
"""Of one door."""


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


# -- the measuring ----------------------------------------------------------------------------------


def _rounds(door: Door, job: Job, samples: Figures) -> Iterator[None]:
    """Time every save in turns. Each item that it yields is a step that the trainer makes."""
    wait_for_stream = torch.cuda.current_stream().synchronize if job.is_cuda else lambda: None

    def rest() -> None:
        gc.collect()
        wait_for_stream()
        dist.barrier()
        if dist.get_rank() == 0:
            _clear(job.saved)
        os.sync()
        dist.barrier()

    for number in range(job.rounds + 1):
        for way in sorted(door.saves, reverse=number % 2 == 0):
            path = job.saved / f"{way}-{number}.ckpt"
            rest()
            began = time.perf_counter()
            yield from itertools.repeat(None, job.steps)
            wait_for_stream()
            alone = time.perf_counter() - began
            rest()
            began = time.perf_counter()
            wait = door.saves[way](path)
            yield from itertools.repeat(None, job.steps)
            wait_for_stream()
            beside = time.perf_counter() - began
            wait()
            rest()
            began = time.perf_counter()
            wait = door.saves[way](path.with_name(f"waited-{path.name}"))
            called = time.perf_counter() - began
            wait()
            done = time.perf_counter() - began
            yield  # frameworks name a checkpoint by its step
            if number:
                found = {"lost": beside - alone, "call": called, "done": done, "step": alone / job.steps}
                for name, secs in found.items():
                    samples.setdefault(f"{way} {name}", []).append(secs * 1e3)


def _clear(folder: Path) -> None:
    """Delete the checkpoints. Hidden folders belong to the engines."""
    for path in folder.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _table(door: str, samples: Figures) -> list[FigureRow]:
    """Return the rows of a door: ratios first."""
    rows, milliseconds = list[FigureRow](), Figures()
    ways = [way for way in (STOCK, OURS) if f"{way} call" in samples]
    for text, name in FIGURES.items():
        if len(ways) == 2:
            relative, by_round = ratio(samples[f"{OURS} {name}"], samples[f"{STOCK} {name}"])
            values = Spread(median=relative, low=by_round.low, high=by_round.high)
            rows.append(FigureRow(text=f"{door}: {text}, ours / stock", values=values, unit="x"))
        milliseconds |= {f"{text} ({way}), ms": samples[f"{way} {name}"] for way in ways}
    steps = [secs for way in ways for secs in samples[f"{way} step"]]
    return rows + figure_rows(door, milliseconds | {"a step without a save, ms": steps})


# -- doors ------------------------------------------------------------------------------------------


def _layers(job: Job) -> torch.nn.Sequential:
    torch.manual_seed(0)
    count = job.count_of(12 * job.width**2)  # fp32, and two moments of AdamW
    return torch.nn.Sequential(*(torch.nn.Linear(job.width, job.width, bias=False) for _ in range(count)))


def _sharded(job: Job, mesh: Any = None) -> torch.nn.Module:
    model = _layers(job).to(job.device)
    return fully_shard(model, mesh=mesh or init_device_mesh(job.device, (dist.get_world_size(),)))


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
    handle = aio_ckpt.dcp.install()
    placed = [*handle._placed]

    def put(*, is_ours: bool) -> None:
        for place, stand_in in placed:
            place.put(stand_in if is_ours else stand_in.stock)

    def save(path: Path, *, is_ours: bool) -> Wait:
        put(is_ours=is_ours)  # the installation stands through all rounds, as in a script
        wait: Wait = dcp.async_save(_state(model, optimizer), checkpoint_id=path).result
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
    common = {"dataloader": None, "model_parts": [model], "optimizers": optimizers, "states": {}, "sd_adapter": None}
    common["lr_schedulers"] = LRSchedulersContainer(optimizers, lambda _: 1.0)
    managers, steps = {}, itertools.count(1)
    for way, kind in ((STOCK, CheckpointManager), (OURS, AioCheckpointManager)):
        settings = {"interval": 1, "async_mode": "async", "keep_latest_k": 2, "last_save_model_only": False}
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
        net: torch.nn.Module | None = None
        steps: Iterator[None]

        def configure_model(self) -> None:
            if self.net is None:
                sharded = self.device_mesh and self.device_mesh["data_parallel"]
                self.net = _sharded(job, sharded) if sharded else _layers(job)

        def configure_optimizers(self) -> Any:
            return _adamw(self, job)

        def training_step(self, *_: Any) -> torch.Tensor:
            assert self.net is not None
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
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value] - Megatron allocates there
    megatron = importlib.import_module("aio_ckpt.integrations.megatron")
    shared = importlib.import_module("aio_ckpt.integrations.megatron.shared").Shared(EngineConfig())
    core = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    # Two layers of 12 matrices; bf16 with fp32 parameters and moments, or fp32 alone.
    hidden = round(((job.mib << 20) / (24 * (14 if job.is_cuda else 4))) ** 0.5 / 64) * 64 or 64
    trainer = gpt.Trainer(job.device, 1 if job.is_cuda else dist.get_world_size(), hidden)
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


# -- processes --------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run the bench."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("doors", nargs="*", metavar="door", help=f"of {', '.join(DOORS)} (default: all)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to save to")
    parser.add_argument("--mib", type=int, default=2000 if has_gpu else 500, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--steps", type=int, default=10, help="steps beside a save, and without one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 1, help="ranks of each door")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args(arguments)
    if unknown := {*given.doors} - {*DOORS}:
        parser.error(f"no such doors: {', '.join(sorted(unknown))}")
    folder = given.dir.absolute()
    out = out_folder(folder, out=given.out, write=given.write, quick=False, ranks=given.ranks)
    figures, absent = list[FigureRow](), list[str]()
    sizes = {name: getattr(given, name) for name in ("mib", "rounds", "steps", "device")}
    for door in given.doors or DOORS:
        _, package, remedy = DOORS[door]
        if importlib.util.find_spec(package) is None:
            absent.append(f"{door}: {remedy}")
        else:
            with tempfile.TemporaryDirectory(prefix="aio_ckpt-bench-", dir=folder) as place:
                log(f"{door}")
                job = Job(door=door, folder=Path(place), **sizes)
                found, said = _run(job, 1 if door == "files" else given.ranks)
            figures += _table(door, found) if found else []
            absent += [f"{door}: {said}"] if said else []
    for line in absent:
        log(f"not measured: {line}")
    settings = {**sizes, "ranks": given.ranks, "not measured": absent}
    report = Report(bench="-".join(["adapters", *given.doors]), settings=settings, figures=figures)
    log(f"wrote {publish(report, folder, out=out)}")


def _run(job: Job, ranks: int) -> tuple[Figures, str]:
    """Run a door under torchrun. Return the slowest rank's samples, and what is missing."""
    job.saved.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "bench.adapters", _PART, json.dumps(asdict(job), default=str)]
    words = job.folder / "words"
    with words.open("w") as file:
        process = subprocess.Popen(command, cwd=BENCH.parent, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(LIMIT_SECS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    if code != 0:
        lines = words.read_text(errors="replace").splitlines()
        log("\n".join(lines[-60:]))
        said = next((line for line in lines if "Error: " in line), f"exit code {code}")
        return {}, "failed: " + (f"not done after {LIMIT_SECS:.0f} s" if code is None else said.strip()[-200:])
    found = slowest([json.loads(path.read_text()) for path in job.folder.glob("samples.*.json")])
    return found, "" if f"{STOCK} call" in found else "stock: needs CUDA"


_PART = "--part"


def _part(told: str) -> None:
    """Measure one door; this process is one of its ranks."""
    given = json.loads(told)
    job = Job(**given | {"folder": Path(given["folder"])})
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    sys.path.append(str(BENCH.parent / "tests" / "support"))  # of the GPT of Megatron
    if job.is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(("nccl" if job.door == "megatron" else "cpu:gloo,cuda:nccl") if job.is_cuda else "gloo")
    samples = Figures()
    door = DOORS[job.door][0](job)
    door.drive(_rounds(door, job, samples))
    dist.barrier()
    door.close()
    (job.folder / f"samples.{dist.get_rank()}.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


if __name__ == "__main__":
    _part(sys.argv[2]) if sys.argv[1:2] == [_PART] else main()
