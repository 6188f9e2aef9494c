"""Hold a template against a checkpoint: what to read into what, and what does not fit. Reads no data file."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt.errors import EmptyStateError, MissingNameError, TemplateMismatchError, UnexpectedNameError
from aio_ckpt.read.catalog import Chunks, Item, Look, SmallTargets, global_shape
from aio_ckpt.read.open import Checkpoint
from aio_ckpt.read.rank_names import is_empty_container, unexpected_names, wanted_names
from aio_ckpt.state import flatten as tree
from aio_ckpt.state.objects import TORCH_ARRAY_DTYPES, type_name
from aio_ckpt.state.same_metadata import is_nested, looks_like
from aio_ckpt.state.tensor_memory import (
    are_apart,
    are_whole,
    has_own_memory,
    memory_fault,
    memory_of,
    overlapping,
    span_of,
)
from aio_ckpt.state.values import LeafKind

__all__ = ["Match", "OnMatched", "at_once", "match_template", "shard_like"]

_SHOWN = 5

OnMatched: TypeAlias = Callable[[str], Awaitable[None]]
"""Awaited with the identity of a checkpoint that a template matches, before a byte of the template is touched."""


async def at_once(_: str) -> None:
    """The :data:`OnMatched` of a rank that asks nobody."""


@dataclass(slots=True, kw_only=True)
class Match:
    """A template whose every leaf was found, or may be missing."""

    small: SmallTargets = field(default_factory=SmallTargets)
    """Plain host tensors that are laid out like the one block that is stored of them: the common case."""
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Other names that are read into memory of the template."""
    arrays: list[tuple[str, LeafKind]] = field(default_factory=list)
    """Names whose numpy value is replaced: a scalar, or an array that nothing may write to."""
    objects: list[str] = field(default_factory=list)
    """Names whose value is replaced by a decoded object."""
    stateful: list[tuple[str, Any, list[str]]] = field(default_factory=list)
    """(name, value, names below it) of what is given to ``load_state_dict``."""
    sharded: dict[str, DTensor] = field(default_factory=dict)
    """Names below Stateful values -> the DTensor there now, whose mesh and placements say which shard to read."""
    missing: tuple[str, ...] = ()
    """Template names that the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Names that the template lacks."""


def match_template(
    checkpoint: Checkpoint,
    state: object,
    *,
    rank: int,
    world_size: int,
    strict: bool,
    allow_missing: bool,
    trusted: bool,
) -> Match:
    """Find every leaf of ``state`` in the checkpoint. ``trusted``: whether every object of it can be decoded.

    Raises:
        MissingNameError: the checkpoint lacks names (unless ``allow_missing``).
        UnexpectedNameError: with ``strict``, the template lacks names.
        TemplateMismatchError: kind, shape or dtype differ.
    """
    template = tree.read_template(state, rank=rank)
    found = Match()
    missing, faults = _match_leaves(checkpoint, template, found, trusted)
    faults += _shared_memory(checkpoint, found, template)
    unmatched, misfits = _match_stateful(checkpoint, template, found, rank, world_size)
    missing, faults = missing + unmatched, faults + misfits
    if missing and not allow_missing:
        remedy = _wrapped_otherwise(missing, checkpoint) or "allow_missing=True leaves them as they are"
        raise MissingNameError(f"{checkpoint.path}: lacks {_listed(missing)}; {remedy}")
    if faults:
        raise TemplateMismatchError(f"{checkpoint.path}: {'; '.join(faults[:_SHOWN])}{_more(faults)}")
    found.missing = tuple(missing)
    below = {name for _, _, names in found.stateful for name in names}
    known = below.union(template.names) if below else template.names  # names of a template differ
    if missing or len(known) < len(checkpoint.catalog.tensor_names) + len(checkpoint.catalog.objects):
        found.unexpected = tuple(sorted(unexpected_names(checkpoint, set(known), rank, world_size)))
    if strict and found.unexpected:
        raise UnexpectedNameError(f"{checkpoint.path}: the template lacks {_listed(found.unexpected)}")
    return found


def _wrapped_otherwise(missing: Iterable[str], checkpoint: Checkpoint) -> str | None:
    """What to do where ``PerRank`` is all that differs, by the names: ``w`` and ``w.rank0``."""
    names = checkpoint.catalog.names()
    for name in missing:
        bare, _, rank = name.rpartition(".rank")
        if rank.isdigit() and bare in names:
            return f"it holds {bare!r} of all ranks: give that without PerRank"
        if f"{name}.rank0" in names:
            return f"it holds {name!r} of each rank by itself: give it as PerRank(...)"
    return None


def shard_like(there: DTensor | None, chunks: Chunks) -> DTensor | None:
    """``there``, where what is stored is of its shape: below a Stateful value a scalar may stand in for a shard."""
    return there if there is not None and there.shape == global_shape(chunks) else None


# -- leaves -----------------------------------------------------------------------------------------


def _match_leaves(
    checkpoint: Checkpoint, template: tree.Template, into: Match, trusted: bool
) -> tuple[list[str], list[str]]:
    """Fills ``into``; names that are missing, and what else does not fit."""
    small, tensor_kind = checkpoint.catalog.small, LeafKind.TENSOR
    looks, rows = small.look_numbers, list(map(small.rows.get, template.names))
    fitting = _Fitting(small.looks)
    checks, fits = fitting.checks, fitting.fits
    is_small = [  # the hot loop: 0.2 us
        row is not None
        and kind is tensor_kind
        and not is_nested(value)
        and (checks[looks[row]](value) or fits(looks[row], value))
        for row, value, kind in zip(rows, cast("list[Any]", template.values), template.kinds, strict=True)
    ]
    into.small = _targets(rows, template, is_small)
    is_whole = are_whole(into.small.tensors, into.small.addresses, small.nbytes[into.small.rows])
    if not is_whole.all():  # the others are told one by one
        for position in np.flatnonzero(is_small)[~is_whole].tolist():
            is_small[position] = False
        into.small = _targets(rows, template, is_small)
    leaves = zip(template.names, template.values, template.kinds, strict=True)
    rest = itertools.compress(leaves, map(operator.not_, is_small))
    return _match_rest(checkpoint, rest, into, trusted)


def _targets(rows: Sequence[int | None], template: tree.Template, is_small: Sequence[bool]) -> SmallTargets:
    tensors = list(itertools.compress(cast("list[torch.Tensor]", template.values), is_small))
    return SmallTargets(
        np.fromiter(cast("Iterator[int]", itertools.compress(rows, is_small)), np.int64, len(tensors)),
        tensors,
        np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors)),
    )


class _Fitting:
    """Which targets are plain host memory laid out like an item: what looks like the last that fitted fits, too."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self._looks = looks
        self.checks: list[Callable[[Any], bool]] = [lambda _: False] * len(looks)
        """Per look; True proves that a tensor fits, False proves nothing."""

    def fits(self, number: int, value: torch.Tensor) -> bool:
        """Whether a tensor fits the look of this number."""
        dtype, shape, stride = self._looks[number]
        if (
            value.dtype is not dtype
            or dtype.is_complex  # a lazy conjugate, perhaps
            or not value.is_cpu
            or value.layout is not torch.strided
            or not has_own_memory(value)
            or is_lazy(value)
            or value.shape != shape
            or value.stride() != stride
            or value.is_neg()
        ):
            return False
        self.checks[number] = looks_like(value)
        return True


def _match_rest(
    checkpoint: Checkpoint, leaves: Iterable[tuple[str, Any, LeafKind]], into: Match, trusted: bool
) -> tuple[list[str], list[str]]:
    catalog = checkpoint.catalog
    missing: list[str] = []
    faults: list[str] = []
    for name, value, kind in leaves:
        chunks = catalog.chunks.get(name) if name in catalog.tensor_names else None
        if chunks is None:
            if name not in catalog.objects:
                missing.append(name)
            elif fault := _object_fault(checkpoint, kind, trusted):
                faults.append(f"{name!r} {fault}")
            else:
                into.objects.append(name)
        elif kind is LeafKind.OBJECT:
            faults.append(f"{name!r} {_tensor_for_object(value)}")
        else:
            tensor = tree.as_tensor(value, kind)
            fault = _tensor_fault(tensor, chunks)
            if fault:
                faults.append(f"{name!r} {fault}")
            elif kind is LeafKind.TENSOR or (kind is LeafKind.ARRAY and _shares_memory(value, tensor)):
                into.tensors.append((name, tensor))
            else:
                into.arrays.append((name, kind))
    return missing, faults


def _object_fault(checkpoint: Checkpoint, kind: LeafKind, trusted: bool) -> str | None:
    """Why a leaf of this kind does not take an object; None if it does.

    Stock DCP pickles numpy values, and what it loads takes the place of what the template has, whatever that is.
    """
    if kind is LeafKind.OBJECT:
        return None
    what = {LeafKind.TENSOR: "a tensor", LeafKind.ARRAY: "an array"}.get(kind, "a numpy scalar")
    fault = f"is {what} in the template and an object in the checkpoint"
    if kind is LeafKind.TENSOR or checkpoint.has_skeleton:
        return fault
    remedy = "set trusted_objects=True, or give dcp.load an aio_ckpt.dcp.Reader, if you trust whoever wrote it"
    return None if trusted else f"{fault}, where dcp.save pickles numpy: {remedy}"


def _tensor_for_object(value: object) -> str:
    """Why an object leaf takes no tensor, and what would where it is an array of another kind."""
    if isinstance(value, np.ndarray) and (native := value.dtype.newbyteorder("=")) in TORCH_ARRAY_DTYPES:
        what = f"is a {type_name(value)} of {value.dtype.str!r} in the template and a tensor in the checkpoint"
        return f"{what}, which fills plain arrays of native byte order: give numpy.asarray(..., {native.name!r}) of it"
    return "is an object in the template and a tensor in the checkpoint"


def _shared_memory(checkpoint: Checkpoint, found: Match, template: tree.Template) -> list[str]:
    """Which targets would be written through each other with other values."""
    spans = [span_of(memory_of(tensor)) for _, tensor in found.tensors]
    starts = np.append(found.small.addresses, np.array([start for start, _ in spans], np.int64))
    nbytes = np.array([nbytes for _, nbytes in spans], np.int64)
    nbytes = np.append(checkpoint.catalog.small.nbytes[found.small.rows], nbytes)
    if are_apart(starts, nbytes).all():  # so chunks need not be made
        return []
    small, chunks = set(map(id, found.small.tensors)), checkpoint.catalog.chunks
    stored = ((name, value) for name, value in zip(template.names, template.values, strict=True) if name in chunks)
    named = [(name, value) for name, value in stored if id(value) in small]  # a name that is not stored may be tied
    named += [(name, memory_of(tensor)) for name, tensor in found.tensors]
    names, tensors = [name for name, _ in named], cast("list[torch.Tensor]", [tensor for _, tensor in named])
    return [
        f"{names[later]!r} shares memory with {names[before]!r} in the template, but is another view of it, or the "
        "checkpoint holds other values for it: give it memory of its own, or leave it out"
        for before, later in overlapping(tensors)
        if not (
            _look(tensors[later]) == _look(tensors[before])
            and _may_be_equal(chunks[names[later]], chunks[names[before]])
        )
    ]


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _may_be_equal(one: Chunks, other: Chunks) -> bool:
    """Whether tied names can be filled from either: by their sums, or, in plain DCP, before its sums are read."""
    return all(
        type(a) is not Item or type(b) is not Item or (a.dtype, a.shape, a.sums) == (b.dtype, b.shape, b.sums)
        for a, b in zip(one, other, strict=False)
    )


def _tensor_fault(tensor: torch.Tensor, chunks: Chunks) -> str | None:
    if is_lazy(tensor) or is_nested(tensor):
        return memory_fault(tensor)
    if tensor.dtype is not chunks[0].dtype:
        return f"is {tensor.dtype} in the template and {chunks[0].dtype} in the checkpoint"
    shape = global_shape(chunks)
    if tensor.shape != shape:
        return f"has shape {tuple(tensor.shape)} in the template and {shape} in the checkpoint"
    return memory_fault(tensor)


def _shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Whether writing to ``tensor`` writes to the array ``value``, or to a copy that had to be made."""
    return bool(value.__array_interface__["data"][0] == tensor.data_ptr())


# -- what is given to load_state_dict ---------------------------------------------------------------


def _match_stateful(
    checkpoint: Checkpoint, template: tree.Template, into: Match, rank: int, world_size: int
) -> tuple[list[str], list[str]]:
    """Fills ``into``; names of Stateful values of which the checkpoint has nothing, and what does not fit."""
    if not template.stateful:
        return [], []
    missing: list[str] = []
    faults: list[str] = []
    names = wanted_names(checkpoint, rank=rank, only=None)
    for prefix, value in template.stateful:
        below = [name for name in names if tree.is_below(name, prefix)]
        if prefix in below and isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            faults.append(f"{prefix!r} is a {type(value).__name__} in the template and a single leaf in the checkpoint")
        elif below or is_empty_container(checkpoint, prefix, rank):
            into.stateful.append((prefix, value, below))
            if _may_be_sharded(value, world_size):
                into.sharded.update(_sharded_below(prefix, value, below, rank))
        else:
            missing.append(prefix)
    return missing, faults


def _may_be_sharded(value: Any, world_size: int) -> bool:
    """Whether to look into ``value.state_dict()``: for a data loader, say, that is no idle question."""
    if isinstance(value, torch.nn.Module):
        return any(isinstance(tensor, DTensor) for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(value, torch.optim.Optimizer):
        return any(isinstance(parameter, DTensor) for group in value.param_groups for parameter in group["params"])
    return world_size > 1


def _sharded_below(prefix: str, value: Any, names: Sequence[str], rank: int) -> dict[str, DTensor]:
    """DTensors of ``value`` by full name; state of an optimizer that is still empty is laid out as its parameters."""
    try:
        flat = tree.flatten(value.state_dict(), rank=rank)
    except EmptyStateError:
        return {}
    dot = prefix and f"{prefix}."
    found = {f"{dot}{n}": leaf for n, leaf in zip(flat.names, flat.values, strict=True) if isinstance(leaf, DTensor)}
    if isinstance(value, torch.optim.Optimizer):
        parameters = [parameter for group in value.param_groups for parameter in group["params"]]
        for name in names:
            number, _, key = name.removeprefix(f"{dot}state.").partition(".")
            if key and number.isdigit() and int(number) < len(parameters):
                parameter = parameters[int(number)]
                if isinstance(parameter, DTensor):
                    found.setdefault(name, parameter)
    return found


# -- messages ---------------------------------------------------------------------------------------


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} names: {', '.join(map(repr, names[:_SHOWN]))}{_more(names)}"


def _more(things: Sequence[str]) -> str:
    return f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
