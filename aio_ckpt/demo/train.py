"""Trainer of the demo, and an example of use: an async loop that saves while it trains.

Each run is a process of its own, ``python -m aio_ckpt.demo.train SPEC``. It prints its progress as one JSON event a
line. So the parent process can kill it at any moment and still know how far it came.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR

from aio_ckpt.config import EngineConfig
from aio_ckpt.demo.model import GPT, Batches, ModelSize, read_corpus
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.state.flatten import flatten
from aio_ckpt.ticket import SaveTicket

_WARM_UP_STEPS = 10
_LEARNING_RATE = 1e-3


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one run."""

    root: str
    """Root of the checkpoints."""
    seed: int
    """Seed of weights, dropout and the order of the batches."""
    steps: int
    """Step at which the run ends."""
    save_every: int
    """Steps between saves; 0 saves nothing."""
    resumes: bool = False
    """Whether the run continues from the newest good checkpoint."""
    threads: int = 2
    """Threads of torch. The number is fixed, because another one sums in another order."""
    size: ModelSize = ModelSize()


# -- events of a run --------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the run is ready to train."""

    parameters: int
    """Number of parameters of the model; tied ones count once."""
    corpus_bytes: int
    """Length of the text, in bytes."""
    corpus_files: int
    """Number of source files that the text was joined from."""
    resumed_from: int | None = None
    """Step that was loaded; None if the run did not resume."""
    skipped: tuple[int, ...] = ()
    """Newer steps that did not verify."""
    bytes_read: int = 0
    """Bytes read from data files."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a step of training is done."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Loss exactly as computed, because JSON keeps every bit of a float."""
    secs: float
    """Duration of forward, backward and optimizer."""


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a save is durable."""

    step: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: all steps are done, and all saves are durable."""

    digest: str
    """SHA-256 of every leaf of the state."""


Event: TypeAlias = Started | Stepped | Saved | Ended
Emit: TypeAlias = Callable[[Event], None]

decode_event = msgspec.json.Decoder(Event).decode


# -- the trainer ------------------------------------------------------------------------------------


class Trainer:
    """Model, AdamW, schedule and batches. It seeds torch, so that the same spec gives the same numbers."""

    def __init__(self, spec: TrainSpec) -> None:
        torch.manual_seed(spec.seed)
        self.corpus = read_corpus()
        self.model = GPT(spec.size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1, fused=True)
        self.schedule = LambdaLR(self.optimizer, lambda step: _rate_factor(step, spec.steps))
        self.batches = Batches(self.corpus, spec.size, seed=spec.seed)
        self.step = 0

    def state(self) -> dict[str, object]:
        """Return all values that the next step depends on. Batches and random numbers are each rank's own."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "batches": PerRank(self.batches),
            "rng": PerRank(torch.get_rng_state()),
        }

    async def resume(self, engine: CheckpointEngine) -> Started:
        """Continue from the newest checkpoint that verifies."""
        rng = torch.get_rng_state()
        report = await engine.load({**self.state(), "rng": PerRank(rng)})
        torch.set_rng_state(rng)
        self.step = report.step
        return self.started(
            resumed_from=report.step,
            skipped=tuple(skipped.step for skipped in report.skipped),
            bytes_read=report.bytes_read,
        )

    def started(
        self, *, resumed_from: int | None = None, skipped: tuple[int, ...] = (), bytes_read: int = 0
    ) -> Started:
        """Return the first event of a run."""
        return Started(
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            corpus_bytes=self.corpus.text.numel(),
            corpus_files=self.corpus.files,
            resumed_from=resumed_from,
            skipped=skipped,
            bytes_read=bytes_read,
        )

    def train_step(self) -> float:
        """Train on one batch and return the loss, in nats a byte."""
        loss: torch.Tensor = self.model(self.batches.next())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.item()

    def digest(self) -> str:
        """Return the SHA-256 over the names and every bit of all leaves of the state."""
        sums, flat = hashlib.sha256(), flatten(self.state(), rank=0)
        for name, value in zip(flat.names, flat.values, strict=True):
            sums.update(name.encode())
            if isinstance(value, torch.Tensor):
                sums.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            else:
                sums.update(repr(value).encode())
        return sums.hexdigest()


def _rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < _WARM_UP_STEPS:
        return (step + 1) / _WARM_UP_STEPS
    progress = min(1.0, (step - _WARM_UP_STEPS) / max(1, steps - _WARM_UP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


# -- one run ----------------------------------------------------------------------------------------


async def train(spec: TrainSpec, emit: Emit) -> None:
    """Train to step ``spec.steps`` and save meanwhile. Every save is durable when this returns."""
    trainer = Trainer(spec)
    tickets: deque[SaveTicket] = deque()
    async with CheckpointEngine(spec.root, EngineConfig(keep_last=3), coordinator=SoloCoordinator()) as engine:
        emit(await trainer.resume(engine) if spec.resumes else trainer.started())
        while trainer.step < spec.steps:
            begin = time.perf_counter()
            loss = trainer.train_step()
            secs = time.perf_counter() - begin
            emit(Stepped(step=trainer.step, loss=loss, secs=secs))
            if spec.save_every and trainer.step % spec.save_every == 0:
                await engine.ready()
                tickets.append(engine.save(trainer.state(), step=trainer.step))
            while tickets and tickets[0].done():
                await _report(tickets.popleft(), emit)
        for ticket in tickets:
            await _report(ticket, emit)
    emit(Ended(digest=trainer.digest()))


async def _report(ticket: SaveTicket, emit: Emit) -> None:
    report = await ticket
    if report is not None:
        emit(Saved(step=report.step))


def main() -> None:
    """Run the spec given as the only argument."""
    spec = msgspec.json.Decoder(TrainSpec).decode(sys.argv[1])
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    # Events go to a copy of standard output, so that prints of libraries cannot mix with them.
    events = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(events, "wb", buffering=0) as out:
        asyncio.run(train(spec, lambda event: _write(out.fileno(), event)))


def _write(descriptor: int, event: Event) -> None:
    os.write(descriptor, msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    main()
