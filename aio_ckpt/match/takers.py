"""Takers: the parts of a template that get stored values other than by a fill of their memory.

``prepare`` builds the value, which finds damage and touches nothing. It returns the function that gives the value to
the template, once all is verified.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from aio_ckpt._torch import is_load_of_torch
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.leaves.arrays import from_tensor
from aio_ckpt.leaves.compound import CompoundTensor, mark_as_stored, put_together
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.leaves.objects import type_name
from aio_ckpt.leaves.values import LeafKind, OwnedShard, Target, UntrustedObject
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.message_texts import first_of
from aio_ckpt.runtime.error_notes import mark_modified
from aio_ckpt.state.build import build_part
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.flatten import leaves_of
from aio_ckpt.state.names import NamedNode, find_named, prefix_of
from aio_ckpt.state.put_back import put_back

_log = logging.getLogger("aio_ckpt")
_NOT_TRUSTED = (
    "torch.serialization.add_safe_globals() of a type that still has its name, or trusted_objects=True of the engine, "
    "brings it back"
)
Put: TypeAlias = Callable[[bool], bool]
"""Gives a value to the template. Gets whether this load has written to the template before; returns whether it has."""


@dataclass(slots=True, kw_only=True)
class Fetched:
    """Values that a load has read so far. Tensors of the template were filled in place."""

    values: dict[str, object] = field(default_factory=dict)
    """Tensors and decoded objects, by name."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Names of the objects that need trust, and why."""
    skip_untrusted: bool = False
    """Whether such objects are left out."""
    bytes_read: int = 0
    has_unchecked: bool = False
    """Whether bytes were read and not compared with a checksum: they have none, or ``verify`` is off."""

    @property
    def skipped(self) -> dict[str, str] | None:
        """``untrusted`` if such objects are left out, else None."""
        return self.untrusted if self.skip_untrusted else None


@dataclass(slots=True, kw_only=True)
class CompoundTaker:
    """Compound tensor of the template, whose parts are filled."""

    name: str
    held: CompoundTensor
    """Tensor of the template, and its parts."""
    stored: Notes
    """Stored properties, which the tensor gets once its parts are filled."""

    def prepare(self, _: Fetched) -> Put:
        """Check the parts: an index out of bounds would read beyond their memory."""
        notes = dict(self.stored)
        if "type" not in notes:  # the code of a subclass checks its own parts
            try:
                put_together(notes, self.held.parts, trusted=False)
            except (ValueError, TypeError, LookupError, RuntimeError) as error:
                raise CorruptCheckpointError(f"{self.name!r}: its parts are of no tensor: {error}") from error
        return self._put

    def _put(self, _: bool) -> bool:
        with target_modified():
            mark_as_stored(self.held.tensor, self.stored)
        return True


# -- leaves -------------------------------------------------------------------------------------------


class ReplacedArray(NamedTuple):
    """A numpy value of the template that is replaced: a scalar, or an array whose memory cannot be written."""

    name: str
    kind: LeafKind
    dtype: torch.dtype


class AnyLeaf(NamedTuple):
    """Leaf that takes any stored value: None, a number, a text, or an empty container."""

    names: Sequence[str]
    """Names of the stored leaves that it takes, as the template would name them."""
    branch: str
    """Stored name of the branch, or of the leaf if there is one alone."""


@dataclass(slots=True, kw_only=True)
class LeavesTaker:
    """Leaves of the caller's containers that a loaded value replaces."""

    checkpoint: Checkpoint
    state: object
    """Template."""
    empty: Sequence[str]
    """Names of the empty mappings and lists of the template, which may be filled."""
    ctx: ReadContext
    objects: list[str] = field(default_factory=list)
    """Names of the leaves that a decoded object replaces."""
    arrays: list[ReplacedArray] = field(default_factory=list)
    any_leaves: dict[str, AnyLeaf] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the stored leaves that it takes and that may not be leaves of the template."""
        return [name for leaf in self.any_leaves.values() for name in leaf.names]

    def prepare(self, fetched: Fetched) -> Put:
        """Build the values. Leaves whose object needs trust are left out."""
        values = fetched.values
        leaves = {name: values[name] for name in self.objects if name not in fetched.untrusted}
        for array in self.arrays:
            tensor = values[array.name]
            assert isinstance(tensor, torch.Tensor)
            leaves[array.name] = from_tensor(tensor.to(array.dtype), array.kind)
        if self.any_leaves:
            refused = {name: UntrustedObject(name, reason) for name, reason in fetched.untrusted.items()}
            leaves |= self._built_any(self.checkpoint.by_stored_name(values | refused))
        return functools.partial(self._put, leaves)

    def _put(self, values: dict[str, object], is_modified: bool) -> bool:
        if not values:
            return is_modified
        with target_modified():
            put_back(self.state, values, rank=self.ctx.rank, empty=self.empty)
        return True

    def _built_any(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return the value of each of ``any_leaves``, built as ``read`` does. ``values``: by stored name.

        Plain DCP stores every key as a str. The keys of an optimizer's ``state`` are made numbers again.
        """
        left, ctx, trusted = dict(self.any_leaves), self.ctx, self.ctx.config.trusted_objects
        built, plain = dict[str, object](), list[str]()
        for skeleton in self.checkpoint.skeletons(ctx.rank) if self.checkpoint.has_skeleton else ():
            parts = find_named(skeleton, {leaf.branch for leaf in left.values()}, rank=ctx.rank)
            for name, leaf in left.items():
                if leaf.branch in parts:
                    part = parts[leaf.branch]
                    built[name] = build_part(part, leaf.branch, values, rank=ctx.rank, trusted=trusted, plain=plain)
            left = {name: leaf for name, leaf in left.items() if name not in built}
            if not left:
                break
        if plain:
            reason = "their classes have moved or changed" if trusted else _NOT_TRUSTED
            _log.warning("%s: types came back as plain ones: %s: %s", self.checkpoint.path, first_of(plain), reason)
        for name, leaf in left.items():
            stored = {found: values[found] for found in map(self.checkpoint.stored_name, leaf.names)}
            if list(stored) == [leaf.branch]:
                built[name] = values[leaf.branch]
            else:
                nested = _nested_at(self.checkpoint, leaf.branch, stored)
                built[name] = _with_int_keys(nested) if name.rpartition(".")[2] == "state" else nested
        return built


def _nested_at(checkpoint: Checkpoint, branch: str, leaves: dict[str, object]) -> Any:
    """Return the nested value called ``branch``, which stock DCP flattened. ``leaves``: all its leaves, by name."""
    paths = checkpoint.dcp_paths or {}
    nested: Any = unflatten_dcp(paths, leaves)
    name = next(iter(leaves))
    path = paths.get(name, (name,))
    depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == branch), None)
    if depth is None:
        return {name.removeprefix(f"{branch}."): leaf for name, leaf in leaves.items()}
    for part in path[:depth]:
        nested = nested[part]
    return nested


def _with_int_keys(state: Any) -> Any:
    """Return the ``state`` of an optimizer with keys of digits as ints, by which the optimizer looks them up."""
    return {int(key) if str(key).isdigit() else key: item for key, item in state.items()}


# -- Stateful values ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StatefulTaker:
    """Stateful value of the template, whose ``load_state_dict`` is called."""

    checkpoint: Checkpoint
    name: str
    value: Any
    names: Sequence[str]
    """Names in the template of the stored leaves at or below it."""
    branch: str | None
    """Stored name of the branch that it is given; None if it is given leaves of several branches."""
    ctx: ReadContext
    options: LoadOptions
    part: NamedNode | None = None
    """Its part of the skeleton; None if there is none, as in plain DCP."""
    kept: Mapping[str, Target] = field(default_factory=dict)
    """Name -> its own tensor, of another shape than the stored one, which it keeps."""
    compounds: Mapping[str, CompoundTensor] = field(default_factory=dict)
    """Stored name -> the compound tensor that it holds now. Its type is used for the loaded one."""
    copied: Sequence[str] = ()
    """Names of its own tensors that are filled in place, and that ``load_state_dict`` is given copies of."""
    lacking: list[str] = field(default_factory=list)
    """With ``allow_missing``, names of entries that are not stored and stay. :meth:`prepare` finds them."""

    def prepare(self, fetched: Fetched) -> Put:
        """Build the ``state_dict()`` to load. Leaves whose object needs trust keep the value's own."""
        given = {name: fetched.values[name] for name in self.names if name in fetched.values}
        distinct = {id(given[name]): cast("torch.Tensor", given[name]) for name in self.copied}  # tied ones stay tied
        copies = {key: own.detach().clone().requires_grad_(own.requires_grad) for key, own in distinct.items()}
        given |= {name: copies[id(given[name])] for name in self.copied}
        given |= {name: own.owner if isinstance(own, OwnedShard) else own for name, own in self.kept.items()}
        if not fetched.untrusted.keys().isdisjoint(self.names):
            own = leaves_of(self.value.state_dict(), self.name, rank=self.ctx.rank)
            given |= {name: own[name] for name in self.names if name in fetched.untrusted and name in own}
        stored = {self.checkpoint.stored_name(name): given[name] for name in self.names if name in given}
        if self.branch is None:
            inner: Any = {name.removeprefix(f"{self.name}."): given[name] for name in self.names}
        elif self.part is not None:
            inner = build_part(
                self.part,
                self.branch,
                stored,
                rank=self.ctx.rank,
                trusted=self.ctx.config.trusted_objects,
                own=self.compounds,
                untrusted=fetched.skipped,
            )
        else:
            inner = _nested_at(self.checkpoint, self.branch, stored)
            if isinstance(self.value, torch.optim.Optimizer):  # DCP drops an empty ``state``, its int keys are text
                inner["state"] = _with_int_keys(inner.get("state", {}))
        if self.options.allow_missing:
            inner = _filled(inner, self.value.state_dict(), self.name, self.lacking)
        return functools.partial(self._put, _with_versions(inner, self.value))

    def _put(self, state_dict: Any, is_modified: bool) -> bool:
        with _noting_refusal(self, state_dict, is_modified=is_modified):
            self.value.load_state_dict(state_dict)
        return True


def _filled(stored: Any, own: Any, name: str, names: list[str]) -> Any:
    """Return ``stored`` with the entries of ``own`` that it lacks, in mappings and in lists of equal length.

    ``names`` gets the names of these entries. ``name``: that of the value.
    """
    prefix = prefix_of(name or None)
    if isinstance(stored, Mapping) and isinstance(own, Mapping):
        names += [f"{prefix}{key}" for key in own if key not in stored]
        made: Any = copy.copy(stored)  # of the same type
        for key, value in own.items():
            made[key] = _filled(stored[key], value, f"{prefix}{key}", names) if key in stored else value
        if hasattr(stored, "_metadata"):
            made._metadata = stored._metadata
        return made
    if type(stored) is list and type(own) is list and len(stored) == len(own):
        pairs = zip(stored, own, strict=True)
        return [_filled(one, other, f"{prefix}{number}", names) for number, (one, other) in enumerate(pairs)]
    return stored


def _with_versions(state_dict: Any, value: object) -> Any:
    """Return the ``state_dict`` of a module with versions: its own or the module's, as stock ``dcp.load`` does."""
    if not isinstance(value, torch.nn.Module) or hasattr(state_dict, "_metadata"):
        return state_dict
    versions = getattr(value.state_dict(), "_metadata", None)
    if versions is None or not isinstance(state_dict, Mapping):
        return state_dict
    made: Any = OrderedDict(state_dict)
    made._metadata = versions
    return made


@contextmanager
def _noting_refusal(target: StatefulTaker, state_dict: Any, *, is_modified: bool) -> Iterator[None]:
    """Note on an error of ``load_state_dict`` which value refused what, and whether the template changed."""
    try:
        yield
    except Exception as error:
        checkpoint = target.checkpoint
        which = f"{checkpoint.path}" if checkpoint.is_plain_dcp else f"step {checkpoint.step} at {checkpoint.path}"
        if is_modified:
            change = "the target was modified: tensors or values were filled before"
        elif not (isinstance(target.value, torch.optim.Optimizer) and is_load_of_torch(target.value)):
            change = "the target may be modified: load_state_dict() may have taken a part before it raised"
        else:
            change = ""  # an optimizer of torch compares its groups first
        if change:
            mark_modified(error)
        remedy = _remedy(target, state_dict)
        error.add_note(
            f"aio_ckpt: load_state_dict() of {target.name or 'the template'!r}, a {type_name(target.value)}, refused "
            f"what {which} holds for it; {change or 'nothing was modified'}{remedy}"
        )
        raise


def _remedy(target: StatefulTaker, state_dict: Any) -> str:
    """Return the rest of a note: what to give to ``load`` instead; '' if nothing helps."""
    if isinstance(target.value, torch.optim.Optimizer):
        if target.name:
            return f"; leave {target.name!r} out of the template if it has other parameters than the saved one"
        is_other = isinstance(state_dict, dict) and "param_groups" not in state_dict
        return f"; it holds {first_of([*map(repr, state_dict)])}: give a dict with such names" if is_other else ""
    if not isinstance(target.value, torch.nn.Module):
        return f"; leave {target.name!r} out of the template to keep its own state" if target.name else ""
    if not isinstance(state_dict, Mapping):
        return ""
    own: Mapping[str, Any] = target.value.state_dict()
    remedies = []
    if own.keys() - state_dict.keys():
        remedies.append("allow_missing=True leaves what is not stored as it is")
    shapes = [
        (getattr(own[key], "shape", None), getattr(state_dict[key], "shape", None))
        for key in own.keys() & state_dict.keys()
    ]
    if any(one != other for one, other in shapes):
        remedies.append("skip_mismatched=True leaves tensors of another shape as they are")
    return "".join(f"; {remedy}" for remedy in remedies)


@contextmanager
def target_modified() -> Iterator[None]:
    """Note on an error of the block that the template may hold a mix of old and new values."""
    try:
        yield
    except Exception as error:
        mark_modified(error)
        raise


Taker: TypeAlias = CompoundTaker | LeavesTaker | StatefulTaker
