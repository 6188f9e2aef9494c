"""Walk a state: its names, its leaves and the skeleton that rebuilds it. Pure.

A name is the path of a leaf, joined by ``.``, as DCP's ``flatten_state_dict`` makes it. The walk enters every mapping,
and a list that holds a tensor or mapping at any depth of lists. DCP enters the same containers.

The walk also enters values that DCP pickles:

- Stateful values and :class:`~aio_ckpt.leaves.values.PerRank`.
- Tuples, other sequences, dataclasses and namespaces that hold a tensor, a mapping or one of the above.
- Dataclasses, namedtuples and sequences of other types, whatever they hold: one object would need trust to be read.

Every other value is one object leaf, whatever arrays it holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch

from aio_ckpt._torch import ShardedTensor
from aio_ckpt.errors import DuplicateNameError, EmptyStateError, UnsupportedLeafError
from aio_ckpt.leaves.compound import CompoundTensor, is_compound, take_apart
from aio_ckpt.leaves.containers import Notes, UnreadableError, entries_of, fields_of, notes_of, objects_of, parts_of
from aio_ckpt.leaves.keys import Key, frozen_keys
from aio_ckpt.leaves.objects import MAX_DEPTH, type_name
from aio_ckpt.leaves.sharded_tensor import shard_of
from aio_ckpt.leaves.values import LeafKind, PerRank, Shard
from aio_ckpt.message_texts import shown
from aio_ckpt.state.leaf_or_container import CODES, CONTAINERS_FROM, LEAVES, TENSOR_TYPES, code_of
from aio_ckpt.state.names import compound_notes, is_below, prefix_of
from aio_ckpt.state.skeleton import MAPPINGS, TENSOR_WITH_GRAD, Container, Skeleton

# Python 3.11 calls a method of an imported name by a slower path, so the hot loop uses names of this module.
_CODES, _LEAVES = CODES, LEAVES
_SHOWN = 80
"""Most characters that a message shows of a name, which grows with the depth of the nesting."""
_MAX_ENTERED = 1 << 20
"""Most containers of a state, counted in every place: 60 tuples that hold the next one twice have 2**60 places."""
_STATEFUL = int(Container.STATEFUL)
_TEXT = {str}
_TENSORS = frozenset(TENSOR_TYPES)
_requires_grad, _layout = map(attrgetter, ("requires_grad", "layout"))
_STRIDED = {torch.strided}
_MUTABLE = frozenset({*MAPPINGS, Container.LIST, Container.FIELDS})
"""Containers that can hold themselves."""
_UNNOTED = frozenset({dict, Counter, list, tuple, PerRank})
"""Types that the code of a container tells completely: a skeleton needs no note."""
_MANY = 16
"""Fewest entries of a mapping that is first tested for leaves alone."""


@dataclass(slots=True)
class FlatState:
    """Names, leaves and skeleton of the state of one save. It refers to the leaves, so it ends with the save."""

    names: list[str]
    """Name of each leaf, in the order of the walk; all different."""
    values: list[object]
    kinds: list[LeafKind]
    skeleton: Skeleton
    """Containers and keys around the leaves."""
    versions: list[tuple[str, bytes]] = field(default_factory=list)
    """(name, bytes) of each ``_metadata`` of a ``state_dict()`` that the skeleton holds as an object."""
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Modules whose ``state_dict()`` was walked."""


@dataclass(slots=True)
class Template:
    """Names and leaves of the state that a load fills. Stateful values are not entered."""

    names: list[str]
    values: list[object]
    kinds: list[LeafKind]
    stateful: list[tuple[str, Any]]
    """(name, value) of each Stateful value, whose ``state_dict()`` may be empty until it is loaded.

    The name is ``""`` if the state itself is one.
    """
    compounds: dict[str, CompoundTensor]
    """Compound tensors by name. Their parts are leaves."""
    empty: list[str]
    """Names of the empty mappings and lists that take what is stored below them; ``""`` is the state itself."""


def flatten(state: object, *, rank: int) -> FlatState:
    """Return names, leaves and skeleton of ``state``, a mapping or Stateful value.

    It checks no tensor: :func:`aio_ckpt.state.check_leaves.check_leaves` does.

    Raises:
        UnsupportedLeafError: no checkpoint can store a container or key.
        DuplicateNameError: two leaves would have one name.
    """
    walk = _Traversal(rank=rank)
    skeleton = walk.root(state)
    skeleton, _ = walk.apart(skeleton)
    skeleton = _with_grads(skeleton, walk.tensors(), walk.kinds)
    _check_names(walk.names)
    return FlatState(walk.names, walk.values, walk.kinds, skeleton, walk.versions, walk.modules)


def check_not_empty(flat: FlatState) -> None:
    if not flat.names:
        raise EmptyStateError("the state holds no leaf: give at least one tensor or object")


def read_template(state: object, *, rank: int) -> Template:
    """Return names and leaves of the state that a load fills. Stateful values are listed, not entered.

    Raises:
        UnsupportedLeafError, DuplicateNameError: as :func:`flatten`.
        EmptyStateError: the state has no leaf, and no empty mapping or list, which takes all that is stored below its
            name.
    """
    stateful: list[tuple[str, Any]] = []
    empty: list[str] = []
    walk = _Traversal(rank=rank, stateful=stateful, empty=empty)
    _, compounds = walk.apart(walk.root(state))
    if not walk.names and not stateful and not empty:
        raise EmptyStateError("the template holds no leaf: give the state that is to be filled")
    _check_names(walk.names)
    empty = _unambiguous(empty, walk.names)
    return Template(walk.names, walk.values, walk.kinds, stateful, dict(compounds), empty)


def _unambiguous(empty: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of ``empty`` that are the name of one container alone, with no leaf at or below it.

    Keys with dots may give one name to a leaf and to an empty container, which does not take the leaf's value.
    """
    if not names:
        return list(empty)
    ordered, counts = sorted(names), Counter(empty)

    def is_free(name: str) -> bool:
        at, below = bisect_left(ordered, name), bisect_left(ordered, prefix := f"{name}.")
        holds_leaf = name == "" or ordered[at : at + 1] == [name]
        return not holds_leaf and not any(leaf.startswith(prefix) for leaf in ordered[below : below + 1])

    return [name for name, count in counts.items() if count == 1 and is_free(name)]


def leaves_of(state: object, prefix: str, *, rank: int) -> dict[str, object]:
    """Return the leaves of a ``state_dict()`` by their names below ``prefix``, without parts of compound tensors."""
    flat = flatten({prefix: state} if prefix else state, rank=rank)
    leaves = dict(zip(flat.names, flat.values, strict=True))
    compounds = compound_notes(flat.skeleton, rank=rank)
    if not compounds:
        return leaves
    return {name: leaf for name, leaf in leaves.items() if not any(is_below(name, above) for above in compounds)}


def compounds_of(state: object, prefix: str, *, rank: int) -> dict[str, CompoundTensor]:
    """Return the compound tensors of a ``state_dict()`` by their names below ``prefix``."""
    walk = _Traversal(rank=rank)
    _, found = walk.apart(walk.root({prefix: state} if prefix else state))
    return dict(found)


# -- the walk ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Traversal:
    """One walk over a state. Names, values and kinds grow in step."""

    rank: int
    """Rank that PerRank values are stored for."""
    stateful: list[tuple[str, Any]] | None = None
    """Stateful values so far, which are not entered. None: they are entered."""
    empty: list[str] | None = None
    """Names of the empty mappings and lists so far. None: they are not collected."""
    names: list[str] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    kinds: list[LeafKind] = field(default_factory=list)
    entered: int = 0
    """Containers so far, counted in every place."""
    number: int = 0
    """Number of the next container in the skeleton."""
    places: dict[int, int] = field(default_factory=dict)
    """Number of the first place of each container, by its id."""
    alive: list[object] = field(default_factory=list)
    """Containers so far. They stay alive, so no other object gets their ids."""
    enclosing: list[int] = field(default_factory=lambda: [-1] * (MAX_DEPTH + 1))
    """Number of the first place of each enclosing container, by depth. Entries from the current depth on are stale."""
    versions: list[tuple[str, bytes]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    has_shards: bool = False

    def root(self, state: object, depth: int = 0) -> Skeleton:
        """Return the skeleton of the state itself, which must be a mapping or Stateful value."""
        code = code_of(state, "the state")
        if code not in MAPPINGS and code != Container.STATEFUL:
            raise UnsupportedLeafError(f"the state is a {type_name(state)}: give a dict or an object with state_dict()")
        return self.node(state, None, depth)

    def node(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """Return the skeleton of ``value``. ``name``: of the value; None for the state itself."""
        kind = type(value)
        code = _CODES.get(kind)
        if code is None:
            code = code_of(value, name)
        if code < CONTAINERS_FROM:
            return self.leaf(value, name, code)
        self.entered += 1
        if depth > MAX_DEPTH or self.entered > _MAX_ENTERED:
            raise _endless(f"{name}", depth)
        if code == _STATEFUL:
            self.enclosing[depth] = -1
            return self.state_of(value, name, depth)
        number, known = self.number, self.places.setdefault(id(value), self.number)
        if known != number and code in _MUTABLE and known in self.enclosing[:depth]:
            self.number += 1
            return Container.REFERENCE, (), (), (("same", known),)
        self.number = number + 1
        self.alive.append(value)
        self.enclosing[depth] = known
        walk = self.mapping if code in MAPPINGS else self.container
        skeleton = walk(value, code, name, depth)
        if known == number and kind in _UNNOTED and type(skeleton) is tuple:
            return skeleton
        return self.noted(value, skeleton, name, number, known)

    def noted(self, value: Any, skeleton: Any, name: str | None, number: int, known: int) -> Skeleton:
        """Return the skeleton of a container with its notes. ``known``: the number of its first place."""
        if isinstance(skeleton, int):  # The container is stored as one object.
            self.number = number
            if known == number:
                del self.places[id(value)]
            return LeafKind.OBJECT
        notes: Notes = ()
        if type(value) not in _UNNOTED:
            notes = notes_of(value, name or "the state")
            self.versions += [(f"{name}._metadata", data) for data in objects_of(notes)]
        if known != number:
            notes = (*notes, ("same", known))
        return (*skeleton, notes) if notes else skeleton

    def container(self, value: Any, code: int, name: str | None, depth: int) -> Any:
        """Return the skeleton of a container that is no mapping, without its notes."""
        prefix = prefix_of(name)
        if code == Container.PER_RANK:
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
        """Add a leaf; return its skeleton."""
        kind = LeafKind(code)
        self.names.append(name or "")
        self.values.append(value)
        self.kinds.append(kind)
        if isinstance(value, Shard):
            self.has_shards = True
        return kind

    def tensors(self) -> list[Any]:
        """Return the tensor of every tensor leaf; for a shard, its tensor."""
        found = self.values
        if self.kinds.count(LeafKind.TENSOR) < len(found):
            found = list(compress(found, map(is_, self.kinds, repeat(LeafKind.TENSOR))))
        return [value.tensor if isinstance(value, Shard) else value for value in found] if self.has_shards else found

    def apart(self, skeleton: Skeleton) -> tuple[Skeleton, list[tuple[str, CompoundTensor]]]:
        """Replace compound tensors by their parts; return the skeleton with them, and (name, tensor) of each.

        This pass follows the walk, so that the walk's hot loop asks no tensor for its layout.
        """
        tensors = self.tensors()
        if {*map(type, tensors)} <= _TENSORS and {*map(_layout, tensors)} <= _STRIDED:
            return skeleton, []
        rows = list(zip(self.names, self.values, self.kinds, strict=True))
        found: list[tuple[str, CompoundTensor]] = []
        self.names, self.values, self.kinds = [], [], []
        nodes = [self.part(name, value, kind, found) for name, value, kind in rows]
        return _with_nodes(skeleton, iter(nodes)), found

    def part(self, name: str, value: Any, kind: LeafKind, found: list[tuple[str, CompoundTensor]]) -> Skeleton:
        """Add a leaf, or the parts of a compound tensor; return its skeleton."""
        if isinstance(value, ShardedTensor):
            return self.leaf(shard_of(value, name), name, kind)
        if kind is not LeafKind.TENSOR or isinstance(value, Shard) or not is_compound(value):
            return self.leaf(value, name, kind)
        compound = take_apart(value, name)
        found.append((name, compound))
        nodes = [self.part(f"{name}.{key}", part, kind, found) for key, part in compound.parts.items()]
        return Container.TENSOR, tuple(compound.parts), tuple(nodes), compound.notes

    def mapping(self, value: Mapping[Any, object], code: int, name: str | None, depth: int) -> Any:
        """Return the skeleton of a mapping. This is the hot loop: a tensor takes no call."""
        try:
            given, items = entries_of(value, name)
        except UnreadableError:
            return self.leaf(value, name, LeafKind.OBJECT)
        if len(given) >= _MANY and (skeleton := self.leaves(given, items, code, name)) is not None:
            return skeleton
        if not given and self.empty is not None:
            self.empty.append(name or "")
        names, values, kinds, prefix = self.names, self.values, self.kinds, prefix_of(name)
        keys: tuple[Key, ...] = given
        texts: Sequence[str] = given
        for key in given:  # A parameter's state has few keys: a loop is faster than the set of their types.
            if type(key) is not str:
                keys, texts = frozen_keys(given, name)
                _check_keys(given, texts, name)
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
        """Return the skeleton of a mapping from str to leaves alone, by passes in C; None for another mapping."""
        types = {*map(type, values)}
        if not types <= _LEAVES.keys() or {*map(type, keys)} != _TEXT:
            return None
        if types <= _TENSORS:
            kinds = (LeafKind.TENSOR,) * len(values)
        else:
            kinds = tuple(map(_LEAVES.__getitem__, map(type, values)))
        self.names += keys if name is None else map(prefix_of(name).__add__, keys)
        self.values += values
        self.kinds += kinds
        return code, keys, kinds

    def state_of(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """Return the skeleton of a Stateful value's ``state_dict()``; with ``stateful``, list the value instead."""
        if name == "":
            raise UnsupportedLeafError(f"a {type_name(value)} under the key '': give it a name")
        if self.stateful is None:
            if isinstance(value, torch.nn.Module):
                self.modules.append(value)
            inner = _state_dict(value, name)
            return self.root(inner, depth + 1) if name is None else self.node(inner, name, depth + 1)
        self.stateful.append((name or "", value))
        return Container.STATEFUL, (), ()


def _state_dict(value: Any, name: str | None) -> object:
    try:
        return value.state_dict()
    except Exception as error:
        error.add_note(f"aio_ckpt: state_dict() of {name or 'the state'!r}, a {type_name(value)}, failed")
        raise


def _endless(name: str, depth: int) -> UnsupportedLeafError:
    """Return the error of a walk that would not end, or not soon."""
    if depth > MAX_DEPTH:
        why = f"nested deeper than {MAX_DEPTH} (does a container hold itself?)"
    else:
        why = (
            f"more than {_MAX_ENTERED} containers, each counted in every place where it stands, as what it holds has "
            "another name in each: give what is shared in one place"
        )
    return UnsupportedLeafError(f"{name[:_SHOWN]}...: {why}")


def _check_keys(keys: Sequence[object], texts: Sequence[str], name: str | None) -> None:
    """Refuse keys of a mapping that are equal as text: their values would have one name."""
    if len(set(texts)) == len(texts):
        return
    first: dict[str, object] = {}
    for key, text in zip(keys, texts, strict=True):
        if text in first:
            raise DuplicateNameError(
                f"{name or 'the state'}: the keys {shown(first[text])} and {shown(key)} are equal as text, so that "
                "their values would have one name: rename one of them"
            )
        first[text] = key


def _check_names(names: Sequence[str]) -> None:
    """Refuse two leaves of one name, as keys with dots make them: ``{"a.b": 1, "a": {"b": 2}}``."""
    if len(set(names)) == len(names):
        return
    name, count = Counter(names).most_common(1)[0]
    raise DuplicateNameError(
        f"{name!r} is the name of {count} values, as a name is the keys joined by dots: rename a key that holds a dot"
    )


# -- changes to a skeleton --------------------------------------------------------------------------


def _with_grads(skeleton: Skeleton, tensors: list[Any], kinds: Sequence[LeafKind]) -> Skeleton:
    """Return ``skeleton`` with the code of every leaf tensor that requires gradients. If none does, one pass in C."""
    if not any(map(_requires_grad, tensors)):
        return skeleton
    left = iter(tensors)
    codes = (_code_of(next(left)) if kind is LeafKind.TENSOR else kind for kind in kinds)
    return _with_nodes(skeleton, codes)


def _code_of(tensor: torch.Tensor) -> int:
    return TENSOR_WITH_GRAD if tensor.requires_grad and tensor.is_leaf else LeafKind.TENSOR


def _with_nodes(node: Any, nodes: Iterator[Skeleton]) -> Skeleton:
    """Return ``node`` with the next of ``nodes`` in place of each leaf."""
    if isinstance(node, int):
        return next(nodes)
    return (*node[:2], tuple([_with_nodes(child, nodes) for child in node[2]]), *node[3:])
