"""``pretrain`` of Megatron-LM with a small GPT, as a user runs it; a script for ``torchrun``.

Its arguments are those of Megatron, and ``arguments()`` returns some that need neither Transformer Engine nor Apex. The
environment says what is no business of Megatron:

- ``LOSSES``: path; each rank appends its losses to ``LOSSES.<rank>``, exactly, one line an iteration;
- ``SAVES``: ``ours``, or ``stock``, which installs nothing;
- ``KILLED_BEHIND``: the iteration whose asynchronous save has just begun when all ranks are killed;
- ``DEADLINE``: seconds after which a rank that still runs prints the stacks of its threads and ends;
- ``DEVICE``: ``cuda``, or ``cpu``, where all that Megatron asks of CUDA is done by the CPU and gloo.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist
from megatron_stubs import stub_cuda, stub_dataset_helpers, stub_triton

ITERATIONS, SAVE_INTERVAL = 12, 3
LENGTH = 64
HIDDEN = {"cpu": 64, "cuda": 1024}
"""Writing what a GPU saves takes longer than an iteration: a save that did not copy the state would be torn."""
RANK = int(os.environ.get("RANK", "0"))


def arguments(folder: Path, device: str) -> list[str]:
    """Return the command line of Megatron. A run goes on from the checkpoint that ``folder`` holds."""
    model = f"--num-layers 2 --hidden-size {HIDDEN[device]} --num-attention-heads 4 --seq-length {LENGTH}"
    model += f" --max-position-embeddings {LENGTH} --transformer-impl local"
    model += " --position-embedding-type learned_absolute --normalization LayerNorm"
    without_apex = "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion"
    without_apex += " --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion"
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 --split 100,0,0"
    training = f"--micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-5"
    training += f" --lr-decay-style cosine --lr-decay-iters {ITERATIONS} --clip-grad 1.0 --weight-decay 0.1 --bf16"
    training += " --use-distributed-optimizer --deterministic-mode --eval-interval 100 --eval-iters 0"
    training += " --log-interval 1 --seed 11 --distributed-timeout-minutes 2"
    training += f" --distributed-backend {'nccl' if device == 'cuda' else 'gloo'}"
    saves = f"--save {folder} --load {folder} --save-interval {SAVE_INTERVAL} --ckpt-format torch_dist"
    return [*model.split(), *without_apex.split(), *data.split(), *training.split(), *saves.split()]


ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]


def datasets(counts: Any, vp_stage: int | None = None) -> Any:
    """``train_valid_test_datasets_provider``: mock data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined] - each rank reads its data itself


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """``forward_step`` for ``pretrain``."""
    from megatron.training import get_args

    iteration = get_args().curr_iteration + 1  # the first is 1, as in the name of a checkpoint
    die_behind(iteration - 1)
    batch = {name: value.cuda() for name, value in next(batches).items() if isinstance(value, torch.Tensor)}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, functools.partial(loss_of, batch["loss_mask"], iteration)


def loss_of(mask: torch.Tensor, iteration: int, losses: torch.Tensor) -> Any:
    """Return the loss, the number of tokens, and what Megatron logs. Writes the loss of this rank down."""
    loss = (losses.float() * mask).sum()
    count = mask.sum().to(torch.int)
    with Path(f"{os.environ['LOSSES']}.{RANK}").open("a") as file:
        file.write(json.dumps({"iteration": iteration, "loss": loss.item().hex()}) + "\n")
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def die_behind(done: int) -> None:
    """Kill this rank where ``KILLED_BEHIND`` says. The save before is committed then, and the last has begun."""
    last = int(os.environ.get("KILLED_BEHIND", "-1"))
    if done == last - 1:
        from megatron.training.async_utils import maybe_finalize_async_save

        maybe_finalize_async_save(blocking=True)
    if done == last:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def mend_adam() -> None:
    """Let Megatron resume with torch's Adam: it does so with Transformer Engine's or Apex's alone.

    Without them, ``pretrain`` of Megatron 0.19 ends with an AssertionError where it loads a checkpoint, whoever saved
    it: it asks Adam for the number of steps before Adam has a state. With a state, it loads one step tensor for all
    parameters, so that each of them counts. With ``dp_reshardable`` it then copies the number of the process that loads
    over it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sharded, load = DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict

    def sharded_state_dict(self: Any, state: Any, is_loading: bool = False, **options: Any) -> Any:
        if is_loading:
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, state, is_loading, **options)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer.load_state_dict = load_state_dict


def compile_nothing() -> None:
    """Keep ``pretrain`` from running make for the data sets' helpers: a wheel holds them, compiled, and no makefile."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def main() -> None:
    """Train as the command line says."""
    faulthandler.dump_traceback_later(float(os.environ["DEADLINE"]), exit=True)
    stub_triton()
    if os.environ["DEVICE"] == "cpu":
        stub_cuda()
        stub_dataset_helpers()
    compile_nothing()
    mend_adam()
    if os.environ["SAVES"] == "ours":
        from aio_ckpt.integrations import megatron

        megatron.install()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # the losses tell where that is not enough
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
