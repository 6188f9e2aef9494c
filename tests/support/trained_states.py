"""A small transformer under AdamW, saved at every step; each state is weighed exactly, on its own device, before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from aio_ckpt import EngineConfig, SaveTicket, SyncCheckpointEngine

VOCABULARY = 512
HELD_CYCLES = 50_000_000
"""About 25 ms of an H200: longer than the host needs from there to the first copy."""
PENDING_AT_MOST = 7
CHECKED_TOGETHER = 5
KEPT = PENDING_AT_MOST + 1

Leaf = tuple[str, tuple[int, ...], torch.Tensor]
"""Dtype, shape and weight of a tensor."""


def weigh(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's 32-bit words times the odd numbers, summed modulo 2**64: exact, the same on every device.

    An int64 of no dimension on the tensor's device; nobody waits for it.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 else raw
    return (words.long() * (2 * torch.arange(words.numel(), device=tensor.device) + 1)).sum()


def weighed(state: object) -> dict[str, object]:
    """Path -> :data:`Leaf` of a tensor, the value itself of anything else."""
    return {
        path: (str(leaf.dtype), tuple(leaf.shape), weigh(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves(state)
    }


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Keys of the path in their ``repr``: 0 and '0' differ."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}/{key!r}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from leaves(value, f"{path}/{number}")
    else:
        yield path, state


def on_host(found: dict[str, object]) -> dict[str, object]:
    """Weights as plain numbers."""
    return {path: (*leaf[:2], leaf[2].item()) if _is_weighed(leaf) else leaf for path, leaf in found.items()}


def _is_weighed(leaf: object) -> bool:
    return isinstance(leaf, tuple) and isinstance(leaf[-1], torch.Tensor)


class Training:
    """A step is :meth:`backward`, then :meth:`update`, which changes every parameter in place."""

    def __init__(self, device: str, *, width: int, layers: int) -> None:
        torch.manual_seed(1)
        self.device = torch.device(device)
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.model = nn.ModuleDict({"embed": self.embed, "body": self.body, "head": self.head}).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self) -> None:
        """Gradients in fresh memory."""
        tokens = torch.randint(VOCABULARY, (8, 65), device=self.device)
        scores = self.head(self.body(self.embed(tokens[:, :-1])))
        self.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def update(self) -> None:
        self.optimizer.step()

    def state(self, step: int) -> dict[str, object]:
        """The trainer's own tensors, views of them, and an average in memory that only the state keeps.

        The device is held first: the average is not yet computed when ``save()`` issues its copies.
        """
        if self.device.type == "cuda":
            torch.cuda._sleep(HELD_CYCLES)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": {name: value.detach().to(torch.bfloat16) for name, value in self.model.named_parameters()},
            "columns": self.embed.weight.detach()[:, 1::2],
            "rng": torch.get_rng_state(),
            "step": step,
        }

    def churn(self) -> None:
        """Fill and drop junk of every parameter's size, on the device and in host memory, twice.

        And, page-locked where there is a GPU, host memory of the size of all parameters and of the largest.
        """
        sizes = [value.nbytes for value in self.model.parameters()]
        pinned = self.device.type == "cuda"
        for _ in range(2):
            junk = [torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xAB) for size in sizes]
            for nbytes in (sum(sizes), max(sizes)):
                junk.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(0xAB))
            del junk


def check_a_save_every_step(root: Path, config: EngineConfig, training: Training, *, steps: int, timeout: float) -> int:
    """Save before each update; compare each checkpoint with the weights of the state that was given to its save.

    ``config`` must keep :data:`KEPT` steps. Returns how many checkpoints were compared.
    """
    pending: list[tuple[SaveTicket, dict[str, object]]] = []
    seen: list[dict[str, object]] = []
    with SyncCheckpointEngine(root, config) as engine:
        for step in range(1, steps + 1):
            engine.ready()  # or save() waits until the device has nothing left to do
            training.churn()
            training.backward()
            state = training.state(step)
            wanted = weighed(state)
            ticket = engine.save(state, step=step)
            training.update()
            del state
            training.churn()
            pending.append((ticket, wanted))
            if len(pending) == PENDING_AT_MOST or step == steps:
                count = len(pending) if step == steps else CHECKED_TOGETHER
                seen += [check_checkpoint(engine, *saved, timeout=timeout) for saved in pending[:count]]
                del pending[:count]
        hits = engine.plan_hits, engine.plan_misses
        arenas = engine.lifetime.arenas
    assert hits == (steps - 2, 2), "AdamW has a state from the second save on, and nothing else changes"
    assert arenas <= config.max_in_flight + 1, f"{arenas} arenas"  # a lease ends a little after its save
    of_embedding = {found["/'model'/'embed.weight'"] for found in seen}
    assert len(of_embedding) == steps, f"only {len(of_embedding)} of {steps} states differ: this proves nothing"
    return len(seen)


def check_checkpoint(
    engine: SyncCheckpointEngine, ticket: SaveTicket, wanted: dict[str, object], *, timeout: float
) -> dict[str, object]:
    """Returns what was found, which is what was wanted."""
    ticket.result(timeout)
    found = on_host(weighed(engine.read(ticket.step)))
    given = on_host(wanted)
    assert found.keys() == given.keys(), f"step {ticket.step}: names {sorted(found.keys() ^ given.keys())}"
    wrong = [f"{path}: {found[path]}, not {given[path]}" for path in given if found[path] != given[path]]
    assert not wrong, f"step {ticket.step}: {len(wrong)} of {len(given)} leaves differ, first {wrong[:3]}"
    return found
