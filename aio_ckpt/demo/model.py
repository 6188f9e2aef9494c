"""Model and data of the demo: a small GPT over bytes, and batches of the standard library's sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

_VOCABULARY = 256
_MAX_CORPUS_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of the model and of its batches."""

    layers: int = 6
    """Number of transformer blocks."""
    width: int = 256
    """Width of the residual stream, a multiple of ``heads``."""
    heads: int = 8
    """Number of attention heads."""
    context: int = 64
    """Bytes of text that one sample spans."""
    batch: int = 8
    """Number of samples in a batch."""
    dropout: float = 0.1
    """Above 0, so that a resumed run is identical only if the state of the random numbers was restored."""


class _Block(nn.Module):
    """Transformer block: attention and a two-layer perceptron, each with a norm before it and a residual connection."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.expand = nn.Linear(size.width, 4 * size.width)
        self.contract = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block for ``(batch, context, width)``, in the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.project(mixed.transpose(1, 2).reshape(batch, context, width)))
        return x + self._drop(self.contract(F.gelu(self.expand(self.mlp_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Decoder over bytes. The head is tied to the embedding: two names, one tensor in the checkpoint."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
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
        x = self.embed(given) + self.positions(torch.arange(given.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text to train on."""

    text: Tensor
    """uint8, one dimension."""
    files: int
    """Number of source files that it was joined from."""


def read_corpus(max_bytes: int = _MAX_CORPUS_BYTES) -> Corpus:
    """Read the top-level modules of the standard library, in the order of their names.

    Raises:
        FileNotFoundError: this Python has no sources (a zipped or frozen library).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for path in sorted(folder.glob("*.py")):
        if sum(map(len, parts)) >= max_bytes:
            break
        parts.append(path.read_bytes())
    if not parts:
        raise FileNotFoundError(f"no Python sources in {folder}: the demo learns the standard library's")
    text = np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8)
    return Corpus(text=torch.from_numpy(text), files=len(parts))


class Batches:
    """Batches in an order that ``seed`` fixes. Stateful: a checkpoint must hold the position in that order."""

    def __init__(self, corpus: Corpus, size: ModelSize, *, seed: int) -> None:
        windows = (corpus.text.numel() - 1) // size.context
        self._text, self._size = corpus.text, size
        self._order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))
        self.position = 0

    def next(self) -> Tensor:
        """Return the next batch, int64 of shape ``(batch, context + 1)``."""
        size = self._size
        picked = torch.arange(self.position * size.batch, (self.position + 1) * size.batch) % len(self._order)
        starts = self._order[picked] * size.context
        self.position += 1
        return self._text[starts[:, None] + torch.arange(size.context + 1)].long()

    def state_dict(self) -> dict[str, object]:
        """Return the position in the order."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position to the saved one."""
        self.position = state["position"]
