"""Stateful values of a template, and the tensors of ``state_dict()`` that a load fills in place, as ``dcp.load`` does.

``load_state_dict`` is then given the object's own tensors, so a module or an optimizer of torch has nothing to copy.
Other tensors are read into new memory, and ``load_state_dict`` copies or keeps them. Reads no data file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import has_load_hooks, is_load_of_torch, loads_by_names
from aio_ckpt.checkpoint.catalog import Shards, global_shape
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.rank_names import empty_containers, lent_names
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.leaves.objects import type_name
from aio_ckpt.leaves.tensor_memory import are_apart, memory_fault, memory_of, overlaps_itself, signature_of, span_of
from aio_ckpt.leaves.values import Shard, Target
from aio_ckpt.match.compounds import match_stateful_compounds
from aio_ckpt.match.fills import Fill, Fills
from aio_ckpt.match.modules import ModuleDifferences
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import branches_of_rank, stored_branch
from aio_ckpt.match.takers import StatefulTaker
from aio_ckpt.match.tensors import exact_addresses, fill_fault, full_shape, has_other_shape
from aio_ckpt.state.flatten import Template, leaves_of
from aio_ckpt.state.names import (
    NamedNode,
    below_each,
    branches_of,
    find_named,
    is_below,
    is_extra_state,
    listed,
    prefix_of,
)


def match_stateful(
    checkpoint: Checkpoint, template: Template, fills: Fills, ctx: ReadContext, options: LoadOptions
) -> tuple[list[StatefulTaker], ModuleDifferences, list[str]]:
    """Add what Stateful values take to ``fills``.

    Returns their takers, what modules lack or hold differently, and the faults. What is missing includes values of
    which nothing is stored.
    """
    own = _OwnTensors()
    if not template.stateful:
        return [], own.modules, []
    takers: list[StatefulTaker] = []
    rank = ctx.rank
    # The catalog lacks the PerRank values of a rank that did not save.
    names = list(filter(checkpoint.holds, checkpoint.names_of(rank)))
    counts = Counter(prefix for prefix, _ in template.stateful)
    faults = [
        f"{prefix!r} is the name of several values with state_dict(), as keys with dots join to one name: rename one"
        for prefix, count in counts.items()
        if count > 1
    ]
    grouped, branches = below_each(counts, names), branches_of_rank(checkpoint, rank)
    empty, lent = empty_containers(checkpoint, counts.keys() - grouped.keys(), rank), lent_names(checkpoint, rank)
    own_parts: dict[str, NamedNode] = {}
    for prefix, value in template.stateful:
        below = grouped.get(prefix, [])
        branch = stored_branch(checkpoint, prefix, below, branches)
        if lent and below and branch is not None and lent >= {*below} and not _takes_names(value):
            own_part = find_named(checkpoint.saved_skeleton(rank), {branch}, rank=rank)
            if own_part:  # it saved ``{}``, and gets that: what rank 0 saved is another's
                below, empty, own_parts = [], {*empty, prefix}, own_parts | own_part
        if prefix in below and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            faults.append(f"{prefix!r} is a {type(value).__name__} in the template and a single leaf in the checkpoint")
        elif below or prefix in empty:
            taker = StatefulTaker(
                checkpoint=checkpoint,
                name=prefix,
                value=value,
                names=below,
                branch=branch,
                ctx=ctx,
                options=options,
            )
            takers.append(taker)
            if branch is None and (fault := _branch_fault(prefix, value, checkpoint.compounds(rank))):
                faults.append(fault)
            faults += own.add(taker, checkpoint.catalog.shards)
        else:
            own.modules.missing.append(prefix)
    faults += match_stateful_compounds(checkpoint, takers, ctx)
    parts: Mapping[str, NamedNode] = {}
    if takers and checkpoint.has_skeleton:
        wanted = {taker.branch for taker in takers if taker.branch is not None}
        parts = find_named(checkpoint.skeleton(rank), wanted, rank=rank) | own_parts
    for taker in takers:
        taker.part = parts.get(taker.branch) if taker.branch is not None else None
    in_place = _add_fills(checkpoint, takers, fills, own, casts=options.cast)
    for taker in takers:
        if not isinstance(taker.value, (torch.nn.Module, torch.optim.Optimizer)):
            # Its load_state_dict may clear its tensors before it reads the given ones. Torch's own copies them at most.
            held = {name: own.held[name] for name in taker.names if name in in_place}
            # What it shares with other processes it keeps.
            taker.copied = [
                name
                for name, tensor in held.items()
                if type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.is_shared()  # type: ignore[no-untyped-call]
            ]
    # What shares memory with anything but its equal is never filled in place.
    own.modules.copied = [tensors for tensors in own.loaded_by_names if not tensors.keys() <= in_place]
    return takers, own.modules, faults


def _takes_names(value: object) -> bool:
    """Return whether a value takes what any rank saved under its names: a module that has some, or an optimizer."""
    return isinstance(value, torch.optim.Optimizer) or (isinstance(value, torch.nn.Module) and bool(value.state_dict()))


@dataclass(frozen=True, slots=True)
class _OwnTensors:
    """Tensors of the ``state_dict()`` of Stateful values, by their names."""

    held: dict[str, Target] = field(default_factory=dict)
    """Tensors that stored ones may fill in place."""
    layouts: dict[str, Target] = field(default_factory=dict)
    """Tensors whose layout and device newly allocated ones get."""
    loaded_by_names: list[Mapping[str, Target]] = field(default_factory=list)
    """Tensors of each module that loads by names."""
    modules: ModuleDifferences = field(default_factory=ModuleDifferences)

    def add(self, taker: StatefulTaker, shards: Mapping[str, Shards]) -> list[str]:
        """Add the tensors of a value for which tensors are stored, and return the faults."""
        name, value = taker.name, taker.value
        tensors = [stored for stored in taker.names if stored in shards]
        goes_by_names = isinstance(value, torch.nn.Module) and loads_by_names(value)
        if not (tensors or goes_by_names):  # state_dict() of a data loader, say, is slow: it is not called without need
            return []
        state_dict = value.state_dict()
        own = leaves_of(state_dict, name, rank=taker.ctx.rank)
        found = {
            stored: leaf
            for stored in tensors
            # set_extra_state() takes a tensor of any shape, and that of get_extra_state() may be a copy
            if isinstance(leaf := own.get(stored), (torch.Tensor, Shard)) and not is_extra_state(stored)
        }
        if goes_by_names:
            self.modules.add(taker, [f"{name and f'{name}.'}{key}" for key in state_dict], found)
            self.loaded_by_names.append(found)
        like = _layouts_below(name, value, tensors, found)
        if taker.options.skip_mismatched and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            taker.kept = {stored: kept for stored, kept in found.items() if has_other_shape(kept, shards[stored])}
        self.layouts.update(like)
        self.held.update(found)
        return _meta_fault(name, value, like | found)


def _add_fills(
    checkpoint: Checkpoint,
    takers: Sequence[StatefulTaker],
    fills: Fills,
    own: _OwnTensors,
    *,
    casts: bool,
) -> AbstractSet[str]:
    """Add what the takers need to ``fills``. A tensor that a value holds is filled in place if it can be.

    Returns the names of the tensors that are filled in place.
    """
    catalog, held = checkpoint.catalog, own.held
    addresses = exact_addresses(list(held.values()), [catalog.shards[name] for name in held])
    fitting = {
        name: address
        for (name, tensor), address in zip(held.items(), addresses, strict=True)
        if address
        or (fill_fault(tensor, catalog.shards[name], casts=casts) is None and not overlaps_itself(memory_of(tensor)))
    }
    below = [name for taker in takers for name in taker.names if name not in taker.kept]
    stored = {name: catalog.shards[name] for name in below if name in catalog.shards}
    targets = _fillable(
        {name: held[name] for name in fitting}, stored, [taker.value for taker in takers], fills.spans()
    )
    fills.objects += (name for name in below if name in catalog.objects)
    for name, shards in stored.items():
        like = own.layouts.get(name)
        if like is not None and full_shape(like) != global_shape(shards):  # a scalar, say, where a shard is held now
            like = None
        fills.others.append(Fill(name, targets.get(name), like, fitting[name] if name in targets else 0))
    return targets.keys()


def _branch_fault(prefix: str, value: Any, compounds: Iterable[str]) -> str | None:
    """Return why ``load_state_dict`` of ``value`` cannot take leaves of several branches; None if it can."""
    if isinstance(value, torch.nn.Module) and not any(is_below(name, prefix) for name in compounds):
        return None
    return (
        f"{prefix!r} is a {type(value).__name__}, and rename= changes names inside of what is stored for it: rename "
        "the whole branch"
    )


def _meta_fault(prefix: str, value: Any, held: Mapping[str, Target]) -> list[str]:
    """Return the fault of tensors on the meta device, as a list of at most one.

    ``load_state_dict`` of torch's own would report success for them and load nothing, as they have no memory.
    """
    meta = [name for name, tensor in held.items() if memory_of(tensor).is_meta]
    is_module = isinstance(value, torch.nn.Module)
    if not meta or not is_load_of_torch(value) or (is_module and any(map(has_load_hooks, value.modules()))):
        return []
    of = f"{prefix or 'the template'!r}, a {type_name(value)}"
    remedy = "materialize it" if is_module else "materialize the model before the optimizer is made"
    return [
        f"{listed(meta)} of {of}, on the meta device, where nothing can be loaded to: {remedy} (.to_empty(device=...))"
    ]


def moment_faults(takers: Sequence[StatefulTaker], mismatched: Mapping[str, Target]) -> Iterator[str]:
    """Yield the fault of each optimizer without state that would get moments of a parameter of another shape.

    ``mismatched``: the tensors that stay as they are, by name.

    ``load_state_dict`` takes moments of any shape, and ``step()`` would fail. An optimizer with state keeps its own.
    """
    optimizers = [taker for taker in takers if isinstance(taker.value, torch.optim.Optimizer)]
    kept: dict[object, str] = {}
    if optimizers:
        kept = {place: name for name, own in mismatched.items() if (place := _place_of(own)) is not None}
    for taker in optimizers if kept else ():
        branches = {branch for name in taker.names for branch in branches_of(name)}
        for number, parameter in enumerate(_parameters(taker.value)):
            name = kept.get(_place_of(parameter))
            state = f"{prefix_of(taker.name or None)}state.{number}"
            if name is None or state not in branches or taker.value.state.get(parameter):
                continue
            if not _holds_shape(taker, state, parameter.shape):  # else of a name that is tied to it, and is loaded
                yield (
                    f"{state!r} belongs to {name!r}, which has another shape here, and {taker.name!r} has no state of "
                    "its own to keep: step() it once before the load, or leave it out of the template"
                )
                break


def _holds_shape(taker: StatefulTaker, branch: str, shape: torch.Size) -> bool:
    """Return whether a tensor of this shape is stored below ``branch``."""
    shards = taker.checkpoint.catalog.shards
    below = (name for name in taker.names if name in shards and is_below(name, branch))
    return any(global_shape(shards[name]) == shape for name in below)


def _place_of(tensor: Target) -> tuple[int, torch.Size] | None:
    """Return address and shape of the memory of a tensor; None if it has none."""
    if memory_fault(tensor) is not None:
        return None
    memory = memory_of(tensor)
    return (memory.data_ptr(), memory.shape) if memory.numel() else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of their numbers in its ``state_dict()``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layouts_below(prefix: str, value: Any, names: Iterable[str], held: Mapping[str, Target]) -> dict[str, Target]:
    """Return the tensors whose layout and device newly allocated ones get, by name.

    They are the DTensors and shards of ``held``. For an optimizer that was not stepped yet, they are its parameters:
    ``load_state_dict`` of torch moves the state of a parameter to the parameter's device.
    """
    found: dict[str, Target] = {name: own for name, own in held.items() if isinstance(own, (DTensor, Shard))}
    if not isinstance(value, torch.optim.Optimizer):
        return found
    parameters = _parameters(value)
    is_moved, dot = is_load_of_torch(value), prefix and f"{prefix}."
    for name in names:
        number, _, key = name.removeprefix(f"{dot}state.").partition(".")
        if key and number.isdigit() and int(number) < len(parameters):
            parameter = parameters[int(number)]
            if isinstance(parameter, DTensor) or (is_moved and key != "step" and not parameter.is_cpu):
                found.setdefault(name, parameter)
    return found


def _fillable(
    held: Mapping[str, Target],
    shards: Mapping[str, Shards],
    stateful: Iterable[Any],
    taken: Sequence[tuple[int, int]],
) -> dict[str, Target]:
    """Return the tensors that are filled in place, by name. Tied names get one tensor.

    These tensors are left out: those that share memory with another one or with ``taken``; those that are tied in the
    checkpoint and not in the template; those of a module with load hooks of its own, which may rename or drop values.

    Args:
        held: tensors of ``state_dict()`` by name; they fit the stored ones.
        taken: (address, bytes) of memory that other leaves of the template use.
    """
    tied: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in shards:
        tied[tuple(map(id, shards[name]))].append(name)
    barred = {*_hooked_memory(stateful)}
    groups: list[tuple[list[str], torch.Tensor]] = []
    for names in tied.values():
        tensors = [memory_of(held[name]) for name in names if name in held]
        if len(tensors) < len(names) or (len(names) > 1 and len({*map(signature_of, tensors)}) > 1):
            continue
        if not tensors[0].is_inference() and tensors[0].data_ptr() not in barred:
            groups.append((names, tensors[0]))
    is_apart = are_apart([*(span_of(tensor) for _, tensor in groups), *taken])
    alone = zip(groups, is_apart.tolist(), strict=False)
    return {name: held[names[0]] for (names, _), is_alone in alone if is_alone for name in names}


def _hooked_memory(stateful: Iterable[Any]) -> Iterator[int]:
    """Yield the addresses of parameters and buffers in, or below, modules with load hooks of their own."""
    for value in stateful:
        if isinstance(value, torch.nn.Module):
            hooked = [value] if not is_load_of_torch(value) else filter(has_load_hooks, value.modules())
            for module in hooked:
                tensors = (*module.parameters(), *module.buffers())
                yield from (memory_of(tensor).data_ptr() for tensor in tensors if memory_fault(tensor) is None)
