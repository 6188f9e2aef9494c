"""Trainer of the demo, and an example of use: an async loop that saves while it trains.

A small GPT learns the sources of the standard library. Each run is a process of its own,
``python -m aio_ckpt.demo.train SPEC``. It prints its progress as one JSON event a line. So the parent process can kill
it at any moment and still know how far it came.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it
from torch.optim.lr_scheduler import CosineAnnealingLR

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.reports import amount
from aio_ckpt.state.flatten import flatten
from aio_ckpt.ticket import SaveTicket

_LEARNING_RATE = 1e-3
_DROPOUT = 0.1
"""Above 0, so that a resumed run is identical only if the state of the random numbers was restored."""
_VOCABULARY = 256
_MAX_CORPUS_BYTES = 8 << 20


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the model and of its batches."""

    layers: int = 6
    width: int = 256
    """Width of the residual stream, a multiple of ``heads``."""
    heads: int = 8
    context: int = 64
    """Bytes of text that one sample spans."""
    batch: int = 8


class TrainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one run."""

    root: str
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


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line that a run prints: the first one, one for each step of training, and the last one."""

    step: int
    """Step that is done, from 1; of the first line, the step that was loaded, or 0."""
    loss: float | None = None
    """Loss exactly as computed, because JSON keeps every bit of a float; None in the first and the last line."""
    secs: float = 0.0
    """Duration of forward, backward and optimizer."""
    text: str = ""
    """Text of the first line, for the screen."""
    digest: str = ""
    """SHA-256 of every leaf of the state, in the last line: all steps are done, and all saves are durable."""


decode_event = msgspec.json.Decoder(Event).decode


class GPT(nn.Module):
    """Decoder over bytes. The head is tied to the embedding: two names, one tensor in the checkpoint."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, _DROPOUT, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross entropy of predicting each byte from the bytes before it, in nats a byte.

        ``text``: int64 of shape ``(batch, context + 1)``.
        """
        given, wanted = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        x = self.embed(given) + self.positions(torch.arange(given.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


class Batches:
    """Batches of the standard library's sources, in an order that ``seed`` fixes.

    Stateful: a checkpoint must hold the position in that order.
    """

    def __init__(self, size: ModelSize, *, seed: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_MAX_CORPUS_BYTES]
        if not text:
            raise FileNotFoundError(f"no Python sources in {folder}: the demo learns the standard library's")
        self.text, self._size, self.position = torch.frombuffer(bytearray(text), dtype=torch.uint8), size, 0
        windows = (len(text) - 1) // size.context
        self._order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))

    def next(self) -> Tensor:
        """Return the next batch, int64 of shape ``(batch, context + 1)``."""
        size = self._size
        picked = torch.arange(self.position * size.batch, (self.position + 1) * size.batch) % len(self._order)
        starts = self._order[picked] * size.context
        self.position += 1
        return self.text[starts[:, None] + torch.arange(size.context + 1)].long()

    def state_dict(self) -> dict[str, object]:
        """Return the position in the order."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position to the saved one."""
        self.position = state["position"]


class Trainer:
    """Model, AdamW, schedule and batches. It seeds torch, so that the same spec gives the same numbers."""

    def __init__(self, spec: TrainSpec) -> None:
        torch.manual_seed(spec.seed)
        self.model = GPT(spec.size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1, fused=True)
        self.schedule = CosineAnnealingLR(self.optimizer, spec.steps)
        self.batches = Batches(spec.size, seed=spec.seed)
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

    async def resume(self, engine: CheckpointEngine) -> str:
        """Continue from the newest checkpoint that verifies, and return what it was."""
        rng = torch.get_rng_state()
        report = await engine.load({**self.state(), "rng": PerRank(rng)})
        torch.set_rng_state(rng)
        self.step = report.step
        damaged = "".join(f"; step {skipped.step} did not verify" for skipped in report.skipped)
        return f"resumed from step {report.step}: {amount(report.bytes_read)} read and verified{damaged}"

    def train_step(self) -> float:
        """Train on one batch and return the loss, in nats a byte."""
        loss: Tensor = self.model(self.batches.next())
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
            if isinstance(value, Tensor):
                sums.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            else:
                sums.update(repr(value).encode())
        return sums.hexdigest()


async def train(spec: TrainSpec, emit: Callable[[Event], object]) -> None:
    """Train to step ``spec.steps`` and save meanwhile. Every save is durable when this returns."""
    trainer = Trainer(spec)
    ticket: SaveTicket | None = None
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    text = f"{parameters / 1e6:.1f} M parameters, {amount(trainer.batches.text.numel())} of this Python's sources"
    async with CheckpointEngine(spec.root, EngineConfig(keep_last=3), coordinator=SoloCoordinator()) as engine:
        if spec.resumes:
            text = await trainer.resume(engine)
        emit(Event(step=trainer.step, text=text))
        while trainer.step < spec.steps:
            begin = time.perf_counter()
            loss = trainer.train_step()
            emit(Event(step=trainer.step, loss=loss, secs=time.perf_counter() - begin))
            if spec.save_every and trainer.step % spec.save_every == 0:
                if ticket is not None:
                    await ticket  # raises if the save before this one failed
                ticket = engine.save(trainer.state(), step=trainer.step)
        if ticket is not None:
            await ticket
    emit(Event(step=trainer.step, digest=trainer.digest()))


def main() -> None:
    """Run the spec given as the only argument."""
    spec = msgspec.json.Decoder(TrainSpec).decode(sys.argv[1])
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    # Events go to a copy of standard output, so that prints of libraries cannot mix with them.
    events = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(train(spec, lambda event: os.write(events, msgspec.json.encode(event) + b"\n")))


if __name__ == "__main__":
    main()
