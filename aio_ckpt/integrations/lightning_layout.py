"""Layout of a checkpoint of Lightning: what the engine stores, and the rest. Pure, and without Lightning.

The engine stores ``state_dict``, ``optimizer_0`` and so on, as ModelParallelStrategy names them, and other entries that
hold tensors. Everything else is one leaf: the bytes of ``torch.save``. So no object of a user can break a save, and
``weights_only`` of the reader rules what is read, as with a file of Lightning.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

from aio_ckpt.state.check_leaves import tensor_fault

META = "aio_ckpt_meta"
"""Leaf that holds what is not stored by the engine. In a sharded checkpoint, ``meta.pt`` has the same bytes."""
OPTIMIZER = "optimizer_"
"""Beginning of the names of the optimizers' entries; their indices follow."""
_LEFT = "aio_ckpt_left"
"""Entry of the rest: values that the engine did not take, by entry and key."""
_OF_TRAINER = "pytorch-lightning_version"
"""Entry that each checkpoint of a Trainer has."""
_PLAIN = frozenset((int, float, bool, str, type(None)))
_KEYS = frozenset((str, int))


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries that the engine stores, and the rest, which ``torch.save`` stores. Copies no tensor.

    Callbacks are of the rest: their keys are paths, which differ in each save, so that each would be planned anew.
    """
    entries: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    left: dict[str, dict[Any, Any]] = {}
    for name, value in _as_sharded(checkpoint).items():
        if name == "callbacks" or not _holds_tensor(value):
            rest[name] = value
        elif type(value) in (dict, OrderedDict):
            refused = {key: item for key, item in value.items() if type(key) not in _KEYS or not _is_plain(item)}
            entries[name] = copy(value)
            for key in refused:
                del entries[name][key]
            if refused:
                left[name] = refused
        elif _is_plain(value):
            entries[name] = value
        else:
            rest[name] = value
    return entries, {**rest, _LEFT: left} if left else rest


def join(entries: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`split`."""
    for name, refused in rest.pop(_LEFT, {}).items():
        entries[name].update(refused)
    return _as_one(entries | rest)


def moved(value: Any, map_location: Any) -> Any:
    """Return a nested value that was read into host memory, with its tensors where ``map_location`` wants them."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            value[key] = moved(item, map_location)
        return value
    if type(value) in (list, tuple):
        return type(value)(moved(item, map_location) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu", "cpu")
    elif callable(map_location):
        storage = map_location(value.untyped_storage(), "cpu")
        map_location = "cpu" if storage is None else storage.device
    return value.to(map_location)


def as_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _as_sharded(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the entries of a Trainer's checkpoint as Lightning does for its sharded ones."""
    renamed = dict(checkpoint)
    if _OF_TRAINER in renamed and (states := renamed.get("optimizer_states")):
        del renamed["optimizer_states"]
        renamed.update({f"{OPTIMIZER}{index}": state for index, state in enumerate(states)})
    return renamed


def _as_one(sharded: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`_as_sharded`, and the names of FSDPStrategy."""
    if _OF_TRAINER not in sharded:
        return sharded
    if "model" in sharded and "state_dict" not in sharded:
        sharded["state_dict"] = sharded.pop("model")
    states: list[Any] = []
    while (name := f"{OPTIMIZER}{len(states)}") in sharded:
        states.append(sharded.pop(name))
    return sharded | {"optimizer_states": states} if states else sharded


def _is_plain(value: Any) -> bool:
    """Return whether the engine stores a value so that reading it back runs no code."""
    kind = type(value)  # loops without generators: there may be 100,000 tensors
    if kind in _PLAIN:
        return True
    if isinstance(value, torch.Tensor):
        if isinstance(value, torch.nn.Parameter):  # the engine reads a tensor, which no module takes as its parameter
            return False
        return value.layout is torch.sparse_coo or tensor_fault(value) is None
    if kind in (dict, OrderedDict):
        for key, item in value.items():  # noqa: SIM110
            if type(key) not in _KEYS or not _is_plain(item):
                return False
        return True
    if kind in (list, tuple):
        for item in value:  # noqa: SIM110
            if not _is_plain(item):
                return False
        return True
    return False


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensor, value))
