"""A small GPT of Megatron, saved through ours, killed, and resumed with equal losses.

``python tests/integrations/megatron_gpt.py --root DIR --device cuda --tp 1`` runs every part, each by ``torchrun`` on
two ranks. ``--device cpu`` needs no GPU: gloo, tensor parallelism, SGD in place of the distributed optimizer, which
asks for CUDA. One part alone: ``torchrun --nproc-per-node 2 tests/integrations/megatron_gpt.py --root DIR --part
reference``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist
from megatron_stubs import stub_triton

from aio_ckpt import EngineConfig

STEPS, SYNC_AT, ASYNC_AT, KILLED_AT = 8, 2, 4, 6
"""The checkpoint of step 4 is what a run that is killed behind step 6 resumes from."""
VOCABULARY, LENGTH, BATCH = 128, 32, 4
TRACKER = "latest_checkpointed_iteration.txt"
PARTS = ("reference", "killed", "resumed", "resumed by stock", "stock")


class Trainer:
    """Model and optimizer, as ``pretrain`` makes them, and what it saves of them."""

    def __init__(self, device: str, tp: int, hidden: int, *, batch: int = BATCH) -> None:
        """``batch``: sequences of a rank in a step."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        self.batch = batch
        self.is_cuda = device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.is_cuda else torch.device("cpu")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        if self.is_cuda:
            tensor_parallel.model_parallel_cuda_manual_seed(11)
        else:  # one whose fork() asks for no CUDA
            tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        torch.manual_seed(11)
        kind = torch.bfloat16 if self.is_cuda else torch.float32
        config = TransformerConfig(
            num_layers=2,
            hidden_size=hidden,
            num_attention_heads=4,
            tensor_model_parallel_size=tp,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=not self.is_cuda,
            params_dtype=kind,
            pipeline_dtype=kind,
            bf16=self.is_cuda,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        self.module: Any = model.to(self.device)
        self.metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        self._wrap(config)

    def _wrap(self, config: Any) -> None:
        if not self.is_cuda:
            self.model = self.module
            self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.1)
            return
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.module = Float16Module(config, self.module)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        self.model = DistributedDataParallel(config, ddp, self.module)
        self.model.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def train(self, step: int) -> float:
        """One step; the loss of this rank."""
        numbers = torch.Generator().manual_seed(1000 * step + self.dp_rank)
        tokens = torch.randint(VOCABULARY, (self.batch, LENGTH + 1), generator=numbers).to(self.device)
        positions = torch.arange(LENGTH, device=self.device).expand(self.batch, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH, device=self.device).tril() < 0.5
        self.optimizer.zero_grad()
        if self.is_cuda:
            self.model.zero_grad_buffer()
        loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
        loss.backward()
        if self.is_cuda:
            from megatron.core.distributed import finalize_model_grads

            finalize_model_grads([self.model])
        self.optimizer.step()
        return float(loss.detach())

    def sharded(self, step: int, *, is_loading: bool = False) -> dict[str, Any]:
        """What ``generate_state_dict`` makes."""
        state = {"iteration": step, "model": self.module.sharded_state_dict(metadata=self.metadata)}
        if self.is_cuda:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=self.metadata)
        return state

    def load(self, folder: Path) -> int:
        """What ``load_checkpoint`` does."""
        from megatron.core import dist_checkpointing

        if self.is_cuda:
            self.train(0)  # without Transformer Engine, Megatron takes the number of steps from the optimizer's state
        loaded = dist_checkpointing.load(self.sharded(0, is_loading=True), str(folder))
        self.module.load_state_dict(loaded["model"])
        if self.is_cuda:
            self.optimizer.load_state_dict(loaded["optimizer"])
            self._correct_steps()
        return int(loaded["iteration"])

    def _correct_steps(self) -> None:
        """Give each parameter the number of steps that was saved.

        Without Transformer Engine, Megatron 0.19 loads one step tensor for all parameters of torch's Adam, so that each
        of them counts. With ``dp_reshardable`` it then copies the number of the process that loads over it.
        """
        for chained in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in chained.optimizer.param_groups:
                for parameter in group["params"]:
                    chained.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    def bytes_of(self) -> list[torch.Tensor]:
        """Every tensor of the state of this rank, copied, in the order of the state."""
        from megatron.core.dist_checkpointing.mapping import apply_factories

        state = self.sharded(0)
        apply_factories(state)
        return [value.data.detach().to("cpu", copy=True).view(-1) for value in tensors_in(state)]


def tensors_in(value: Any) -> Iterator[Any]:
    """Return the sharded tensors in a state, without padding: Megatron saves its memory as it happens to be."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        if not getattr(value.get("padding"), "obj", False):
            yield from itertools.chain.from_iterable(map(tensors_in, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(tensors_in, value))


def folder_of(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def save(trainer: Trainer, root: Path, step: int, strategy: Any, queue: Any, **options: Any) -> float:
    """Save synchronously (``queue`` None) or not, as ``save_checkpoint`` does. The seconds that it kept the trainer."""
    from megatron.core import dist_checkpointing

    folder = folder_of(root, step)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()

    def track() -> None:
        if dist.get_rank() == 0:
            (root / TRACKER).write_text(str(step))

    state = trainer.sharded(step)
    began = time.monotonic()
    request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=queue is not None, **options)
    if queue is None:
        dist.barrier()
        track()
    else:
        request.add_finalize_fn(track)
        queue.schedule_async_request(request)
    return time.monotonic() - began


def trains(options: argparse.Namespace, first: int = 1, *, kills: bool = False) -> None:
    """Train to the end, or to the kill; save synchronously at one step and asynchronously at another."""
    from aio_ckpt.integrations.async_calls import SaverResources
    from aio_ckpt.integrations.megatron import AsyncCallsQueue, SaveStrategy

    root: Path = options.root / ("reference" if options.part == "reference" else "killed")
    trainer = Trainer(options.device, options.tp, options.hidden)
    resumes = options.part.startswith("resumed")
    if resumes:
        first = (newest_of if options.part.endswith("stock") else loads_of_ours)(trainer, root) + 1
        assert first == ASYNC_AT + 1, first
    shared = SaverResources(EngineConfig(stall_timeout_secs=60.0))
    strategy, queue = SaveStrategy(shared=shared), AsyncCallsQueue(shared=shared)
    losses, secs, polls = {}, {}, 0
    for step in range(first, STEPS + 1):
        losses[step] = trainer.train(step)
        while step == KILLED_AT and queue.get_num_unfinalized_calls():  # the kill comes behind the commit
            polls += 1
            queue.maybe_finalize_async_calls()
        queue.maybe_finalize_async_calls()
        if kills and step == KILLED_AT:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if not resumes and step in (SYNC_AT, ASYNC_AT):
            secs[step] = save(trainer, root, step, strategy, queue if step == ASYNC_AT else None)
            if options.part == "reference":
                torch.save(trainer.bytes_of(), options.root / f"wanted.{step}.{dist.get_rank()}.pt")
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    shared.close()
    result = {"losses": losses, "save_secs": secs, "polls": polls}
    (options.root / f"{options.part}.{dist.get_rank()}.json").write_text(json.dumps(result))


def loads_of_ours(trainer: Trainer, root: Path) -> int:
    """Load the newest checkpoint by our reader, as ``install()`` lets ``load_checkpoint`` do."""
    import functools

    from aio_ckpt.integrations.async_calls import SaverResources
    from aio_ckpt.integrations.megatron.names import core
    from aio_ckpt.integrations.megatron.strategies import our_reader
    from aio_ckpt.integrations.patch_points import replaced

    ours = functools.partial(our_reader, SaverResources(EngineConfig()), core.reader.value)
    with replaced(core.reader, ours), replaced(core.common_reader, ours):
        return newest_of(trainer, root)


def newest_of(trainer: Trainer, root: Path) -> int:
    """Load the checkpoint that the tracker names, as ``load_checkpoint`` does; by stock's reader, if none is placed."""
    return trainer.load(folder_of(root, int((root / TRACKER).read_text())))


def stock_loads(options: argparse.Namespace) -> None:
    """Stock loads what ours saved, byte for byte; on CUDA, ours loads what stock saves, too."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    trainer = Trainer(options.device, options.tp, options.hidden)
    trainer.train(99)  # the moments of the optimizer are there, and differ
    for step in (SYNC_AT, ASYNC_AT):
        assert trainer.load(folder_of(options.root / "reference", step)) == step
        assert_bytes(trainer, options.root / f"wanted.{step}.{dist.get_rank()}.pt")
    if trainer.is_cuda:
        save(trainer, options.root / "stock", ASYNC_AT, TorchDistSaveShardedStrategy(), None)
        trainer.train(99)
        assert loads_of_ours(trainer, options.root / "stock") == ASYNC_AT
        assert_bytes(trainer, options.root / f"wanted.{ASYNC_AT}.{dist.get_rank()}.pt")


def assert_bytes(trainer: Trainer, path: Path) -> None:
    wanted, found = torch.load(path), trainer.bytes_of()
    assert len(wanted) == len(found) > 0
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"tensor {number} of {path}"


def part(options: argparse.Namespace) -> None:
    """Run one part; this process is a rank of torchrun."""
    if options.device == "cuda":
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        stub_triton()
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value] - Megatron allocates there
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.part == "stock":
        stock_loads(options)
    else:
        trains(options, kills=options.part == "killed")
    dist.barrier()
    dist.destroy_process_group()


def all_parts(options: argparse.Namespace) -> None:
    """Run every part under torchrun, and compare the losses."""
    options.root.mkdir(parents=True)
    for each in PARTS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command += ["--root", str(options.root), "--device", options.device, "--tp", str(options.tp)]
        command += ["--hidden", str(options.hidden), "--part", each]
        done = subprocess.run(command, check=False, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        assert (done.returncode != 0) == (each == "killed"), f"{each} ended with {done.returncode}"
    for rank in range(2):
        reference, resumed, by_stock = (
            json.loads((options.root / f"{each}.{rank}.json").read_text())
            for each in ("reference", "resumed", "resumed by stock")
        )
        wanted = {step: loss for step, loss in reference["losses"].items() if int(step) > ASYNC_AT}
        print(f"rank {rank}: losses {wanted} and {resumed['losses']}; save() {reference['save_secs']} s")
        print(f"rank {rank}: by stock {by_stock['losses']}")
        assert by_stock["losses"] == resumed["losses"], "the losses differ from those of a run that stock loads"
        assert wanted == resumed["losses"], "the losses differ"
    print("all parts passed")


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments; run one part, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1 if torch.cuda.is_available() else 2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args(arguments)
    if options.part:
        warnings.simplefilter("ignore")
        part(copy.copy(options))
    else:
        all_parts(options)


if __name__ == "__main__":
    main()
