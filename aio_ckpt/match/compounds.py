"""Compound tensors of a template: held against those of a checkpoint, and proven once their parts are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.state import compound
from aio_ckpt.state.compound import CompoundTensor
from aio_ckpt.state.containers import Notes
from aio_ckpt.state.flatten import Template, compounds_of
from aio_ckpt.state.names import compound_notes, is_below
from aio_ckpt.state.skeleton import may_hold_compounds

__all__ = ["CompoundTarget", "check_targets", "match_compounds", "own_below", "stored_compounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompoundTarget:
    """A compound tensor of the template, whose parts are filled."""

    name: str
    """Its name."""
    own: CompoundTensor
    """It and its parts."""
    stored: Notes
    """What is to hold of it afterwards."""


def match_compounds(
    checkpoint: Checkpoint, template: Template, missing: Sequence[str], rank: int
) -> tuple[list[CompoundTarget], list[str], list[str]]:
    """What to fill; what does not fit; and which of the names in ``missing`` are missing all the same."""
    stored = _stored(checkpoint, rank) if template.compounds or missing else {}
    targets: list[CompoundTarget] = []
    faults: list[str] = []
    told = [name for name in missing if name in stored]
    faults += [
        f"{name!r} is a {compound.kind_of(())} in the template and a {compound.kind_of(stored[name])} in the checkpoint"
        for name in told
    ]
    for name, own in template.compounds.items():
        if name in stored:
            fault = compound.difference(own.notes, stored[name])
        elif name in checkpoint.catalog.shards:
            fault = f"is a {compound.kind_of(own.notes)} in the template and a {compound.kind_of(())} in the checkpoint"
            if not checkpoint.has_skeleton:
                fault += (
                    ", or one that dcp.save pickled: dcp.load with an aio_ckpt.dcp.Reader loads what torch.load can"
                )
        else:
            continue
        if fault is None:
            targets.append(CompoundTarget(name=name, own=own, stored=stored[name]))
        else:
            faults.append(f"{name!r} {fault}")
            told += [part for part in missing if is_below(part, name)]
    return targets, faults, [name for name in missing if name not in told]


def own_below(
    checkpoint: Checkpoint, stateful: Sequence[tuple[str, Any, Sequence[str]]], *, rank: int, trusted: bool
) -> tuple[dict[str, CompoundTensor], list[str]]:
    """Compound tensors of Stateful values by full name, and why some of them do not fit.

    Raises:
        UnsafeObjectError: a tensor is of a type that a Stateful value does not have yet, and that may not be made.
    """
    stored = _stored(checkpoint, rank) if stateful else {}
    found: dict[str, CompoundTensor] = {}
    faults: list[str] = []
    for prefix, value, _ in stateful:
        typed = {name: notes for name, notes in stored.items() if "type" in dict(notes) and is_below(name, prefix)}
        if not typed:
            continue
        found |= compounds_of(value.state_dict(), prefix, rank=rank)
        for name, notes in typed.items():
            if name in found:
                fault = compound.difference(found[name].notes, notes)
                faults += [] if fault is None else [f"{name!r} {fault}"]
            elif compound.allowed_type(dict(notes), trusted=trusted) is None:
                raise UnsafeObjectError(
                    f"{name}: a {str(dict(notes)['type']).replace(':', '.')}, which {prefix or 'the template'!r} does "
                    "not hold yet, so that its type would have to be made: import and allow it with "
                    "torch.serialization.add_safe_globals, or set trusted_objects=True"
                )
    return found, faults


def _stored(checkpoint: Checkpoint, rank: int) -> dict[str, Notes]:
    """As :func:`stored_compounds`, by the names in the template."""
    named = ((checkpoint.names.get(name, name), notes) for name, notes in stored_compounds(checkpoint, rank).items())
    return {name: notes for name, notes in named if name is not None}


def stored_compounds(checkpoint: Checkpoint, rank: int) -> dict[str, Notes]:
    """Notes of every compound tensor by name: of what this rank saved, and of what others did."""
    if not checkpoint.has_skeleton:
        return {}
    owners = {manifest.skeleton: number for number, manifest in reversed([*enumerate(checkpoint.ranks)])}
    found: dict[str, Notes] = {}
    if not any(map(may_hold_compounds, owners)):
        return found
    for number in owners.values():
        found |= compound_notes(skeleton_of(checkpoint, number), rank=number)
    return found | compound_notes(skeleton_of(checkpoint, rank), rank=rank)


def check_targets(targets: Iterable[CompoundTarget]) -> None:
    """Prove that the parts, now filled, are of a tensor: an index out of bounds would be read beyond memory.

    Raises:
        CorruptCheckpointError: names the tensor.
    """
    for target in targets:
        notes = dict(target.stored)
        if "type" in notes:  # whose own code made it of these parts
            continue
        try:
            compound.put_together(notes, target.own.parts, trusted=False)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{target.name!r}: its parts are of no tensor: {error}") from error
