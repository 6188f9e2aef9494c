"""Compare a template with a checkpoint: which values are read into which memory, and the faults. Reads no data file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.rank_names import dropped_names, unexpected_names
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import MissingNameError, TemplateMismatchError, UnexpectedNameError
from aio_ckpt.leaves.tensor_memory import are_apart, memory_of
from aio_ckpt.match.compounds import match_compounds
from aio_ckpt.match.dtype_changes import changed, is_narrower
from aio_ckpt.match.fills import Fills
from aio_ckpt.match.leaves import match_any_leaves, match_leaves
from aio_ckpt.match.missing_names import missing_remedies, saved_elsewhere
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.stateful import match_stateful, moment_faults
from aio_ckpt.match.takers import LeavesTaker, StatefulTaker, Taker
from aio_ckpt.match.tensors import leaf_targets, shared_memory
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.flatten import read_template
from aio_ckpt.state.names import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Result of a comparison in which every leaf of the template was found or may be missing."""

    fills: Fills
    """What is read, and into which memory."""
    tied: Sequence[tuple[str, str]]
    """Names of one tensor of the template that plain DCP stores twice. Their checksums are compared once read."""
    takers: Sequence[Taker]
    """Parts of the template that get values once all is verified, in this order."""
    missing: tuple[str, ...]
    """Template names that the checkpoint lacks, but for entries of Stateful values: see :attr:`all_missing`."""
    unexpected: tuple[str, ...]
    """Names that the template lacks."""
    mismatched: tuple[str, ...]
    """Names of tensors of another shape, which stay as they are."""
    dropped: tuple[str, ...]
    """``PerRank`` values of ranks that this load lacks, by their stored names."""
    narrowed: tuple[str, ...]
    """Targets of a cast to a dtype of smaller range, as messages name them."""
    converted: tuple[str, ...]
    """Tensors of modules of another dtype, which ``load_state_dict`` converts without a cast, as messages name them."""

    @property
    def all_missing(self) -> tuple[str, ...]:
        """Names that the checkpoint lacks, entries of Stateful values too. Known once the takers are prepared."""
        entries = (name for taker in self.takers if isinstance(taker, StatefulTaker) for name in taker.lacking)
        return (*self.missing, *entries)

    @property
    def fills_template(self) -> bool:
        """Whether the load fills memory of the template before anything is put."""
        return bool(self.fills.exact) or any(fill.target is not None for fill in self.fills.others)


def match_template(ctx: ReadContext, checkpoint: Checkpoint, state: object, options: LoadOptions) -> Match:
    """Find every leaf of ``state`` in the checkpoint.

    Raises:
        MissingNameError: the checkpoint lacks names (unless ``allow_missing``).
        UnexpectedNameError: with ``strict``, the template lacks names.
        TemplateMismatchError: kind, shape or dtype differ.
        UnsafeObjectError: a Stateful value would get a tensor of a type that it does not hold and that is not allowed.
    """
    template = read_template(state, rank=ctx.rank)
    fills = Fills()
    leaves = LeavesTaker(checkpoint=checkpoint, state=state, empty=template.empty, ctx=ctx)
    missing, mismatched, misfits = match_leaves(template, fills, leaves, options)
    missing, any_faults = match_any_leaves(template, fills, leaves, missing)
    compounds, faults, missing = match_compounds(checkpoint, template, missing, ctx.rank)
    stateful, modules, stateful_faults = match_stateful(checkpoint, template, fills, ctx, options)
    below_stateful = {name for taker in stateful for name in taker.names}
    tied: list[tuple[str, str]] = []
    if modules.copied or not are_apart(fills.spans()).all():
        own = leaf_targets(fills, template, but=below_stateful)
        tied, shared_faults = shared_memory(checkpoint.catalog, own, modules.copied)
        faults += shared_faults
    missing += modules.missing
    kept = mismatched | {name: own for taker in stateful for name, own in taker.kept.items()}
    faults += misfits + any_faults + stateful_faults + modules.faults
    faults += moment_faults(stateful, kept)
    takers: list[Taker] = [*compounds, leaves, *stateful]
    below = below_stateful.union(leaves.names)
    if missing and not options.allow_missing:
        beyond = [*map(checkpoint.stored_name, modules.unexpected)]
        beyond += _not_loaded(checkpoint, below, template.names, ctx, is_missing=True)[0]
        if elsewhere := saved_elsewhere(checkpoint, missing, ctx.rank):
            raise MissingNameError(f"{checkpoint.path}: {elsewhere}")
        remedies = modules.remedies or missing_remedies(
            checkpoint, state, missing, beyond, taken={*template.names, *below}
        )
        raise MissingNameError(f"{checkpoint.path}: lacks {listed(missing)}; {'; '.join(remedies)}")
    if faults:
        raise TemplateMismatchError(f"{checkpoint.path}: {first_of(faults, between='; ')}")
    narrow: tuple[str, ...] = ()
    if options.cast:
        dtypes = [(fill.name, memory_of(fill.target).dtype) for fill in fills.others if fill.target is not None]
        dtypes += [(array.name, array.dtype) for array in leaves.arrays]
        narrow = changed(dtypes, checkpoint.catalog.shards, is_narrower)
    converted = () if options.cast else changed(modules.converted, checkpoint.catalog.shards, ne)
    unexpected, dropped = _not_loaded(checkpoint, below, template.names, ctx, is_missing=bool(missing))
    if options.strict and unexpected:
        raise UnexpectedNameError(f"{checkpoint.path}: the template lacks {listed(unexpected)}")
    return Match(
        fills=fills,
        tied=tied,
        takers=takers,
        missing=tuple(missing),
        unexpected=unexpected,
        mismatched=tuple(kept),
        dropped=dropped,
        narrowed=narrow,
        converted=converted,
    )


def _not_loaded(
    checkpoint: Checkpoint, below: set[str], names: Sequence[str], ctx: ReadContext, *, is_missing: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the stored names that the template lacks, and the ``PerRank`` values of ranks that this load lacks.

    ``below``: names that takers take; ``names``: those of the leaves.
    """
    known = below.union(names) if below else names  # names of a template differ
    catalog = checkpoint.catalog
    if not (is_missing or checkpoint.names or len(known) < len(catalog.shards) + len(catalog.objects)):
        return (), ()
    known = set(known)
    beyond = {
        checkpoint.stored_names.get(name, name)
        for name in unexpected_names(checkpoint, known, ctx.rank, ctx.world_size)
    }
    beyond.update(name for name, new in checkpoint.names.items() if new is None)
    dropped = dropped_names(checkpoint, known, ctx.world_size)
    return tuple(sorted(beyond)), tuple(checkpoint.stored_names.get(name, name) for name in dropped)
