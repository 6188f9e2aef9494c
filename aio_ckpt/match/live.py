"""Live: which tensors of Stateful values a load fills where they are, as ``dcp.load`` does. Reads no data file.

``load_state_dict`` is then given the object's own tensors, so a module or an optimizer of torch has nothing to copy.
All that is not filled is read into fresh memory, and ``load_state_dict`` copies it or keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import has_load_hooks, is_load_of_torch
from aio_ckpt.checkpoint.catalog import Shards
from aio_ckpt.state.flatten import leaves_of
from aio_ckpt.state.tensor_memory import are_apart, memory_fault, memory_of, signature_of, span_of
from aio_ckpt.state.values import Shard, Target

__all__ = ["fillable", "layouts_below", "tensors_below"]


def tensors_below(prefix: str, value: Any, names: Iterable[str], *, rank: int) -> dict[str, Target]:
    """Tensors of ``value.state_dict()``, which is called once, that have one of ``names``."""
    leaves = leaves_of(value.state_dict(), prefix, rank=rank)
    return {name: leaf for name in names if isinstance(leaf := leaves.get(name), (torch.Tensor, Shard))}


def layouts_below(prefix: str, value: Any, names: Iterable[str], there: Mapping[str, Target]) -> dict[str, Target]:
    """Tensors whose layout and device fresh ones take, by name.

    They are the DTensors and shards that are there and, for an optimizer that was not stepped yet, its parameters:
    ``load_state_dict`` of torch moves the state of a parameter to the parameter's device.
    """
    found: dict[str, Target] = {name: own for name, own in there.items() if isinstance(own, (DTensor, Shard))}
    if not isinstance(value, torch.optim.Optimizer):
        return found
    parameters = [parameter for group in value.param_groups for parameter in group["params"]]
    is_moved, dot = is_load_of_torch(value), prefix and f"{prefix}."
    for name in names:
        number, _, key = name.removeprefix(f"{dot}state.").partition(".")
        if key and number.isdigit() and int(number) < len(parameters):
            parameter = parameters[int(number)]
            if isinstance(parameter, DTensor) or (is_moved and key != "step" and not parameter.is_cpu):
                found.setdefault(name, parameter)
    return found


def fillable(
    there: Mapping[str, Target],
    shards: Mapping[str, Shards],
    stateful: Iterable[Any],
    taken: Sequence[tuple[int, int]],
) -> dict[str, Target]:
    """Those of ``there``, which fit what is stored, that are filled where they are, by name.

    Left out are tensors that share memory with another of these or with ``taken`` (address and bytes each), that are
    tied in the checkpoint and not here, or that belong to a module with load hooks of its own, which may rename or drop
    what is stored. Tied names get one tensor.
    """
    tied: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in shards:
        tied[tuple(map(id, shards[name]))].append(name)
    barred = {*_hooked_memory(stateful)}
    groups: list[tuple[list[str], torch.Tensor]] = []
    for names in tied.values():
        tensors = [memory_of(there[name]) for name in names if name in there]
        if len(tensors) < len(names) or (len(names) > 1 and len({*map(signature_of, tensors)}) > 1):
            continue
        if not tensors[0].is_inference() and tensors[0].data_ptr() not in barred:
            groups.append((names, tensors[0]))
    spans = [*(span_of(tensor) for _, tensor in groups), *taken]
    is_apart = are_apart(*np.array(spans, np.int64).reshape(-1, 2).T)
    alone = zip(groups, is_apart.tolist(), strict=False)
    return {name: there[names[0]] for (names, _), is_alone in alone if is_alone for name in names}


def _hooked_memory(stateful: Iterable[Any]) -> Iterator[int]:
    """Addresses of parameters and buffers in, or below, modules with load hooks of their own."""
    for value in stateful:
        if isinstance(value, torch.nn.Module):
            hooked = [value] if not is_load_of_torch(value) else filter(has_load_hooks, value.modules())
            for module in hooked:
                tensors = (*module.parameters(), *module.buffers())
                yield from (memory_of(tensor).data_ptr() for tensor in tensors if memory_fault(tensor) is None)
