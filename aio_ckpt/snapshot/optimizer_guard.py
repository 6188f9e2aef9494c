"""Optimizer guards: before a guarded optimizer's ``step`` changes its tensors, the device waits for their copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt.errors import ConfigError, EngineClosedError
from aio_ckpt.leaves.compound import plain_tensors
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES, local_memory, span_of
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.memory.cuda import is_capturing_graph
from aio_ckpt.plan.pointer_fingerprint import fingerprint_of
from aio_ckpt.plan.structure import Structure

_SHARDED_TYPES = PLAIN_TYPES | {DTensor}


class OptimizerLike(Protocol):
    """Optimizer of torch, or another object with ``step()`` and ``param_groups`` like an optimizer's."""

    @property
    def param_groups(self) -> Any:
        """List of dicts. ``params`` of each is a list of the parameters that ``step`` changes."""

    @property
    def step(self) -> Callable[..., Any]:
        """Method that changes the parameters."""


class OptimizerGuards:
    """Guarded objects of one engine.

    Invariant: only the ``step`` of its object changes a guarded tensor. Before ``step``, the stream on which it runs
    waits for every copy that is issued and not done. For all other tensors, ``save()`` makes the caller's stream wait.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._removers: list[Callable[[], None]] = []
        self._events: tuple[CopyEvent, ...] = ()
        self._found: tuple[list[int], list[int], Sequence[int], frozenset[int]] | None = None
        """(addresses, lengths, fingerprint, leaves) of the last call of :meth:`leaves`. It holds no tensor."""
        self._is_closed = False

    def add(self, guarded: object) -> None:
        """Guard an object that has ``step`` and ``param_groups``. Idempotent.

        Raises:
            ConfigError: the object lacks them, or its ``step`` cannot be guarded.
            EngineClosedError: the engine was closed, so that the guard would never be removed.
        """
        if self._is_closed:
            raise EngineClosedError
        if not callable(getattr(guarded, "step", None)) or not hasattr(guarded, "param_groups"):
            raise ConfigError(
                f"guard({type(guarded).__name__}): needs an optimizer, with step() and param_groups; other tensors "
                "are safe without a guard"
            )
        if any(known is guarded for known in self._objects):
            return
        try:
            _tensors_of(guarded)
            self._removers.append(_before_each_step(guarded, self._before_step))
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"guard({type(guarded).__name__}): no param_groups like an optimizer's, or a step that cannot be "
                f"replaced ({error!r})"
            ) from error
        self._objects.append(guarded)

    def leaves(self, fingerprint: Sequence[int], structure: Structure) -> frozenset[int]:
        """Return the leaves on devices that only a guarded object changes. ``fingerprint`` holds all leaves' addresses.

        A leaf counts if a guarded tensor without gaps begins at its address and is at least as long. Other code may
        change the rest of a longer leaf, and the gaps of a guarded tensor.
        """
        if not self._objects:
            return frozenset()
        tensors = [tensor for guarded in self._objects for tensor in _tensors_of(guarded)]
        try:
            starts = fingerprint_of(tensors)
        except RuntimeError:  # a sparse tensor has no address, but its parts have
            tensors = [part for tensor in tensors for part in plain_tensors(tensor) if part.layout == torch.strided]
            starts = fingerprint_of(tensors)
        counts = list(map(torch.Tensor.numel, tensors))
        found = self._found
        if found is None or starts != found[0] or counts != found[1] or fingerprint is not found[2]:
            spans = [(*span_of(tensor), tensor.nbytes) for tensor in tensors]
            lengths = dict(sorted((start, extent) for start, extent, nbytes in spans if extent == nbytes))
            leaves = frozenset(
                leaf
                for leaf, address in enumerate(fingerprint)
                if structure.devices[leaf].type != "cpu"
                and 0 < structure.extent_bytes(leaf) <= lengths.get(address, 0)  # dict() keeps the longest per address
            )
            found = self._found = (starts, counts, fingerprint, leaves)
        return found[3]

    def before_next_step(self, events: Iterable[CopyEvent]) -> None:
        """Make each later ``step`` wait for these events, too, until they are reached."""
        if self._objects:
            self._events = tuple(event for event in (*self._events, *events) if not event.query())

    def close(self) -> None:
        """Remove every guard. The caller's current stream waits once for the copies that are issued and not done."""
        self._is_closed = True
        for event in self._events:
            with contextlib.suppress(RuntimeError):  # after the death of its CUDA context, the trainer steps no more
                event.fence()
        for remove in self._removers:
            remove()
        self._objects, self._removers, self._events = [], [], ()

    def _before_step(self) -> None:
        if is_capturing_graph():
            raise ConfigError(
                "a step inside a captured CUDA graph cannot be guarded: its replays would not wait. Leave guard() out, "
                "or call ticket.fence() before each replay"
            )
        for event in self._events:
            event.fence()


def _before_each_step(guarded: Any, wait: Callable[[], None]) -> Callable[[], None]:
    """Make ``guarded`` call ``wait`` before each ``step``. Return a function that undoes this."""
    if isinstance(guarded, torch.optim.Optimizer):
        return guarded.register_step_pre_hook(lambda *_: wait()).remove
    step, own = guarded.step, vars(guarded).get("step")

    def guarded_step(*args: object, **kwargs: object) -> object:
        wait()
        return step(*args, **kwargs)

    guarded.step = guarded_step

    def remove() -> None:
        if vars(guarded).get("step") is guarded_step:
            if own is None:
                del guarded.step
            else:
                guarded.step = own

    return remove


def _tensors_of(guarded: Any) -> list[torch.Tensor]:
    values: list[object] = [*chain.from_iterable(group["params"] for group in guarded.param_groups)]
    state = getattr(guarded, "state", None)
    if isinstance(state, Mapping):
        # The type is compared first, because isinstance() of an abstract class takes ten times as long.
        entries = (entry for entry in state.values() if type(entry) is dict or isinstance(entry, Mapping))
        values += chain.from_iterable(entry.values() for entry in entries)
    kinds = {*map(type, values)}
    if kinds <= PLAIN_TYPES:
        return values  # type: ignore[return-value]
    if not kinds <= _SHARDED_TYPES:
        values = [part for value in values if isinstance(value, torch.Tensor) for part in plain_tensors(value)]
    return [local_memory(value) if isinstance(value, DTensor) else value for value in values]  # type: ignore[misc]
