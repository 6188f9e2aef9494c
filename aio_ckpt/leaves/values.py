"""Values of a state that have a meaning of their own: kinds of leaves, shards, values of one rank, stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import torch

from aio_ckpt.errors import ConfigError


class Stateful(Protocol):
    """Object that tells and takes its state: a module, an optimizer, a scheduler, or one of your own."""

    def state_dict(self) -> Any:
        """Return what is stored. ``load`` fills the tensors in it in place."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Take what was stored."""


State: TypeAlias = Mapping[Any, Any] | Stateful
"""State of a trainer: a mapping, or one Stateful object. The values of the mapping may be tensors, arrays, Stateful
objects, plain Python values, and dicts, lists and tuples of these."""


class LeafKind(IntEnum):
    """Kinds of leaves by how they are stored. The numbers are part of the on-disk skeleton."""

    TENSOR = 0
    ARRAY = 1
    """A numpy array of a dtype that torch has, stored as a tensor item."""
    OBJECT = 2
    SCALAR_ARRAY = 3
    """A numpy scalar, stored as a 0-dim tensor item."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Mark of a value that each rank stores and gets back for itself: RNG state, data position, a local optimizer."""

    value: object
    """Any state that ``save`` takes. A module or an optimizer is loaded in place."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A box of a global tensor; other ranks hold the rest under the same name.

    It serves programs that shard without DTensor (Megatron). The shards of all ranks together cover the tensor. Equal
    boxes are replicas. ``load`` fills ``tensor`` from the stored shards, however the tensor was cut. ``read`` gives the
    whole tensor.

    Raises:
        ConfigError: the box does not lie inside ``global_shape``.
    """

    tensor: torch.Tensor
    """Elements of the box, a plain tensor that may be empty."""
    global_shape: Sequence[int]
    """Shape of the global tensor, kept as a tuple."""
    offsets: Sequence[int]
    """Begin of the box in the global tensor, in elements per dimension, kept as a tuple."""

    def __post_init__(self) -> None:
        shape, offsets = tuple(map(int, self.global_shape)), tuple(map(int, self.offsets))
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "offsets", offsets)
        box = tuple(self.tensor.shape)
        is_inside = len(box) == len(shape) == len(offsets) and all(
            start >= 0 and start + size <= whole for start, size, whole in zip(offsets, box, shape, strict=True)
        )
        if not is_inside:
            raise ConfigError(
                f"Shard: a box of shape {box} at {offsets} does not lie inside a tensor of shape {shape}: give as many "
                "dimensions to each, and offsets in elements"
            )


@dataclass(frozen=True, slots=True, eq=False)
class OwnedShard(Shard):
    """Shard of a tensor that knows its place in the global tensor."""

    owner: torch.Tensor
    """Tensor that knows the place, such as a ``ShardedTensor``."""


Target: TypeAlias = torch.Tensor | Shard
"""Tensor or shard that a load fills."""


@dataclass(frozen=True, slots=True)
class UntrustedObject:
    """Stand-in for an object that ``read(skip_untrusted=True)`` left unread, as only running code reads it."""

    name: str
    """Name of the leaf."""
    reason: str
    """Why the object was not read, and what would read it."""
