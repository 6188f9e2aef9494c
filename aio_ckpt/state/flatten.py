"""Walk a state: names, leaves and the skeleton that rebuilds it. Pure but for :func:`put_back`.

A name is the path joined by ``.``, as DCP's ``flatten_state_dict`` makes it, and a container is entered when DCP
enters it: every mapping; a list that holds a tensor or mapping at any depth of lists. Beyond DCP, which pickles them,
a tuple, another sequence, a dataclass or a namespace that holds a tensor or mapping is entered, and so are Stateful
values and :class:`~aio_ckpt.state.values.PerRank` inside any of them; without any of these, dataclasses, namedtuples
and other sequences are entered all the same, as an object of their type would need trust to be read. Every other
value, whatever arrays it holds, is one object leaf.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType, NoneType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import AsyncCollectiveTensor, local_tensor
from aio_ckpt.errors import EmptyStateError, SourceChangedError, UnsupportedLeafError
from aio_ckpt.state.compound import CompoundTensor, is_compound, plain_tensors, take_apart
from aio_ckpt.state.containers import (
    fields_of,
    form_of,
    is_mapping,
    is_opened,
    is_transparent,
    items_of,
    notes_of,
    objects_of,
    parts_of,
    remade,
)
from aio_ckpt.state.objects import (
    MAX_DEPTH,
    TORCH_ARRAY_DTYPES,
    as_tensor,
    decode_object,
    encode_object,
    from_tensor,
    is_immutable,
    type_name,
)
from aio_ckpt.state.shards import ShardedTensor, shard_of
from aio_ckpt.state.skeleton import (
    MAPPINGS,
    TENSOR_WITH_GRAD,
    Container,
    Key,
    NamedKeys,
    Skeleton,
    build,
    build_below,
    compound_keys,
    compound_notes,
    copy_names,
    dcp_paths,
    decode_skeleton,
    encode_skeleton,
    freeze_key,
    is_below,
    key_text,
    leaf_keys,
    may_hold_compounds,
    skeleton_names,
    subtree,
    unflatten_dcp,
    unique_names,
    without_copies,
)
from aio_ckpt.state.values import LeafKind, PerRank, Shard, StockCopy

__all__ = [
    "TENSOR_TYPES",
    "Container",
    "FlatState",
    "NamedKeys",
    "Skeleton",
    "Template",
    "as_tensor",
    "build",
    "build_below",
    "check_leaves",
    "compound_keys",
    "compound_notes",
    "compounds_of",
    "copy_names",
    "dcp_paths",
    "decode_object",
    "decode_skeleton",
    "encode_object",
    "encode_skeleton",
    "flatten",
    "from_tensor",
    "is_below",
    "is_immutable",
    "leaf_keys",
    "leaves_of",
    "may_hold_compounds",
    "put_back",
    "read_template",
    "skeleton_names",
    "subtree",
    "tensor_fault",
    "unflatten_dcp",
]

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, DTensor)
_SHARDED: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
_UNPLANNED_DTYPES = frozenset(dtype for name, dtype in vars(torch).items() if re.fullmatch(r"u?int[1-7]|bits\w+", name))
"""Opaque dtypes of less than a byte, or of no number at all: DCP's planner fails on them."""


def tensor_fault(value: Any) -> str | None:
    """Why no item can hold this tensor, and what to give instead; None if it can."""
    kind = type(value)
    if isinstance(value, Shard):
        kind, value = type(value.tensor), value.tensor
        if kind not in _SHARDED:
            return f"a Shard over a {type_name(value)}; give a Shard over a plain tensor"
    if is_lazy(value):
        return f"a {kind.__name__} has no shape yet; run one forward pass first"
    if issubclass(kind, AsyncCollectiveTensor):
        return "an AsyncCollectiveTensor, whose values may not be there yet; give its .wait()"
    if kind not in TENSOR_TYPES:
        return (
            f"a {type_name(value)}, a subclass of Tensor that does not tell where its values are; give a plain tensor"
        )
    tensor = local_tensor(value) if kind is DTensor else value
    if tensor.is_nested:
        return "a nested tensor; give its parts with .unbind()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}, which no item holds here; give .to_dense()"
    if tensor.is_quantized:
        return f"a quantized tensor of {tensor.dtype}, which no item holds here; give .dequantize()"
    if tensor.dtype in _UNPLANNED_DTYPES:
        return f"a tensor of {tensor.dtype}, which DCP cannot plan; give .view(torch.uint8)"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no values; materialize it first (.to_empty(device=...))"
    if kind is DTensor and any(placement.is_partial() for placement in value.placements):
        return "a DTensor with a Partial placement, whose sum no rank holds; give .redistribute() or .full_tensor()"
    if type(tensor) not in TENSOR_TYPES:
        return (
            f"a DTensor over a {type_name(tensor)}; give PerRank(tensor.to_local()), which as many ranks load again, "
            "or a DTensor over a plain tensor"
        )
    return None


_PLAIN_TYPES: tuple[type, ...] = (NoneType, bool, int, float, complex, str, bytes, bytearray, torch.Size)
_NO_LEAVES = frozenset({*_PLAIN_TYPES, np.ndarray})
"""Elements that do not make a list or tuple one to enter."""
_LEAVES: dict[type, LeafKind] = {
    **dict.fromkeys(_PLAIN_TYPES, LeafKind.OBJECT),
    **dict.fromkeys(TENSOR_TYPES, LeafKind.TENSOR),
}
_SHOWN = 80
"""Characters of a name that a message shows where it may be as long as the nesting is deep."""
_MAX_ENTERED = 1 << 20
"""Containers, at most: 60 tuples of which each holds the next one twice stand in 2**60 places."""
_CONTAINERS_FROM, _STATEFUL = int(min(Container)), int(Container.STATEFUL)
_TEXT, _INT = {str}, {int}
_MANY_DIGITS = 1 << 64
_TENSOR_TYPES = frozenset(TENSOR_TYPES)
_requires_grad, _layout, _is_quantized = map(attrgetter, ("requires_grad", "layout", "is_quantized"))
_STRIDED = {torch.strided}
_COPY_BYTES = 1 << 20
"""Largest container that is stored a second time."""
_MUTABLE = frozenset({*MAPPINGS, Container.LIST, Container.FIELDS})
"""Containers that may hold themselves."""
_UNNOTED = frozenset({dict, Counter, list, tuple, PerRank})
"""Types of which a skeleton says everything by its code."""
_KEY, _VALUE = itemgetter(0), itemgetter(1)
_MOST_PARTS = 1024
"""Elements of a container without tensors that are stored one by one, each for some hundred bytes."""
_MANY = 16
"""From so many entries on a mapping of leaves is worth a look at all their types first."""
_CODES: dict[type, int] = {
    **_LEAVES,
    **{kind: int(code) for code, kind in MAPPINGS.items()},
    PerRank: int(Container.PER_RANK),
    Shard: int(LeafKind.TENSOR),
}


_CODES_BY_FORM: dict[str, int] = {
    "fields": int(Container.FIELDS),
    "tuple": int(Container.TUPLE),
    "list": int(Container.LIST),
}


class _UnreadableError(Exception):
    """A mapping whose entries cannot be read."""


@dataclass(slots=True)
class FlatState:
    """One save's view of a state; holds references to its leaves, so it lives no longer than the save."""

    names: list[str]
    """Name of each leaf, in the order of the walk; all different."""
    values: list[object]
    """Value of each leaf."""
    kinds: list[LeafKind]
    """What each leaf is stored as."""
    skeleton: Skeleton
    """Containers and keys around them."""
    versions: list[tuple[str, bytes]] = field(default_factory=list)
    """(name, bytes) of each ``_metadata`` of a ``state_dict()`` that the skeleton holds as an object."""


@dataclass(slots=True)
class Template:
    """What ``load`` is to fill. Stateful values are not entered: their ``state_dict()`` may be empty until loaded."""

    names: list[str]
    """Name of each leaf outside Stateful values."""
    values: list[object]
    """Value of each leaf."""
    kinds: list[LeafKind]
    """What each leaf would be stored as."""
    stateful: list[tuple[str, Any]]
    """(name, value) of each Stateful value; the name is ``""`` if the state itself is one."""
    compounds: dict[str, CompoundTensor]
    """Compound tensors by name; their parts are leaves."""
    skeleton: Skeleton
    """Containers and keys around the leaves."""
    empty: list[str]
    """Names of the empty mappings and lists that are no leaves; ``""`` is the state itself."""


def flatten(state: object, *, rank: int) -> FlatState:
    """Names, leaves and skeleton of ``state`` (a mapping or Stateful). Checks no tensor: :func:`check_leaves` does.

    Raises:
        UnsupportedLeafError: a container or key that cannot be stored.
        EmptyStateError: no leaf.
    """
    walk = _Walk(rank=rank, copies={})
    skeleton = walk.root(state)
    if not walk.names:
        raise EmptyStateError("the state holds no leaf: give at least one tensor or object")
    skeleton, _ = walk.apart(skeleton)
    skeleton = _with_grads(skeleton, walk.tensors(), walk.kinds)
    names = unique_names(walk.names)
    if walk.copies and (taken := walk.copies.keys() & {*names}):  # by another leaf, which is equal as text
        skeleton = without_copies(skeleton, taken, rank=rank)
        walk.copies = {name: value for name, value in walk.copies.items() if name not in taken}
    if walk.copies:
        names = [*names, *walk.copies]
        walk.values += map(StockCopy, walk.copies.values())
        walk.kinds += [LeafKind.OBJECT] * len(walk.copies)
    return FlatState(names, walk.values, walk.kinds, skeleton, walk.versions)


def read_template(state: object, *, rank: int) -> Template:
    """Like :func:`flatten`, for ``load``: Stateful values are listed, not entered.

    Raises:
        UnsupportedLeafError: as :func:`flatten`.
        EmptyStateError: neither a leaf nor an empty mapping or list, which takes all that is stored below its name.
    """
    stateful: list[tuple[str, Any]] = []
    empty: list[str] = []
    walk = _Walk(rank=rank, stateful=stateful, empty=empty)
    skeleton, compounds = walk.apart(walk.root(state))
    if not walk.names and not stateful and not empty:
        raise EmptyStateError("the template holds no leaf: give the state that is to be filled")
    named = dict(zip(unique_names([name for name, _ in compounds]), [found for _, found in compounds], strict=True))
    return Template(unique_names(walk.names), walk.values, walk.kinds, stateful, named, skeleton, empty)


def leaves_of(state: object, prefix: str, *, rank: int) -> dict[str, object]:
    """Leaves of a ``state_dict()`` by name, as they are called below ``prefix``; no parts of compound tensors."""
    try:
        flat = flatten({prefix: state} if prefix else state, rank=rank)
    except EmptyStateError:
        return {}
    leaves = dict(zip(flat.names, flat.values, strict=True))
    compounds = compound_notes(flat.skeleton, rank=rank)
    if not compounds:
        return leaves
    return {name: leaf for name, leaf in leaves.items() if not any(is_below(name, above) for above in compounds)}


def compounds_of(state: object, prefix: str, *, rank: int) -> dict[str, CompoundTensor]:
    """Compound tensors of a ``state_dict()`` by name, as they are called below ``prefix``."""
    walk = _Walk(rank=rank)
    _, found = walk.apart(walk.root({prefix: state} if prefix else state))
    return dict(found)


def check_leaves(flat: FlatState) -> None:
    """The checks that only a changed structure needs: tensors of a kind no item holds, names that are no UTF-8.

    Raises:
        UnsupportedLeafError: names the leaf and the remedy.
    """
    for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True):
        fault = tensor_fault(value) if kind is LeafKind.TENSOR else None
        if fault is None and not name.isascii() and name != name.encode(errors="ignore").decode():
            fault = "its name has a lone surrogate, which no UTF-8 file holds; rename it"
        if fault is not None:
            raise UnsupportedLeafError(f"{name!r}: {fault}")


def put_back(state: object, objects: Mapping[str, object], *, rank: int, names: Sequence[str] | None = None) -> None:
    """Set the leaves named in ``objects`` in the caller's containers; a tuple or ``PerRank`` is rebuilt in its parent.

    An empty mapping or list that is named is filled if the object is one, too, and else replaced. What a Stateful value
    or a tensor stands in is left alone, and so is every name that ``objects`` lacks. ``names``: those of all leaves, in
    the order of :func:`read_template`, where they are not their paths.
    """
    _PutBack(objects=objects, rank=rank, names=names).replaced(state, None)


# -- the walk ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One walk over a state; the lists grow in step."""

    rank: int
    """Rank that PerRank values are stored for."""
    stateful: list[tuple[str, Any]] | None = None
    """Collects Stateful values instead of entering them, if given."""
    empty: list[str] | None = None
    """Collects the names of empty mappings and lists, if given."""
    names: list[str] = field(default_factory=list)
    """Names of the leaves so far."""
    values: list[object] = field(default_factory=list)
    kinds: list[LeafKind] = field(default_factory=list)
    entered: int = 0
    """Containers so far, each as often as it stands somewhere."""
    number: int = 0
    """Of the next container in the skeleton."""
    places: dict[int, int] = field(default_factory=dict)
    """Number of a container by its id."""
    alive: list[object] = field(default_factory=list)
    """Containers, whose ids stay theirs so."""
    around: list[int] = field(default_factory=lambda: [-1] * (MAX_DEPTH + 1))
    """By depth: numbers of the first places of the containers around the one that is entered; behind its depth, of no
    meaning."""

    copies: dict[str, object] | None = None
    """Collects containers that stock DCP stores as one object, if given, by their names."""
    is_copied: bool = False
    """Whether the walk is inside such a container."""
    barred: int = 0
    """How often the walk met what no copy can hold."""
    versions: list[tuple[str, bytes]] = field(default_factory=list)
    """As :attr:`FlatState.versions`."""
    has_shards: bool = False
    """Whether a leaf is a :class:`Shard`."""

    def root(self, state: object, depth: int = 0) -> Skeleton:
        """The skeleton of the state itself, which must be a mapping or Stateful."""
        code = _code(state, "the state")
        if code not in MAPPINGS and code != Container.STATEFUL:
            raise UnsupportedLeafError(f"the state is a {type_name(state)}: give a dict or an object with state_dict()")
        return self.node(state, None, depth)

    def node(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """The skeleton of ``value``, whose name is ``name`` (None: the state itself)."""
        kind = type(value)
        code = _CODES.get(kind)
        if code is None:
            code = _code(value, name)
        if code < _CONTAINERS_FROM:
            return self.leaf(value, name, code)
        self.entered += 1
        if depth > MAX_DEPTH or self.entered > _MAX_ENTERED:
            raise _endless(f"{name}", depth)
        if code == _STATEFUL:
            self.around[depth] = -1
            return self.state_of(value, name, depth)
        number, known = self.number, self.places.setdefault(id(value), self.number)
        if known != number and code in _MUTABLE and known in self.around[:depth]:
            self.number += 1
            self.barred += 1
            return Container.REFERENCE, (), (), (("same", known),)
        self.number = number + 1
        self.alive.append(value)
        self.around[depth] = known
        skeleton = self.mapping(value, code, name, depth) if code in MAPPINGS else self.copied(value, code, name, depth)
        if known == number and kind in _UNNOTED and type(skeleton) is tuple:
            return skeleton
        return self.noted(value, skeleton, name, number, known)

    def noted(self, value: Any, skeleton: Any, name: str | None, number: int, known: int) -> Skeleton:
        """The skeleton of a container with its notes; ``known`` is the number of its first place."""
        if isinstance(skeleton, int):  # stored as one object
            self.number = number
            if known == number:
                del self.places[id(value)]
            return LeafKind.OBJECT
        notes = skeleton[3] if len(skeleton) > 3 else ()
        if type(value) not in _UNNOTED:
            own = notes_of(value, name or "the state")
            self.versions += [(f"{name}._metadata", data) for data in objects_of(own)]
            notes = (*notes, *own)
        if known != number:
            notes = (*notes, ("same", known))
        return (*skeleton[:3], notes) if notes else skeleton

    def copied(self, value: Any, code: int, name: str | None, depth: int) -> Any:
        """The skeleton of a container that is no mapping; a small one that stock takes whole is noted."""
        if self.copies is None or self.is_copied or not name or code == Container.PER_RANK or not _is_stock_leaf(value):
            return self.container(value, code, name, depth)
        self.is_copied, barred, start = True, self.barred, len(self.values)
        skeleton = self.container(value, code, name, depth)
        self.is_copied = False
        is_free = name not in self.copies and self.barred == barred
        if is_free and _copy_bytes(self.values[start:]) <= _COPY_BYTES:
            self.copies[name] = value
            return (*skeleton, (("copy", 1),))
        return skeleton

    def container(self, value: Any, code: int, name: str | None, depth: int) -> Any:
        """The skeleton of a container that is no mapping, without its notes."""
        prefix = _prefix(name)
        if code == Container.PER_RANK:
            self.barred += 1
            return code, (), (self.node(value.value, f"{prefix}rank{self.rank}", depth + 1),)
        if code == Container.FIELDS:
            keys, items = fields_of(value)
            children = [self.node(item, prefix + key, depth + 1) for key, item in zip(keys, items, strict=True)]
            return code, tuple(keys), tuple(children)
        children = [self.node(item, f"{prefix}{i}", depth + 1) for i, item in enumerate(parts_of(value))]
        if not children and self.empty is not None and code == Container.LIST:
            self.empty.append(name or "")
        return code, (), tuple(children)

    def leaf(self, value: Any, name: str | None, code: int) -> Skeleton:
        kind = LeafKind(code)
        self.names.append(name or "")
        self.values.append(value)
        self.kinds.append(kind)
        if isinstance(value, Shard):
            self.has_shards = True
            self.barred += 1
        return kind

    def tensors(self) -> list[Any]:
        """The tensor leaves, with the tensors of shards in their places."""
        found = self.values
        if self.kinds.count(LeafKind.TENSOR) < len(found):
            found = list(compress(found, map(is_, self.kinds, repeat(LeafKind.TENSOR))))
        return [value.tensor if isinstance(value, Shard) else value for value in found] if self.has_shards else found

    def apart(self, skeleton: Skeleton) -> tuple[Skeleton, list[tuple[str, CompoundTensor]]]:
        """``skeleton`` with the parts of compound tensors as leaves, and those tensors with their names.

        A pass behind the walk, whose hot loop asks no tensor for its layout: 20,000 plain ones take 1 ms.
        """
        if _are_plain(self.tensors()):
            return skeleton, []
        rows = list(zip(self.names, self.values, self.kinds, strict=True))
        found: list[tuple[str, CompoundTensor]] = []
        self.names, self.values, self.kinds = [], [], []
        nodes = [self.part(name, value, kind, found) for name, value, kind in rows]
        return _with_nodes(skeleton, iter(nodes)), found

    def part(self, name: str, value: Any, kind: LeafKind, found: list[tuple[str, CompoundTensor]]) -> Skeleton:
        """The skeleton of a leaf, or of a compound tensor."""
        if isinstance(value, ShardedTensor):
            return self.leaf(shard_of(value, name), name, kind)
        if kind is not LeafKind.TENSOR or isinstance(value, Shard) or not is_compound(value):
            return self.leaf(value, name, kind)
        compound = take_apart(value, name)
        found.append((name, compound))
        nodes = [self.part(f"{name}.{key}", part, kind, found) for key, part in compound.parts.items()]
        return Container.TENSOR, tuple(compound.parts), tuple(nodes), compound.notes

    def mapping(self, value: Mapping[Any, object], code: int, name: str | None, depth: int) -> Any:
        """The hot loop: 20,000 tensors in one dict take no call each."""
        try:
            given, items = _entries(value, name)
        except _UnreadableError:
            return self.leaf(value, name, LeafKind.OBJECT)
        if len(given) >= _MANY and (skeleton := self.leaves(given, items, code, name)) is not None:
            return skeleton
        if not given and self.empty is not None:
            self.empty.append(name or "")
        names, values, kinds, prefix = self.names, self.values, self.kinds, _prefix(name)
        keys: tuple[Key, ...] = given
        texts: Sequence[str] = given
        for key in given:  # of the few of a parameter's state: quicker than the set of their types
            if type(key) is not str:
                keys, texts = _frozen(given, name)
                if len(set(texts)) != len(texts):
                    if name is not None and not _holds_leaves(items, name, 0, set(), tensors_only=True):
                        return self.leaf(value, name, LeafKind.OBJECT)
                    _check_keys(keys, name)
                break
        children: list[Skeleton] = []
        for text, item in zip(texts, items, strict=True):
            kind = _LEAVES.get(type(item))
            if kind is None:
                children.append(self.node(item, prefix + text, depth + 1))
                continue
            names.append(prefix + text)
            values.append(item)
            kinds.append(kind)
            children.append(kind)
        return code, keys, tuple(children)

    def leaves(self, keys: tuple[Any, ...], values: list[object], code: int, name: str | None) -> Skeleton | None:
        """A mapping from str to leaves alone, without a line of Python a leaf; None if it is none."""
        types = {*map(type, values)}
        if not types <= _LEAVES.keys() or {*map(type, keys)} != _TEXT:
            return None
        if types <= _TENSOR_TYPES:
            kinds = (LeafKind.TENSOR,) * len(values)
        else:
            kinds = tuple(map(_LEAVES.__getitem__, map(type, values)))
        self.names += keys if name is None else map(_prefix(name).__add__, keys)
        self.values += values
        self.kinds += kinds
        return code, keys, kinds

    def state_of(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """A Stateful value: the skeleton of its ``state_dict()``, or an entry in ``stateful``."""
        if name == "":
            raise UnsupportedLeafError(f"a {type_name(value)} under the key '': give it a name")
        self.barred += 1
        if self.stateful is None:
            inner = value.state_dict()
            return self.root(inner, depth + 1) if name is None else self.node(inner, name, depth + 1)
        self.stateful.append((name or "", value))
        return Container.STATEFUL, (), ()


def _is_stock_leaf(value: Any) -> bool:
    """Whether DCP's ``flatten_state_dict`` takes the value, which is no mapping, as one leaf."""
    if not isinstance(value, list):
        return True
    for item in value:
        if isinstance(item, (Mapping, torch.Tensor)) or (isinstance(item, list) and not _is_stock_leaf(item)):
            return False
    return True


def _copy_bytes(values: Sequence[object]) -> float:
    """About as many bytes as torch.save stores for these leaves: whole storages; no end for what it cannot store."""
    total = 0.0
    for value in values:
        if isinstance(value, torch.Tensor):
            is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            total += value.untyped_storage().nbytes() if is_plain and not value.is_nested else math.inf
        elif isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, (str, bytes, bytearray, list, tuple)):
            total += len(value)
    return total


def _with_grads(skeleton: Skeleton, tensors: list[Any], kinds: Sequence[LeafKind]) -> Skeleton:
    """``skeleton``, where leaf tensors that require gradients are marked. One pass in C where none does."""
    if not any(map(_requires_grad, tensors)):
        return skeleton
    left = iter(tensors)
    codes = (_code_of(next(left)) if kind is LeafKind.TENSOR else kind for kind in kinds)
    return _with_nodes(skeleton, codes)


def _code_of(tensor: torch.Tensor) -> int:
    return TENSOR_WITH_GRAD if tensor.requires_grad and tensor.is_leaf else LeafKind.TENSOR


def _with_nodes(node: Any, nodes: Iterator[Skeleton]) -> Skeleton:
    """``node`` with other nodes in the places of its leaves."""
    if isinstance(node, int):
        return next(nodes)
    return (*node[:2], tuple([_with_nodes(child, nodes) for child in node[2]]), *node[3:])


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Whether none is compound: three passes in C."""
    if not ({*map(type, tensors)} <= _TENSOR_TYPES and {*map(_layout, tensors)} <= _STRIDED):
        return False
    return not any(map(_is_quantized, tensors))


def _endless(name: str, depth: int) -> UnsupportedLeafError:
    """What says that a walk would not end, or not soon."""
    if depth > MAX_DEPTH:
        why = f"nested deeper than {MAX_DEPTH} (does a container hold itself?)"
    else:
        why = (
            f"more than {_MAX_ENTERED} containers, each counted in every place where it stands, as what it holds has "
            "another name in each: give what is shared in one place"
        )
    return UnsupportedLeafError(f"{name[:_SHOWN]}...: {why}")


def _entries(value: Mapping[Any, object], name: str | None) -> tuple[tuple[Any, ...], list[object]]:
    """Keys and values, read at once: no value under another's key, whatever another thread changes meanwhile."""
    if type(value) is dict:  # whose copy is one step: 20,000 entries take 0.2 ms, and their pairs 1.6
        still = value.copy()
        return tuple(still), list(still.values())
    try:
        items = items_of(value)
    except RuntimeError as error:
        raise SourceChangedError(
            f"{name or 'the state'}: another thread changed this {type_name(value)} while it was read ({error}): keep "
            "the state still until save() returns"
        ) from error
    except Exception as error:  # a mapping that cannot be read, such as one with values that are missing
        raise _UnreadableError from error
    return tuple(map(_KEY, items)), list(map(_VALUE, items))


def _prefix(name: str | None) -> str:
    return "" if name is None else name + "."


def _frozen(keys: Sequence[Any], name: str | None) -> tuple[tuple[Key, ...], list[str]]:
    """Keys as a skeleton has them, and the parts of names that they make."""
    if {*map(type, keys)} == _INT and max(max(keys), -min(keys)) < _MANY_DIGITS:  # of an optimizer
        texts = list(map(str, keys))
        return tuple([("i", text) for text in texts]), texts
    frozen = tuple([key if type(key) is str else freeze_key(key, name or "the state") for key in keys])
    return frozen, list(map(key_text, frozen))


def _check_keys(keys: Sequence[Key], name: str | None) -> None:
    if len(set(keys)) != len(keys):
        raise UnsupportedLeafError(f"{name or 'the state'}: two keys that are stored alike: rename one of them")


def _code(value: Any, name: str | None) -> int:
    """``LeafKind`` or ``Container`` of a value, by its exact type wherever there is one."""
    kind = type(value)
    code = _CODES.get(kind)
    if code is not None:
        return code
    if isinstance(value, torch.Tensor):
        return LeafKind.TENSOR
    if isinstance(value, np.generic):
        return LeafKind.SCALAR_ARRAY if value.dtype in TORCH_ARRAY_DTYPES else LeafKind.OBJECT
    if kind is np.ndarray:
        return LeafKind.ARRAY if value.dtype in TORCH_ARRAY_DTYPES else LeafKind.OBJECT
    if isinstance(value, type):
        return LeafKind.OBJECT
    if _is_stateful_type(kind):
        return Container.STATEFUL
    form = form_of(kind)
    if form is None:
        return LeafKind.OBJECT
    if form == "mapping":
        return Container.ORDERED_DICT if isinstance(value, OrderedDict) else Container.DICT
    parts = parts_of(value)
    is_entered = is_opened(kind) and len(parts) <= _MOST_PARTS
    if not is_entered and not _holds_leaves(parts, name, 0, {id(value)}):
        return LeafKind.OBJECT
    return _CODES_BY_FORM[form]


def _holds_leaves(values: Any, name: str | None, depth: int, without: set[int], *, tensors_only: bool = False) -> bool:
    """Whether a container is entered: decided by the set of its types, so that 10,000 ints cost one pass in C.

    ``without``: ids of those that are looked at, or hold no leaf; one that stands in many places is looked at once.
    ``tensors_only``: mappings are looked into, too.
    """
    nested = False
    for kind in set(map(type, values)) - _NO_LEAVES:
        if issubclass(kind, (torch.Tensor, PerRank, Shard)) or _is_stateful_type(kind):
            return True
        is_keyed = is_mapping(kind)
        if is_keyed and not tensors_only:
            return True
        nested = nested or is_keyed or is_transparent(kind)
    if nested and depth > MAX_DEPTH:
        raise UnsupportedLeafError(f"{name}: a list nested deeper than {MAX_DEPTH} (does it hold itself?)")
    if nested:
        for item in values:
            kind = type(item)
            if id(item) in without or kind in _NO_LEAVES or not (is_transparent(kind) or is_mapping(kind)):
                continue
            without.add(id(item))
            parts = [part for _, part in items_of(item)] if is_mapping(kind) else parts_of(item)
            if _holds_leaves(parts, name, depth + 1, without, tensors_only=tensors_only):
                return True
    return False


def _is_stateful_type(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


@dataclass(slots=True, kw_only=True)
class _PutBack:
    """Sets objects in the containers of a caller, in the order of the walk."""

    objects: Mapping[str, object]
    """What to set, by name."""
    rank: int
    """Rank whose PerRank values are set."""
    names: Sequence[str] | None
    """Names of the leaves, where they are not their paths."""
    leaf_number: int = 0
    """Of the next leaf."""
    around: set[int] = field(default_factory=set)
    """Ids of the containers around the one that is entered."""

    def replaced(self, value: Any, name: str | None) -> Any:
        """``value`` itself, changed in place where it can be, or what must stand in its parent in its stead."""
        code = _code(value, name)
        if code < _CONTAINERS_FROM:
            return self.leaf(value, name, code)
        if code == Container.STATEFUL or id(value) in self.around:
            return value
        self.around.add(id(value))
        try:
            return self.entered(value, code, name)
        finally:
            self.around.discard(id(value))

    def leaf(self, value: Any, name: str | None, code: int) -> Any:
        if self.names is not None:
            name = self.names[self.leaf_number]
            self.leaf_number += len(list(plain_tensors(value))) if isinstance(value, torch.Tensor) else 1
        if name is None or code == LeafKind.TENSOR:
            return value
        found = self.objects.get(name, value)
        return _with_all(value, found) if isinstance(value, list) and not value else found

    def entered(self, value: Any, code: int, name: str | None) -> Any:
        prefix = _prefix(name)
        if code == Container.PER_RANK:
            inner = self.replaced(value.value, f"{prefix}rank{self.rank}")
            return value if inner is value.value else PerRank(inner)
        if code in MAPPINGS:
            try:
                keys, items = _entries(value, name)
            except _UnreadableError:
                return self.leaf(value, name, LeafKind.OBJECT)
            texts = _frozen(keys, name)[1]
            is_one = name is not None and len(set(texts)) != len(texts)
            if is_one and not _holds_leaves(items, name, 0, set(), tensors_only=True):
                return self.leaf(value, name, LeafKind.OBJECT)
        elif code == Container.FIELDS:
            keys, items = fields_of(value)  # type: ignore[assignment]
            texts = keys  # type: ignore[assignment]
        else:
            items = parts_of(value)
            keys = range(len(items))  # type: ignore[assignment]
            texts = list(map(str, keys))
        if not items and (name or "") in self.objects:
            return _with_all(value, self.objects[name or ""])
        new = [self.replaced(item, prefix + text) for text, item in zip(texts, items, strict=True)]
        changed = [(key, now) for key, was, now in zip(keys, items, new, strict=True) if now is not was]
        return _with(value, code, changed, new) if changed else value


def _with_all(value: Any, found: Any) -> Any:
    """``value``, an empty mapping or list, filled with what ``found`` holds; or ``found`` if that is neither."""
    if is_mapping(type(value)) and isinstance(found, Mapping):
        if isinstance(value, OrderedDict) and "_metadata" in getattr(found, "__dict__", ()):
            value._metadata = found._metadata  # type: ignore[attr-defined]
        return _with(value, Container.DICT, list(found.items()), [])
    if isinstance(value, list) and isinstance(found, list):
        value.extend(found)
        return value
    return found


def _with(value: Any, code: int, changed: list[tuple[Any, object]], items: list[object]) -> Any:
    """``value`` with its parts set, or another one of its type where it takes none."""
    if code == Container.TUPLE:
        return tuple(items) if type(value) is tuple else remade(type(value), items)
    if code == Container.FIELDS:
        for key, item in changed:
            object.__setattr__(value, key, item)
        return value
    if isinstance(value, MappingProxyType):
        return MappingProxyType({**value, **dict(changed)})
    for key, item in changed:
        value[key] = item
    return value
