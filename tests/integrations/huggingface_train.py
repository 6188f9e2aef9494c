"""A Trainer of a small GPT-2, as a user runs it: bf16, dropout, workers, gradient accumulation; also for ``torchrun``.

``python huggingface_train.py MODE DEVICE RUN...`` trains one RUN after the other. A RUN is ``KIND:FOLDER``:

- ``ours`` and ``stock`` train from the begin, or go on from what FOLDER holds, with the mixin and without it;
- ``killed`` is ours, and all ranks are killed while a checkpoint is written, ``SAVE_STEPS`` behind the first.

Each rank writes the losses of its micro batches into ``FOLDER.KIND.RANK``, exactly. The environment variable DEADLINE
is the number of seconds after which a rank that still runs prints the stacks of its threads and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from gated_storage import Gate, GatedStorage
from huggingface_runs import load_to_numbered_cpus
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.integrations import huggingface
from aio_ckpt.runtime.portal import Executor

STEPS, SAVE_STEPS, MICRO_BATCHES = 9, 3, 2
EPOCH = 5
"""Steps of an epoch: the first checkpoint is amid one, and the run is killed in the second."""
WIDTH = {"cpu": 32, "cuda": 512}
VOCABULARY, LENGTH, ROWS = 64, 32, 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Mode:
    """How a run is distributed."""

    ranks: int
    options: dict[str, Any]
    """Of ``TrainingArguments``."""
    held: str | None
    """File of the engine that is not there yet when the run is killed; None if transformers writes all files."""
    is_lora: bool = False


def _fsdp(state_dict_type: str) -> dict[str, Any]:
    config = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": state_dict_type}
    return {"fsdp": True, "fsdp_config": config}


MODES = {  # the most common first
    "one": Mode(1, {}, "optimizer.pt"),
    "ddp": Mode(2, {}, "optimizer.pt"),
    "fsdp": Mode(2, _fsdp("FULL_STATE_DICT"), "model.safetensors"),
    "shards": Mode(2, _fsdp("SHARDED_STATE_DICT"), None),
    "lora": Mode(1, {}, "optimizer.pt", is_lora=True),
}


class Recorded(Trainer):  # type: ignore[misc]
    """Stock Trainer, with the losses of this rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[tuple[int, torch.Tensor]] = []

    def training_step(self, *args: Any, **options: Any) -> Any:
        loss = super().training_step(*args, **options)
        self.losses.append((self.state.global_step + 1, loss.detach().clone()))
        return loss


class Ours(huggingface.AioTrainerMixin, Recorded):  # type: ignore[misc]
    """The same with the mixin."""


class Kill(TrainerCallback):  # type: ignore[misc]
    """Callback that kills this rank while the second checkpoint is written.

    If the engine writes a part of it, one more step is trained meanwhile.
    """

    def __init__(self, held: str | None) -> None:
        self.held = held
        self.run: Any = None
        self.gate: Gate | None = None
        if held is not None and RANK == 0:
            self.disk = GatedStorage(Executor("gated", 4))
            huggingface.SyncCheckpointEngine = lambda *args, **options: SyncCheckpointEngine(  # type: ignore[assignment, misc]
                *args, storage=self.disk, **options
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 * SAVE_STEPS - 1:
            self.run.wait_for_checkpoint()  # else the gate would hold the checkpoint before, and the save waits for it
            if self.held is not None and RANK == 0:
                self.gate = self.disk.hold("replace", self.held)
        if state.global_step == 2 * SAVE_STEPS + (self.held is not None):
            if self.gate is not None:
                self.gate.wait_reached()
            if WORLD > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def made_model(device: str, is_lora: bool) -> Any:
    """Return a new model, the same each time."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH[device],
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",  # whose gradients have the same bits each time
        )
    )
    if not is_lora:
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    )


def train(kind: str, folder: Path, mode: Mode, device: str) -> None:
    """Train, or go on, and write the losses down."""
    count = EPOCH * MICRO_BATCHES * ROWS * WORLD
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        logging_steps=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO_BATCHES,
        dataloader_num_workers=2,
        bf16=True,
        learning_rate=1e-3,
        use_cpu=device == "cpu",
        report_to="none",
        disable_tqdm=True,
        **mode.options,
    )
    kill = Kill(mode.held) if kind == "killed" else None
    run = (Recorded if kind == "stock" else Ours)(
        model=made_model(device, mode.is_lora),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[] if kill is None else [kill],
    )
    if kill is not None:
        kill.run = run
    run.train(resume_from_checkpoint=folder.is_dir() and any(folder.glob("checkpoint-*")))
    lines = [json.dumps([step, loss.item().hex()]) + "\n" for step, loss in run.losses]
    Path(f"{folder}.{kind}.{RANK}").write_text("".join(lines))


def let_accelerate_shard_on_cpus() -> None:
    """Let accelerate apply FSDP to CPUs, with gloo, as it does to GPUs."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def main() -> None:
    """Train as the command line says."""
    faulthandler.dump_traceback_later(float(os.environ["DEADLINE"]), exit=True)
    mode, device = MODES[sys.argv[1]], sys.argv[2]
    torch.use_deterministic_algorithms(True, warn_only=True)  # the losses tell where that is not enough
    if device == "cpu":
        load_to_numbered_cpus()
        if "fsdp" in mode.options:
            let_accelerate_shard_on_cpus()
    for run in sys.argv[3:]:
        kind, _, folder = run.partition(":")
        train(kind, Path(folder), mode, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
