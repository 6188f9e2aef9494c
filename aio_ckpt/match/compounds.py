"""Compound tensors of a template, compared with the stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import UnsafeObjectError
from aio_ckpt.leaves import compound
from aio_ckpt.leaves.compound import CompoundTensor
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.match.options import ReadContext
from aio_ckpt.match.takers import CompoundTaker
from aio_ckpt.state.flatten import Template, compounds_of
from aio_ckpt.state.names import below_each, is_below


def match_compounds(
    checkpoint: Checkpoint, template: Template, missing: Sequence[str], rank: int
) -> tuple[list[CompoundTaker], list[str], list[str]]:
    """Compare the compound tensors of the template with the stored ones.

    Returns the takers to fill, the faults, and the names of ``missing`` that no fault explains.
    """
    stored = _stored(checkpoint, rank) if template.compounds or missing else {}
    takers: list[CompoundTaker] = []
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
            takers.append(CompoundTaker(name=name, held=own, stored=stored[name]))
        else:
            faults.append(f"{name!r} {fault}")
            told += [part for part in missing if is_below(part, name)]
    return takers, faults, [name for name in missing if name not in told]


def own_below(
    checkpoint: Checkpoint, stateful: Sequence[tuple[str, Any]], ctx: ReadContext
) -> tuple[dict[str, CompoundTensor], list[str]]:
    """Return the compound tensors of Stateful values by full name, and the faults.

    Raises:
        UnsafeObjectError: a stored tensor has a type that its Stateful value does not hold yet and that is not allowed.
    """
    stored = _stored(checkpoint, ctx.rank) if stateful else {}
    found: dict[str, CompoundTensor] = {}
    faults: list[str] = []
    typed = below_each({prefix for prefix, _ in stateful}, [name for name in stored if "type" in dict(stored[name])])
    for prefix, value in stateful:
        if prefix not in typed:
            continue
        found |= compounds_of(value.state_dict(), prefix, rank=ctx.rank)
        for name in typed[prefix]:
            notes = stored[name]
            if name in found:
                fault = compound.difference(found[name].notes, notes)
                faults += [] if fault is None else [f"{name!r} {fault}"]
            elif compound.allowed_type(dict(notes), trusted=ctx.trusted) is None:
                raise UnsafeObjectError(
                    f"{name}: a {str(dict(notes)['type']).replace(':', '.')}, which {prefix or 'the template'!r} does "
                    "not hold yet, so that its type would have to be made: import and allow it with "
                    "torch.serialization.add_safe_globals, or set trusted_objects=True"
                )
    return found, faults


def _stored(checkpoint: Checkpoint, rank: int) -> dict[str, Notes]:
    """Return the notes of every stored compound tensor by its name in the template."""
    named = ((checkpoint.names.get(name, name), notes) for name, notes in checkpoint.compounds(rank).items())
    return {name: notes for name, notes in named if name is not None}
