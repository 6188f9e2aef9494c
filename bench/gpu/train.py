"""The trainers: a real forward, backward and in-place optimizer step beside the saves, and what they save."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.gpu.options import Trial

__all__ = ["Ground", "StepClock", "Trainer", "local_of", "make_trainer", "train_for"]

HEAD = 64
BLOCKS = 12
"""Of 12 tensors each; with AdamW's two moments 432."""
SMALL_COUNT, SMALL_SIDE = 10_000, 128
"""Of 64 KiB each."""
VOCABULARY = {"cuda": 32_768, "cpu": 256}
MAX_GROWTH = 16.0
"""Of a step at once: a batch of one sequence takes less than its share of a larger one, or more."""
GROWTHS = 3
"""A small batch tells how long the host takes, not the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where a rank stands."""

    rank: int
    """From 0."""
    world: int
    """Number of ranks."""
    device: torch.device
    """Its own."""
    group: dist.ProcessGroup
    """For the bench's own agreement."""
    saves: dist.ProcessGroup
    """For contenders that talk from a thread while training talks in the default group."""

    def barrier(self) -> None:
        """All ranks are here."""
        dist.barrier(self.group)

    def all_agree(self, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""
        if self.world == 1:
            return flag
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        return bool(votes.item())

    def smallest(self, value: float) -> float:
        """Of all ranks."""
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return float(values.item())

    def synchronize(self) -> None:
        """The device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Trainer(ABC):
    """Invariant: ``state`` holds the live tensors that ``update`` changes in place."""

    state: Mapping[str, torch.Tensor]
    """What is saved, flat; names are the rank's own unless the tensors are shards of a common one."""
    optimizer: torch.optim.Optimizer
    """Changes every tensor of the state."""
    tokens_per_step = 0
    """Of this rank."""

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state."""
        return local_of(self.state)

    @abstractmethod
    def compute(self) -> None:
        """Forward and backward."""

    @abstractmethod
    def grow(self, factor: float) -> None:
        """Make ``compute`` about so many times longer."""

    def update(self) -> None:
        """In place."""
        self.optimizer.step()


def local_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor, sharing its memory."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


class Block(nn.Module):
    """GPT-2's: 12 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        grown: torch.Tensor = x + self.out(nn.functional.gelu(self.fc(self.ln_2(x))))
        return grown


class Transformer(nn.Module):
    """With tokens at both ends."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _adamw(parameters: Mapping[str, nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters.values(), lr=1e-5, fused=device.type == "cuda")


def _moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        f"optim.{kind}.{name}": optimizer.state[value][kind] for name, value in parameters.items() for kind in kinds
    }


class BlocksTrainer(Trainer):
    """12 transformer blocks in fp32 under autocast, AdamW; 432 tensors; activations go in, so no embedding."""

    def __init__(self, gb: float, ground: Ground) -> None:
        device = ground.device
        width = max(1, round(math.sqrt(gb * 1e9 / (12 * 12 * BLOCKS)) / HEAD)) * HEAD
        with device:
            self.model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
        self.batch, self.length = 1, 1024 if device.type == "cuda" else 32
        self.device, self.width = device, width
        parameters = dict(self.model.named_parameters())
        self.optimizer = _adamw(parameters, device)
        self.grow(1)
        self.compute()
        self.update()
        named = {f"model.{name}": value for name, value in parameters.items()} | _moments(parameters, self.optimizer)
        self.state = {f"rank{ground.rank}.{name}": value.detach() for name, value in named.items()}

    def grow(self, factor: float) -> None:
        self.batch = max(1, round(self.batch * factor))
        self.input = torch.randn(self.batch, self.length, self.width, device=self.device)
        self.tokens_per_step = self.batch * self.length

    def compute(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(self.input).square().mean()
        torch.autograd.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class SmallTrainer(Trainer):
    """10,000 tensors of 64 KiB under SGD; matmuls stand for forward and backward."""

    def __init__(self, gb: float, ground: Ground) -> None:
        device = ground.device
        count = SMALL_COUNT if device.type == "cuda" else max(10, round(gb * 1e9 / (4 * SMALL_SIDE**2)))
        parameters = [nn.Parameter(torch.randn(SMALL_SIDE, SMALL_SIDE, device=device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(parameters, lr=1e-6, foreach=True)
        self.state = {f"rank{ground.rank}.t{i:05d}": value.detach() for i, value in enumerate(parameters)}
        side, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self.matrix = torch.randn(side, side, device=device, dtype=dtype)
        self.product = torch.empty_like(self.matrix)
        self.products = 4

    def grow(self, factor: float) -> None:
        self.products = max(1, round(self.products * factor))

    def compute(self) -> None:
        for _ in range(self.products):
            torch.matmul(self.matrix, self.matrix, out=self.product)


class FsdpTrainer(Trainer):
    """A transformer under FSDP2 with AdamW on synthetic tokens; every tensor of the state is a DTensor shard."""

    def __init__(self, gb: float, dtype: str, ground: Ground) -> None:
        device, world = ground.device, ground.world
        is_cuda = device.type == "cuda"
        self.vocabulary = VOCABULARY[device.type]
        width = HEAD
        while 12 * self._parameters(width + HEAD) < gb * 1e9 * world:
            width += HEAD
        mesh = init_device_mesh(device.type, (world,))
        torch.manual_seed(0)
        with device:
            model = Transformer(width, self.vocabulary)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if is_cuda and dtype == "bf16" else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model, self.device = model, device
        self.batch, self.length = 1, 1024 if is_cuda else 16
        parameters = dict(model.named_parameters())
        self.optimizer = _adamw(parameters, device)
        self.random = torch.Generator(device).manual_seed(ground.rank)
        self.grow(1)
        self.compute()
        self.update()
        self.state = {f"model.{name}": value.detach() for name, value in parameters.items()}
        self.state |= _moments(parameters, self.optimizer)

    def _parameters(self, width: int) -> int:
        return BLOCKS * 12 * width**2 + 2 * self.vocabulary * width

    def grow(self, factor: float) -> None:
        self.batch = max(1, round(self.batch * factor))
        self.tokens_per_step = self.batch * self.length

    def compute(self) -> None:
        shape = (self.batch, self.length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=self.random, device=self.device)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_trainer(trial: Trial, ground: Ground) -> Trainer:
    """The trial's, its step brought to about ``step_ms`` on all ranks alike."""
    made: dict[str, Callable[[], Trainer]] = {
        "blocks": lambda: BlocksTrainer(trial.gb, ground),
        "small": lambda: SmallTrainer(trial.gb, ground),
        "fsdp2": lambda: FsdpTrainer(trial.gb, trial.dtype, ground),
    }
    trainer = made[trial.shape]()
    for _ in range(GROWTHS):
        train_for(trainer, ground, 3)
        took_ms = 1e3 * min(train_for(trainer, ground, 5)[1:])
        trainer.grow(min(MAX_GROWTH, ground.smallest(trial.step_ms / took_ms)))
    train_for(trainer, ground, 3)
    return trainer


class StepClock:
    """Length of steps: between CUDA events at their ends, so that stalls of host and device alike are in it.

    The host runs at most one step ahead of the device, as a loop that looks at its loss does.
    """

    def __init__(self, ground: Ground) -> None:
        self._is_cuda = ground.device.type == "cuda"
        ground.synchronize()
        self._marks: list[torch.cuda.Event | float] = [self._mark()]

    def _mark(self) -> torch.cuda.Event | float:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def end_step(self) -> None:
        """A step ended in the stream."""
        self._marks.append(self._mark())
        previous = self._marks[-2]
        if isinstance(previous, torch.cuda.Event):
            previous.synchronize()

    def steps_secs(self) -> list[float]:
        """Each step's length so far."""
        last = self._marks[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        return [_between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _between(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
        return float(a.elapsed_time(b)) / 1e3
    assert isinstance(a, float)
    assert isinstance(b, float)
    return b - a


def train_for(trainer: Trainer, ground: Ground, steps: int) -> list[float]:
    """Seconds of each of ``steps`` with nothing beside them."""
    clock = StepClock(ground)
    for _ in range(steps):
        trainer.compute()
        trainer.update()
        clock.end_step()
    return clock.steps_secs()
