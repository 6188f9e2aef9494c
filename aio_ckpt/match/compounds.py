"""Compound tensors of a template, compared with the stored ones."""

from __future__ import annotations

from collections.abc import Sequence

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import UnsafeObjectError
from aio_ckpt.leaves import compound
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.match.takers import CompoundTaker, StatefulTaker
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
    explained = [name for name in missing if name in stored]
    faults = [
        f"{name!r} is a {compound.kind_of(())} in the template and a {compound.kind_of(stored[name])} in the checkpoint"
        for name in explained
    ]
    for name, held in template.compounds.items():
        if name in stored:
            fault = compound.difference(held.notes, stored[name])
        elif name in checkpoint.catalog.shards:
            fault = (
                f"is a {compound.kind_of(held.notes)} in the template and a {compound.kind_of(())} in the checkpoint"
            )
            if not checkpoint.has_skeleton:
                fault += (
                    ", or one that dcp.save pickled: dcp.load with an aio_ckpt.dcp.Reader loads what torch.load can"
                )
        else:
            continue
        if fault is None:
            takers.append(CompoundTaker(name=name, held=held, stored=stored[name]))
        else:
            faults.append(f"{name!r} {fault}")
            explained += [part for part in missing if is_below(part, name)]
    return takers, faults, [name for name in missing if name not in explained]


def match_stateful_compounds(checkpoint: Checkpoint, takers: Sequence[StatefulTaker], ctx: ReadContext) -> list[str]:
    """Add the compound tensors that Stateful values hold to their takers. Returns the faults.

    Raises:
        UnsafeObjectError: a stored tensor has a type that its Stateful value does not hold yet and that is not allowed.
    """
    stored = _stored(checkpoint, ctx.rank) if takers else {}
    faults: list[str] = []
    typed = below_each({taker.name for taker in takers}, [name for name in stored if "type" in dict(stored[name])])
    for taker in takers:
        if taker.name not in typed:
            continue
        held = compounds_of(taker.value.state_dict(), taker.name, rank=ctx.rank)
        taker.compounds = checkpoint.by_stored_name(held)
        for name in typed[taker.name]:
            notes = stored[name]
            if name in held:
                fault = compound.difference(held[name].notes, notes)
                faults += [] if fault is None else [f"{name!r} {fault}"]
            elif compound.allowed_type(dict(notes), trusted=ctx.config.trusted_objects) is None:
                raise UnsafeObjectError(
                    f"{name}: a {str(dict(notes)['type']).replace(':', '.')}, which {taker.name or 'the template'!r} "
                    "does not hold yet, so that its type would have to be made: import and allow it with "
                    "torch.serialization.add_safe_globals, or set trusted_objects=True"
                )
    return faults


def _stored(checkpoint: Checkpoint, rank: int) -> dict[str, Notes]:
    """Return the notes of every stored compound tensor by its name in the template."""
    named = ((checkpoint.names.get(name, name), notes) for name, notes in checkpoint.compounds(rank).items())
    return {name: notes for name, notes in named if name is not None}
