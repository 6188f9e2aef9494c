"""What ``load_state_dict`` of a module of torch refuses or converts, found before anything is touched. Pure.

Torch itself copies what agrees in name and shape and raises for the rest, so that the module holds a mix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from aio_ckpt.checkpoint.catalog import Shards, global_shape
from aio_ckpt.checkpoint.rank_names import empty_containers
from aio_ckpt.leaves.objects import type_name
from aio_ckpt.leaves.tensor_memory import memory_of
from aio_ckpt.leaves.values import Target
from aio_ckpt.match.missing_names import prefix_remedy
from aio_ckpt.match.takers import StatefulTaker
from aio_ckpt.match.tensors import has_other_shape, shape_fault
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.names import branches_of, is_extra_state, listed, prefix_of


@dataclass(slots=True)
class ModuleDifferences:
    """Differences between the modules of a template and what is stored for them."""

    missing: list[str] = field(default_factory=list)
    """Names that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Names that a module lacks, and are stored for it."""
    remedies: list[str] = field(default_factory=list)
    """What helps against missing names."""
    faults: list[str] = field(default_factory=list)
    converted: list[tuple[str, torch.dtype]] = field(default_factory=list)
    """Names and dtypes of the tensors that get values of another dtype."""
    copied: list[Mapping[str, Target]] = field(default_factory=list)
    """Tensors by name of each module of which ``load_state_dict`` copies some: they are not all filled in place."""

    def add(self, taker: StatefulTaker, own: Sequence[str], found: Mapping[str, Target]) -> None:
        """Add the differences of one module whose ``load_state_dict`` goes by names.

        Args:
            own: names in the template of what its ``state_dict()`` holds.
            found: those of them that are plain tensors both there and in the checkpoint, without extra states.
        """
        prefix, options, stored = taker.name, taker.options, taker.checkpoint.catalog.shards
        mine = {*own}
        given = {part for name in taker.names for part in branches_of(name)}
        missing = [name for name in own if name not in given]
        if extra := [name for name in missing if is_extra_state(name)]:
            held_empty = _stored_empty(taker, extra)
            missing = [name for name in missing if name not in held_empty]
        unexpected = [name for name in taker.names if mine.isdisjoint(branches_of(name)) and _is_refused(taker, name)]
        if missing and not options.allow_missing:
            self.missing += missing
            start = len(prefix_of(prefix or None))
            keys, others = [name[start:] for name in own], [name[start:] for name in taker.names]
            if remedy := prefix_remedy(keys, others, name=prefix, branch=taker.branch):
                self.remedies.append(remedy)
            self.unexpected += unexpected
        elif unexpected:
            stored_name = taker.checkpoint.stored_name  # rename= takes the names of the checkpoint
            tops = _tops([*map(stored_name, unexpected)], map(stored_name, taker.names), below=taker.branch or "")
            out = first_of([f"{name!r}: None" for name in tops])
            self.faults.append(
                f"{prefix or 'the template'!r}, a {type_name(taker.value)}, lacks {listed(unexpected)}, stored for it: "
                f"rename={{{out}}} leaves them out"
            )
        for name, tensor in found.items():
            shards = stored[name]
            if has_other_shape(tensor, shards):
                if not (options.skip_mismatched or _is_old_scalar(tensor, shards)):
                    self.faults.append(f"{name!r} {shape_fault(tensor, shards)}")
            elif memory_of(tensor).dtype is not shards[0].dtype:
                self.converted.append((name, memory_of(tensor).dtype))


def _stored_empty(taker: StatefulTaker, names: Sequence[str]) -> Set[str]:
    """Return those of ``names``, below which no leaf is stored, that were saved as an empty container."""
    if taker.branch is None:
        return frozenset()
    start, prefix = len(prefix_of(taker.name or None)), prefix_of(taker.branch or None)
    stored = {prefix + name[start:]: name for name in names}
    return {stored[name] for name in empty_containers(taker.checkpoint, stored.keys(), taker.ctx.rank)}


def _is_refused(taker: StatefulTaker, name: str) -> bool:
    """Return whether the module refuses the stored ``name``, which its ``state_dict()`` lacks.

    A module may take an extra state and give none.
    """
    place = next((branch for branch in branches_of(name) if is_extra_state(branch)), None)
    if place is None:
        return True
    try:
        owner = taker.value.get_submodule(place[len(prefix_of(taker.name or None)) :].rpartition(".")[0])
    except AttributeError:
        return True
    return type(owner).set_extra_state is torch.nn.Module.set_extra_state


def _tops(unexpected: Sequence[str], names: Iterable[str], *, below: str) -> list[str]:
    """Return the fewest names and branches that hold all of ``unexpected`` and none of the other ``names``.

    ``below``: name of the module that holds them all.
    """
    kept = {part for name in {*names}.difference(unexpected) for part in branches_of(name)} | {*branches_of(below)}
    tops = ([part for part in branches_of(name) if part not in kept][-1] for name in unexpected)
    return [*dict.fromkeys(tops)]


def _is_old_scalar(tensor: Target, shards: Shards) -> bool:
    """Return whether torch takes the only element of the stored tensor, as PyTorch 0.3 had no scalars."""
    return not memory_of(tensor).shape and global_shape(shards) == (1,)
