"""Compare a template with a checkpoint: which values are read into which memory, and the faults. Reads no data file."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter, le, mul
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import has_load_hooks, is_load_of_torch
from aio_ckpt.checkpoint.catalog import Catalog, Item, Shards, global_shape
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.rank_names import (
    dropped_names,
    empty_containers,
    first_of,
    listed,
    unexpected_names,
)
from aio_ckpt.errors import MissingNameError, TemplateMismatchError, UnexpectedNameError
from aio_ckpt.leaves.compound import CompoundTensor
from aio_ckpt.leaves.objects import TORCH_ARRAY_DTYPES, as_tensor, type_name
from aio_ckpt.leaves.tensor_memory import (
    are_apart,
    memory_fault,
    memory_of,
    overlapping,
    overlaps_itself,
    signature_of,
    span_of,
)
from aio_ckpt.leaves.values import LeafKind, Shard, Target
from aio_ckpt.match.compounds import CompoundTarget, match_compounds, own_below
from aio_ckpt.match.live import fillable, layouts_below, tensors_below
from aio_ckpt.match.narrowing import narrowed
from aio_ckpt.match.open_places import OpenPlace, names_at
from aio_ckpt.memory.cuda import is_host_memory
from aio_ckpt.state.flatten import Template, read_template
from aio_ckpt.state.names import below_each, branches_of, is_below, node_names

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_GROUP_TENSORS = 256
# One pass for each attribute, without a line of Python for each tensor.
_dtype, _sizes, _layout, _is_nested, _itemsize = map(attrgetter, ("dtype", "shape", "layout", "is_nested", "itemsize"))
_stored_stride, _offsets, _raw_bytes = map(attrgetter, ("stride", "offsets", "raw_bytes"))

OnMatched: TypeAlias = Callable[[str], Awaitable[None]]
"""Awaited with the identity of a checkpoint that a template matches, before a byte of the template is touched."""
WholeTarget: TypeAlias = "tuple[Item, torch.Tensor, int]"
"""(item, tensor, address): an item that holds all of a tensor, and a host tensor of the same bytes with its address.

A plain tuple, because most tensors of a template become one: a NamedTuple takes 0.2 us more, a tenth of the match.
"""


async def at_once(_: str) -> None:
    """Do nothing: the :data:`OnMatched` of a rank that waits for no other rank."""


class TensorTarget(NamedTuple):
    """A tensor of the template that is filled in place."""

    name: str
    tensor: Target


class ReplacedArray(NamedTuple):
    """A numpy value of the template that is replaced: a scalar, or an array whose memory cannot be written."""

    name: str
    kind: LeafKind
    dtype: torch.dtype


class StatefulTarget(NamedTuple):
    """A Stateful value of the template, whose ``load_state_dict`` is called."""

    name: str
    value: Any
    leaf_names: list[str]
    """Names in the template of the stored leaves at or below it."""
    branch: str | None
    """Stored name of the branch that it is given; None if it is given leaves of several branches."""


@dataclass(slots=True, kw_only=True)
class Match:
    """Result of a comparison in which every leaf of the template was found or may be missing."""

    whole: list[WholeTarget] = field(default_factory=list)
    """Host tensors whose bytes are those of one item. Most tensors are such."""
    tensors: list[TensorTarget] = field(default_factory=list)
    """Other tensors that are read into memory of the template."""
    tied: list[tuple[str, str]] = field(default_factory=list)
    """Names of one tensor of the template that plain DCP stores twice. Their checksums are compared once read."""
    arrays: list[ReplacedArray] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    """Names of the leaves that a decoded object replaces."""
    open: dict[str, OpenPlace] = field(default_factory=dict)
    """Name of a Python value or empty container -> the stored values that it takes."""
    stateful: list[StatefulTarget] = field(default_factory=list)
    live: dict[str, Target] = field(default_factory=dict)
    """Name below a Stateful value -> the tensor of ``state_dict()`` that is filled. Tied names have the same one."""
    live_at: dict[str, int] = field(default_factory=dict)
    """Addresses of host tensors in ``live`` whose bytes are those of one item, as in ``whole``."""
    layouts: dict[str, Target] = field(default_factory=dict)
    """Name below a Stateful value -> a tensor whose layout and shard a newly allocated tensor gets."""
    compounds: list[CompoundTarget] = field(default_factory=list)
    """Compound tensors of the template, whose parts are among ``whole`` and ``tensors``."""
    own: dict[str, CompoundTensor] = field(default_factory=dict)
    """Name below a Stateful value -> the compound tensor that it holds now. Its type is used for the loaded one."""
    empty: Sequence[str] = ()
    """Names of the empty mappings and lists of the template that take what is stored below them."""
    missing: tuple[str, ...] = ()
    """Template names that the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Names that the template lacks."""
    mismatched: list[str] = field(default_factory=list)
    """Names of tensors of another shape, which stay as they are."""
    kept: dict[str, Target] = field(default_factory=dict)
    """Name below a Stateful value -> its own tensor, of another shape than the stored one, which it keeps."""
    dropped: tuple[str, ...] = ()
    """``PerRank`` values of ranks that this load lacks, by their stored names."""
    narrowed: tuple[str, ...] = ()
    """Targets of a cast to a dtype of smaller range, as messages name them."""

    @property
    def writes_tensors(self) -> bool:
        """Whether the load fills memory of the template before any ``load_state_dict`` is called."""
        return bool(self.whole or self.tensors or self.compounds or self.live)


def match_template(
    checkpoint: Checkpoint,
    state: object,
    *,
    rank: int,
    world_size: int,
    strict: bool,
    allow_missing: bool,
    trusted: bool,
    casts: bool,
    skips_mismatched: bool,
) -> Match:
    """Find every leaf of ``state`` in the checkpoint.

    Args:
        trusted: whether objects that only running code reads may be decoded.
        casts: whether a tensor of the template takes values of another dtype, as far as ``torch.can_cast`` allows.
        skips_mismatched: whether tensors of another shape, also those of modules and optimizers, stay as they are.

    Raises:
        MissingNameError: the checkpoint lacks names (unless ``allow_missing``).
        UnexpectedNameError: with ``strict``, the template lacks names.
        TemplateMismatchError: kind, shape or dtype differ.
        UnsafeObjectError: a Stateful value would get a tensor of a type that it does not hold and that is not allowed.
    """
    template = read_template(state, rank=rank)
    found = Match(empty=template.empty)
    missing, misfits = _match_leaves(checkpoint, template, found, trusted, casts, skips_mismatched)
    missing, open_faults = _match_open(checkpoint, template, found, missing, rank)
    found.compounds, faults, missing = match_compounds(checkpoint, template, missing, rank)
    faults += misfits + open_faults
    faults += _overlap_faults(checkpoint.catalog, found, template)
    unmatched, misfits = _match_stateful(checkpoint, template, found, rank, casts, skips_mismatched)
    missing, faults = missing + unmatched, faults + misfits
    found.own, misfits = own_below(
        checkpoint, [(target.name, target.value) for target in found.stateful], rank=rank, trusted=trusted
    )
    faults += misfits
    if missing and not allow_missing:
        remedy = _per_rank_remedy(missing, checkpoint) or "allow_missing=True leaves them as they are"
        if unused := sorted(checkpoint.stored_names.keys() - {*template.names, *_names_below(found)}):
            pairs = [f"{checkpoint.stored_names[name]!r} as {name!r}" for name in unused]
            remedy += f"; rename= gives it {first_of(pairs)}"
        raise MissingNameError(f"{checkpoint.path}: lacks {listed(missing)}; {remedy}")
    if faults:
        raise TemplateMismatchError(f"{checkpoint.path}: {first_of(faults, between='; ')}")
    found.missing = tuple(missing)
    if casts:
        filled = [*found.tensors, *found.live.items()]
        dtypes = [(name, memory_of(tensor).dtype) for name, tensor in filled]
        dtypes += [(array.name, array.dtype) for array in found.arrays]
        found.narrowed = narrowed(dtypes, checkpoint.catalog.shards)
    below = _names_below(found)
    known = below.union(template.names) if below else template.names  # names of a template differ
    if missing or checkpoint.names or len(known) < len(checkpoint.catalog.shards) + len(checkpoint.catalog.objects):
        known = set(known)
        beyond = unexpected_names(checkpoint, known, rank, world_size)
        beyond = {checkpoint.stored_names.get(name, name) for name in beyond}
        found.unexpected = tuple(sorted(beyond.union(name for name, new in checkpoint.names.items() if new is None)))
        dropped = dropped_names(checkpoint, known, world_size)
        found.dropped = tuple(checkpoint.stored_names.get(name, name) for name in dropped)
    if strict and found.unexpected:
        raise UnexpectedNameError(f"{checkpoint.path}: the template lacks {listed(found.unexpected)}")
    return found


def _names_below(found: Match) -> set[str]:
    """Return the names of the leaves that Stateful values and open places take."""
    groups = [*(target.leaf_names for target in found.stateful), *(place.names for place in found.open.values())]
    return set().union(*groups)


def _per_rank_remedy(missing: Iterable[str], checkpoint: Checkpoint) -> str | None:
    """Return the remedy if a missing name differs from a stored one by ``PerRank`` alone (``w`` and ``w.rank0``)."""
    for name in missing:
        bare, _, rank = name.rpartition(".rank")
        if rank.isdigit() and checkpoint.holds(bare):
            return f"it holds {bare!r} of all ranks: give that without PerRank"
        if checkpoint.holds(f"{name}.rank0"):
            return f"it holds {name!r} of each rank by itself: give it as PerRank(...)"
    return None


def shard_like(there: Target | None, shards: Shards) -> Target | None:
    """Return ``there`` if it has the stored global shape, else None.

    The shapes may differ below a Stateful value: a scalar may be stored where the value now holds a shard.
    """
    return there if there is not None and _shape(there) == global_shape(shards) else None


def _shape(tensor: Target) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    return tuple(tensor.global_shape if isinstance(tensor, Shard) else tensor.shape)


# -- leaves -----------------------------------------------------------------------------------------


def _match_leaves(
    checkpoint: Checkpoint, template: Template, into: Match, trusted: bool, casts: bool, skips_mismatched: bool
) -> tuple[list[str], list[str]]:
    """Add the leaves to ``into``. Returns the names that are missing, and the other faults."""
    catalog = checkpoint.catalog
    missing: list[str] = []
    faults: list[str] = []
    whole = into.whole
    stored = list(map(catalog.shards.get, template.names))
    addresses = _whole_addresses(template.values, stored)
    rows = zip(template.names, template.values, template.kinds, stored, addresses, strict=True)
    for name, value, kind, shards, address in rows:
        if address and shards is not None:
            whole.append((shards[0], value, address))  # type: ignore[arg-type]  # a tensor, and an Item
        elif shards is None:
            if name not in catalog.objects:
                missing.append(name)
            elif fault := _object_fault(checkpoint, kind, trusted):
                faults.append(f"{checkpoint.label(name)} {fault}")
            else:
                into.objects.append(name)
        elif kind is LeafKind.OBJECT:
            if isinstance(value, np.ndarray):
                faults.append(f"{checkpoint.label(name)} {_tensor_for_array(value)}")
            else:
                into.open[name] = OpenPlace(names=[name], branch=checkpoint.stored_name(name))
        else:
            tensor = cast("Target", value) if kind is LeafKind.TENSOR else as_tensor(value, kind)
            if skips_mismatched and kind is not LeafKind.SCALAR_ARRAY and _has_other_shape(tensor, shards):
                into.mismatched.append(name)
            elif fault := _tensor_fault(tensor, shards, casts):
                if kind is LeafKind.SCALAR_ARRAY:
                    into.open[name] = OpenPlace(names=[name], branch=checkpoint.stored_name(name))
                else:
                    faults.append(f"{checkpoint.label(name)} {fault}")
            elif overlaps_itself(memory := memory_of(tensor)):
                faults.append(
                    f"{checkpoint.label(name)} shares memory with itself in the template (stride {memory.stride()}): "
                    "give its .clone()"
                )
            elif kind is LeafKind.TENSOR or (kind is LeafKind.ARRAY and _shares_memory(value, memory_of(tensor))):
                into.tensors.append(TensorTarget(name, tensor))
            else:
                into.arrays.append(ReplacedArray(name, kind, memory_of(tensor).dtype))
    return missing, faults


def _object_fault(checkpoint: Checkpoint, kind: LeafKind, trusted: bool) -> str | None:
    """Return why a leaf of this kind does not take an object; None if it does.

    Stock DCP pickles numpy values. A loaded object replaces the template's value, of whatever type that is.
    """
    if kind is LeafKind.OBJECT or (kind is LeafKind.SCALAR_ARRAY and checkpoint.has_skeleton):
        return None
    what = {LeafKind.TENSOR: "a tensor", LeafKind.ARRAY: "an array"}.get(kind, "a numpy scalar")
    fault = f"is {what} in the template and an object in the checkpoint"
    if kind is LeafKind.TENSOR or checkpoint.has_skeleton:
        return fault
    remedy = "set trusted_objects=True, or give dcp.load an aio_ckpt.dcp.Reader, if you trust whoever wrote it"
    return None if trusted else f"{fault}, where dcp.save pickles numpy: {remedy}"


def _tensor_for_array(value: npt.NDArray[Any]) -> str:
    """Return why an array that is saved as an object takes no tensor, and the remedy."""
    what = f"is a {type_name(value)} of {value.dtype.str!r} in the template and a tensor in the checkpoint"
    native = value.dtype.newbyteorder("=")
    remedy = f"give numpy.asarray(..., {native.name!r}) of it" if native in TORCH_ARRAY_DTYPES else "give None there"
    return f"{what}, which fills plain arrays of native byte order: {remedy}"


def _match_open(
    checkpoint: Checkpoint, template: Template, into: Match, missing: list[str], rank: int
) -> tuple[list[str], list[str]]:
    """Add the empty containers, and the leaves that hold nothing, to ``into.open``.

    Returns the names that are still missing, and the faults.
    """
    absent = set(missing)
    rows = zip(template.names, template.values, strict=True) if absent else ()
    places = [name for name, value in rows if name in absent and _holds_nothing(value)] + template.empty
    if not places:
        return missing, []
    found, stored = names_at(checkpoint, places, rank=rank), checkpoint.catalog.names()
    branches = _branches_of(checkpoint, rank)
    faults: list[str] = []
    for place, names in found.items():
        branch = _stored_branch(checkpoint, place, names, branches) if names else place
        if branch is None:
            faults.append(
                f"{place!r} is empty, and rename= changes names inside of what is stored for it: rename the whole "
                "branch, or give the names"
            )
        elif stored.issuperset(names):
            into.open[place] = OpenPlace(names=names, branch=branch)
    missing = [name for name in missing if name not in found]
    return missing + sorted({name for names in found.values() for name in names if name not in stored}), faults


def _holds_nothing(value: object) -> bool:
    """Return whether a leaf is None or an empty sequence: a container may have been saved in its place."""
    return value is None or (isinstance(value, (list, tuple, deque)) and not value)


def _overlap_faults(catalog: Catalog, found: Match, template: Template) -> list[str]:
    """Return the faults of tensors that share memory. Names of one tensor may share it if their values may be equal."""
    spans = [span_of(memory_of(tensor)) for _, tensor in found.tensors]
    starts = [*(address for _, _, address in found.whole), *(start for start, _ in spans)]
    nbytes = [*(item.raw_bytes for item, _, _ in found.whole), *(nbytes for _, nbytes in spans)]
    if are_apart(np.array(starts, np.int64), np.array(nbytes, np.int64)).all():
        return []
    whole = {id(tensor) for _, tensor, _ in found.whole}
    stored = (
        (name, value) for name, value in zip(template.names, template.values, strict=True) if name in catalog.shards
    )
    named = [*((name, cast("Target", value)) for name, value in stored if id(value) in whole), *found.tensors]
    names, tensors = [name for name, _ in named], [memory_of(tensor) for _, tensor in named]
    faults: list[str] = []
    for before, later in overlapping(tensors):
        is_tied = signature_of(tensors[later]) == signature_of(tensors[before])
        if is_tied and _may_be_equal(catalog.shards[names[later]], catalog.shards[names[before]]):
            found.tied += _unproven(catalog, names[before], names[later])
            continue
        why = "the checkpoint holds other values for it" if is_tied else "is another view of it"
        faults.append(
            f"{names[later]!r} shares memory with {names[before]!r} in the template, and {why}: give it memory of its "
            "own (.clone()), or leave it out"
        )
    return faults


def _may_be_equal(one: Shards, other: Shards) -> bool:
    """Return whether two tied names may hold the same values, judged by dtype, shape and the checksums that are known.

    Those of plain DCP are not read yet.
    """
    return len(one) == len(other) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and (type(a) is not Item or type(b) is not Item or a.sums == b.sums)
        for a, b in zip(one, other, strict=True)
    )


def _unproven(catalog: Catalog, before: str, later: str) -> list[tuple[str, str]]:
    """Return both names of one tensor if only checksums that are not read yet tell whether their values are equal."""
    shards = *catalog.shards[before], *catalog.shards[later]
    return [(before, later)] if any(type(shard) is not Item for shard in shards) else []


def _whole_addresses(values: Sequence[object], stored: Sequence[Shards | None]) -> list[int]:
    """Return, for each plain host tensor whose bytes are those of the only item stored for it, its address; else 0.

    Tensors are compared in groups, one attribute after the other, which takes half the time.
    """
    found: list[int] = []
    for start in range(0, len(values), _GROUP_TENSORS):
        group, shards = values[start : start + _GROUP_TENSORS], stored[start : start + _GROUP_TENSORS]
        if _are_whole(group, shards):
            found += map(torch.Tensor.data_ptr, group)  # type: ignore[arg-type]
        else:
            pairs = zip(group, shards, strict=True)
            found += [value.data_ptr() if _are_whole([value], [one]) else 0 for value, one in pairs]  # type: ignore[attr-defined]
    return found


def _are_whole(values: Sequence[Any], stored: Sequence[Shards | None]) -> bool:
    """Return whether the values are plain host tensors, each with the bytes of the only item stored for it."""
    items: list[Any] = [shards[0] for shards in stored if shards is not None and len(shards) == 1]
    if len(items) != len(values) or not _PLAIN_TYPES.issuperset(map(type, values)) or {*map(type, items)} != {Item}:
        return False
    dtypes = {*map(_dtype, items)}
    starts = map(mul, map(torch.Tensor.storage_offset, values), map(_itemsize, values))
    lengths = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, values))
    return (
        not any(map(_is_nested, values))
        and {*map(_layout, values)} == {torch.strided}
        and all(map(is_host_memory, values))
        and list(map(_dtype, values)) == list(map(_dtype, items))
        and list(map(_sizes, values)) == list(map(_sizes, items))
        and list(map(torch.Tensor.stride, values)) == list(map(_stored_stride, items))
        and not any(map(torch.Tensor.is_neg, values))
        and not (any(dtype.is_complex for dtype in dtypes) and any(map(torch.Tensor.is_conj, values)))
        and not any(map(any, {*map(_offsets, items)}))
        and all(map(le, map(add, starts, map(_raw_bytes, items)), lengths))
    )


def _tensor_fault(tensor: Target, shards: Shards, casts: bool) -> str | None:
    bare = tensor.tensor if isinstance(tensor, Shard) else tensor
    if is_lazy(bare) or bare.is_nested or bare.layout is not torch.strided or bare.is_quantized:
        return memory_fault(bare)
    stored = shards[0].dtype
    can_cast = torch.can_cast(stored, bare.dtype)
    if bare.dtype is not stored and not (casts and can_cast):
        remedy = ": cast=True converts it" if can_cast else ", which cast=True does not convert" if casts else ""
        return f"is {bare.dtype} in the template and {stored} in the checkpoint{remedy}"
    shape = global_shape(shards)
    if _shape(tensor) != shape:
        remedy = "leave it out, or skip_mismatched=True leaves it as it is"
        return f"has shape {_shape(tensor)} in the template and {shape} in the checkpoint: {remedy}"
    return memory_fault(bare)


def _has_other_shape(tensor: Target, shards: Shards) -> bool:
    bare = tensor.tensor if isinstance(tensor, Shard) else tensor
    return not (is_lazy(bare) or bare.is_nested) and _shape(tensor) != global_shape(shards)


def _shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has the memory of the array ``value``. If not, it is a copy of the array."""
    return bool(value.__array_interface__["data"][0] == tensor.data_ptr())


# -- Stateful values -----------------------------------------------------------------------------


def _match_stateful(
    checkpoint: Checkpoint, template: Template, into: Match, rank: int, casts: bool, skips_mismatched: bool
) -> tuple[list[str], list[str]]:
    """Add the Stateful values to ``into``. Returns the names of those of which nothing is stored, and the faults."""
    if not template.stateful:
        return [], []
    missing: list[str] = []
    faults: list[str] = []
    # The catalog lacks the PerRank values of a rank that did not save.
    names = list(filter(checkpoint.holds, checkpoint.names_of(rank)))
    shards = checkpoint.catalog.shards
    there: dict[str, Target] = {}
    counts = Counter(prefix for prefix, _ in template.stateful)
    faults += [
        f"{prefix!r} is the name of several values with state_dict(), as keys with dots join to one name: rename one"
        for prefix, count in counts.items()
        if count > 1
    ]
    grouped, branches = below_each(counts, names), _branches_of(checkpoint, rank)
    empty = empty_containers(checkpoint, counts.keys() - grouped.keys(), rank)
    for prefix, value in template.stateful:
        below = grouped.get(prefix, [])
        if prefix in below and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            faults.append(f"{prefix!r} is a {type(value).__name__} in the template and a single leaf in the checkpoint")
        elif below or prefix in empty:
            branch = _stored_branch(checkpoint, prefix, below, branches)
            into.stateful.append(StatefulTarget(prefix, value, below, branch))
            if branch is None and (fault := _branch_fault(prefix, value, checkpoint.compounds(rank))):
                faults.append(fault)
            tensors = [name for name in below if name in shards]
            if tensors:  # state_dict() of a data loader, for example, is slow, so it is not called without need
                found = tensors_below(prefix, value, tensors, rank=rank)
                layouts = layouts_below(prefix, value, tensors, found)
                faults += _meta_fault(prefix, value, layouts | found)
                if skips_mismatched and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                    kept = {name: own for name, own in found.items() if _has_other_shape(own, shards[name])}
                    into.kept |= kept
                    into.mismatched += kept
                into.layouts |= layouts
                there |= found
        else:
            missing.append(prefix)
    addresses = _whole_addresses(list(there.values()), [shards[name] for name in there])
    fitting: dict[str, Target] = {}
    for (name, tensor), address in zip(there.items(), addresses, strict=True):
        if address:
            into.live_at[name], fitting[name] = address, tensor
        elif _tensor_fault(tensor, shards[name], casts) is None and not overlaps_itself(memory_of(tensor)):
            fitting[name] = tensor
    stored = {name: shards[name] for target in into.stateful for name in target.leaf_names if name in shards}
    taken = [*((address, item.raw_bytes) for item, _, address in into.whole)]
    taken += [span_of(memory_of(tensor)) for _, tensor in into.tensors]
    into.live = fillable(fitting, stored, [target.value for target in into.stateful], taken)
    return missing, faults


class _Branches(NamedTuple):
    """Branches of a checkpoint of which ``rename=`` changes names."""

    counts: Mapping[str, int]
    """Stored leaves at or below each name."""
    held: frozenset[str] | None
    """Names of all containers and leaves that the rank saved; None if the checkpoint notes no containers."""


def _branches_of(checkpoint: Checkpoint, rank: int) -> _Branches | None:
    """Return the branches of a checkpoint; None if ``rename=`` changes no name of it."""
    if not checkpoint.names:
        return None
    everything = {*map(checkpoint.stored_name, checkpoint.names_of(rank)), *checkpoint.names}
    counts = Counter(branch for name in everything for branch in branches_of(name))
    held = frozenset(node_names(checkpoint.skeleton(rank), rank=rank)) if checkpoint.has_skeleton else None
    return _Branches(counts, held)


def _stored_branch(checkpoint: Checkpoint, prefix: str, below: Sequence[str], branches: _Branches | None) -> str | None:
    """Return the stored name of the branch that is called ``prefix`` in the template.

    None if the stored leaves are not one whole branch. ``below``: names of the leaves of this rank below ``prefix``.
    """
    if branches is None or (stored := [checkpoint.stored_name(name) for name in below]) == below:
        return prefix
    rests = ["" if name == prefix else name.removeprefix(f"{prefix}.") for name in below]
    branch = stored[0].removesuffix(rests[0]).removesuffix(".") if rests[0] else stored[0]
    moved = {".".join(filter(None, (branch, rest))) for rest in rests}
    # Keys of a module hold dots, so the common beginning of its names need not be the name of a container.
    is_one = branches.held is None or branch in branches.held
    return branch if is_one and moved == {*stored} and len(moved) == branches.counts[branch] else None


def _branch_fault(prefix: str, value: Any, compounds: Iterable[str]) -> str | None:
    """Return why ``load_state_dict`` of ``value`` cannot take leaves of several branches; None if it can."""
    if isinstance(value, torch.nn.Module) and not any(is_below(name, prefix) for name in compounds):
        return None
    return (
        f"{prefix!r} is a {type(value).__name__}, and rename= changes names inside of what is stored for it: rename "
        "the whole branch"
    )


def _meta_fault(prefix: str, value: Any, there: Mapping[str, Target]) -> list[str]:
    """Return the fault of tensors on the meta device, as a list of at most one.

    ``load_state_dict`` of torch's own would report success for them and load nothing, as they have no memory.
    """
    meta = [name for name, tensor in there.items() if memory_of(tensor).is_meta]
    is_module = isinstance(value, torch.nn.Module)
    if not meta or not is_load_of_torch(value) or (is_module and any(map(has_load_hooks, value.modules()))):
        return []
    of = f"{prefix or 'the template'!r}, a {type_name(value)}"
    remedy = "materialize it" if is_module else "materialize the model before the optimizer is made"
    return [
        f"{listed(meta)} of {of}, on the meta device, where nothing can be loaded to: {remedy} (.to_empty(device=...))"
    ]
