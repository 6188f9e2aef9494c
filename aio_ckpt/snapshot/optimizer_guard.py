"""Optimizer guards: ``step`` of a guarded optimizer waits, on the device, for the copies of what it will change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import local_tensor
from aio_ckpt.errors import ConfigError, EngineClosedError
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.memory.cuda import is_capturing_graph
from aio_ckpt.plan.structure import Structure, addresses
from aio_ckpt.state.compound import plain_tensors
from aio_ckpt.state.tensor_memory import span_of

__all__ = ["OptimizerGuards"]

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_SHARDED_TYPES = _PLAIN_TYPES | {DTensor}


class OptimizerGuards:
    """The guarded objects of one engine.

    Who may change what when: a guarded tensor is changed by its object's ``step`` alone, and the stream on which
    ``step`` runs waits before it for every copy that was issued and is not done. Everything else is awaited by
    ``save()`` itself.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._removers: list[Callable[[], None]] = []
        self._events: tuple[CopyEvent, ...] = ()
        self._found: tuple[list[int], list[int], Sequence[int], frozenset[int]] | None = None  # numbers, no tensor
        self._is_closed = False

    def add(self, guarded: object) -> None:
        """Guard an object with ``step`` and ``param_groups``; twice is once.

        Raises:
            ConfigError: it has none, or none that can be guarded.
            EngineClosedError: nobody would take the guard off.
        """
        if self._is_closed:
            raise EngineClosedError("the engine was closed: open a new one")
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
        """Positions of the tensors on devices that a guarded object alone changes, given where all tensors are.

        A leaf that begins where a guarded tensor does and is longer is none of them, nor is one in the memory of a
        tensor with gaps: others may change the rest.
        """
        if not self._objects:
            return frozenset()
        tensors = [tensor for guarded in self._objects for tensor in _tensors_of(guarded)]
        try:
            starts = addresses(tensors)
        except RuntimeError:  # sparse ones have no address
            tensors = [part for tensor in tensors for part in plain_tensors(tensor) if part.layout == torch.strided]
            starts = addresses(tensors)
        counts = list(map(torch.Tensor.numel, tensors))
        found = self._found
        if found is None or starts != found[0] or counts != found[1] or fingerprint is not found[2]:
            spans = [(*span_of(tensor), tensor.nbytes) for tensor in tensors]
            lengths = dict(sorted((start, extent) for start, extent, nbytes in spans if extent == nbytes))
            leaves = frozenset(
                leaf
                for leaf, address in enumerate(fingerprint)
                if structure.devices[leaf].type != "cpu"
                and 0 < structure.extent_bytes(leaf) <= lengths.get(address, 0)  # of one address the longest stayed
            )
            found = self._found = (starts, counts, fingerprint, leaves)
        return found[3]

    def wait_for(self, events: Iterable[CopyEvent]) -> None:
        """From now on each ``step`` waits for these as well, until they are reached."""
        if self._objects:
            self._events = tuple(event for event in (*self._events, *events) if not event.query())

    def close(self) -> None:
        """Take every guard off; what was issued is still awaited by a last wait of the caller's current stream."""
        self._is_closed = True
        for event in self._events:
            with contextlib.suppress(RuntimeError):  # a dead context: the trainer ends, and nothing steps any more
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
        events = self._events
        for event in events:
            event.fence()


def _before_each_step(guarded: Any, wait: Callable[[], None]) -> Callable[[], None]:
    """Call ``wait`` before each ``step``; what takes that back."""
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
        # isinstance() of an abstract class takes ten times as long.
        entries = (entry for entry in state.values() if type(entry) is dict or isinstance(entry, Mapping))
        values += chain.from_iterable(entry.values() for entry in entries)
    kinds = {*map(type, values)}
    if kinds <= _PLAIN_TYPES:
        return values  # type: ignore[return-value]
    if not kinds <= _SHARDED_TYPES:
        values = [part for value in values if isinstance(value, torch.Tensor) for part in plain_tensors(value)]
    return [local_tensor(value) if isinstance(value, DTensor) else value for value in values]  # type: ignore[misc]
