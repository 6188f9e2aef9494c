"""Live tensors: those of Stateful values that a load fills in place, as ``dcp.load`` does. Reads no data file.

``load_state_dict`` is then given the object's own tensors, so a module or an optimizer of torch has nothing to copy.
Other tensors are read into new memory, and ``load_state_dict`` copies or keeps them.
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
from aio_ckpt.leaves.tensor_memory import are_apart, memory_fault, memory_of, signature_of, span_of
from aio_ckpt.leaves.values import Shard, Target
from aio_ckpt.state.flatten import leaves_of


def tensors_below(prefix: str, value: Any, names: Iterable[str], *, rank: int) -> dict[str, Target]:
    """Return the tensors of ``value.state_dict()`` that have one of ``names``. Calls it once."""
    leaves = leaves_of(value.state_dict(), prefix, rank=rank)
    return {name: leaf for name in names if isinstance(leaf := leaves.get(name), (torch.Tensor, Shard))}


def layouts_below(prefix: str, value: Any, names: Iterable[str], there: Mapping[str, Target]) -> dict[str, Target]:
    """Return the tensors whose layout and device newly allocated ones get, by name.

    They are the DTensors and shards of ``there``. For an optimizer that was not stepped yet, they are its parameters:
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
    """Return the tensors that are filled in place, by name. Tied names get one tensor.

    These tensors are left out: those that share memory with another one or with ``taken``; those that are tied in the
    checkpoint and not in the template; those of a module with load hooks of its own, which may rename or drop values.

    Args:
        there: tensors of ``state_dict()`` by name; they fit the stored ones.
        taken: (address, bytes) of memory that other leaves of the template use.
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
    """Yield the addresses of parameters and buffers in, or below, modules with load hooks of their own."""
    for value in stateful:
        if isinstance(value, torch.nn.Module):
            hooked = [value] if not is_load_of_torch(value) else filter(has_load_hooks, value.modules())
            for module in hooked:
                tensors = (*module.parameters(), *module.buffers())
                yield from (memory_of(tensor).data_ptr() for tensor in tensors if memory_fault(tensor) is None)
