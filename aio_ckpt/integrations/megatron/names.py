"""Names of Megatron that this integration uses. All that is private in Megatron stands here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["TRIED_CORE", "TRIED_TRAINING", "Place", "core", "missing_in_core", "missing_in_training", "training"]

TRIED_CORE = ("0.16.1", "0.19.2")
"""Versions of ``megatron.core`` that the strategies and the queue were tried with."""
TRIED_TRAINING = ("0.19.2",)
"""Versions of ``megatron.training`` that ``install()`` was tried with."""

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_TRAINING = "megatron.training"
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Attribute of a module of Megatron."""

    module: str
    name: str
    is_needed: bool = True
    """Whether nothing works without it. False if some of the tried versions lack it."""

    @property
    def value(self) -> Any:
        """Value of the attribute; None if there is none."""
        value = self._value
        return None if value is _MISSING else value

    @property
    def is_there(self) -> bool:
        """Whether this Megatron has the attribute."""
        return self._value is not _MISSING

    def put(self, value: object) -> None:
        """Set the attribute."""
        setattr(importlib.import_module(self.module), self.name, value)

    @property
    def _value(self) -> Any:
        with suppress(ImportError):
            return getattr(importlib.import_module(self.module), self.name, _MISSING)
        return _MISSING

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class core:  # noqa: N801 - a namespace
    """Places in ``megatron.core``."""

    save_strategy = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="TorchDistSaveShardedStrategy")
    load_strategy = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="TorchDistLoadShardedStrategy")
    save_planner = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="MCoreSavePlanner")
    by_key = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="_replace_state_dict_keys_with_sharded_keys")
    """``(state, only main replicas) -> (lists of sharded values by key, ...)``."""
    to_torch = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="mcore_to_pyt_state_dict")
    """``(lists by key, is loading) -> a state that DCP saves``; sets the ``data`` of what it is given."""
    reader = Place(module=f"{_CHECKPOINTING}.strategies.torch", name="_get_filesystem_reader")
    """``(path, ...) -> a storage reader``. All loads of a strategy call it."""
    common_reader = Place(module=f"{_CHECKPOINTING}.serialization", name="_get_filesystem_reader", is_needed=False)
    """The same function, by which 0.19 reads the common state."""
    request = Place(module=f"{_CHECKPOINTING}.strategies.async_utils", name="AsyncRequest")
    tensor = Place(module=f"{_CHECKPOINTING}.mapping", name="ShardedTensor")


class training:  # noqa: N801 - a namespace
    """Places in ``megatron.training``."""

    save_strategy = Place(module=f"{_TRAINING}.checkpointing", name="TorchDistSaveShardedStrategy")
    queue = Place(module=f"{_TRAINING}.async_utils", name="_async_calls_queue")
    """The one queue of async calls; None before the first use."""
    start_worker = Place(module=f"{_TRAINING}.async_utils", name="init_persistent_async_worker")
    start_worker_at_first = Place(module=f"{_TRAINING}.initialize", name="init_persistent_async_worker")
    """The same function, as ``initialize_megatron`` calls it."""
    reset_worker = Place(module=f"{_TRAINING}.async_utils", name="reset_persistent_async_worker")
    reset_worker_at_restart = Place(module=f"{_TRAINING}.inprocess_restart", name="reset_persistent_async_worker")
    """The same function, as an in-process restart calls it."""


def missing_in_core() -> list[Place]:
    """Return the places that this ``megatron.core`` lacks."""
    return _missing(core)


def missing_in_training() -> list[Place]:
    """Return the places that this ``megatron.training`` lacks."""
    return _missing(training)


def _missing(namespace: type) -> list[Place]:
    places: Sequence[Any] = list(vars(namespace).values())
    return [place for place in places if isinstance(place, Place) and place.is_needed and not place.is_there]
