"""Walk a state: names, leaves and the skeleton that rebuilds it. Pure but for :func:`put_back`.

A name is the path joined by ``.``, as DCP's ``flatten_state_dict`` makes it, and a container is entered when DCP
enters it: every mapping; a list that holds a tensor or mapping at any depth of lists. Beyond DCP, which pickles them,
a tuple that holds a tensor or mapping is entered, and so are Stateful values and
:class:`~aio_ckpt.state.values.PerRank` inside either. Every other list or tuple, whatever arrays it holds, is one
object leaf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import local_tensor
from aio_ckpt.errors import EmptyStateError, SourceChangedError, UnsupportedLeafError
from aio_ckpt.state.objects import (
    MAX_DEPTH,
    TORCH_ARRAY_DTYPES,
    as_tensor,
    check_object,
    decode_object,
    encode_object,
    from_tensor,
    is_immutable,
    type_name,
)
from aio_ckpt.state.skeleton import (
    MAPPINGS,
    Container,
    Key,
    Skeleton,
    build,
    build_below,
    check_names,
    dcp_paths,
    decode_skeleton,
    encode_skeleton,
    freeze_key,
    is_below,
    skeleton_names,
    subtree,
    unflatten_dcp,
)
from aio_ckpt.state.values import LeafKind, PerRank

__all__ = [
    "TENSOR_TYPES",
    "Container",
    "FlatState",
    "Skeleton",
    "Template",
    "as_tensor",
    "build",
    "build_below",
    "check_leaves",
    "check_object",
    "dcp_paths",
    "decode_object",
    "decode_skeleton",
    "encode_object",
    "encode_skeleton",
    "flatten",
    "from_tensor",
    "is_below",
    "is_immutable",
    "put_back",
    "read_template",
    "skeleton_names",
    "subtree",
    "tensor_fault",
    "unflatten_dcp",
]

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, DTensor)
_UNPLANNED_DTYPES = frozenset(dtype for name, dtype in vars(torch).items() if re.fullmatch(r"u?int[1-7]|bits\w+", name))
"""Opaque dtypes of less than a byte, or of no number at all: DCP's planner fails on them."""


def tensor_fault(value: Any) -> str | None:
    """Why no item can hold this tensor, and what to give instead; None if it can."""
    kind = type(value)
    if is_lazy(value):
        return f"a {kind.__name__} has no shape yet; run one forward pass first"
    if kind not in TENSOR_TYPES:
        return f"a {type_name(value)}, a subclass of Tensor that would come back as another type; give a plain tensor"
    tensor = local_tensor(value) if kind is DTensor else value
    if tensor.is_nested:
        return "a nested tensor; give its parts with .unbind()"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; give .to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor; give .int_repr() with its scale and zero point, or .dequantize()"
    if tensor.dtype in _UNPLANNED_DTYPES:
        return f"a tensor of {tensor.dtype}, which DCP cannot plan; give .view(torch.uint8)"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no values; materialize it first (.to_empty(device=...))"
    if kind is DTensor and any(placement.is_partial() for placement in value.placements):
        return "a DTensor with a Partial placement, whose sum no rank holds; give .redistribute() or .full_tensor()"
    if type(tensor) not in TENSOR_TYPES:
        return f"a DTensor over a {type_name(tensor)}; give a DTensor over a plain tensor"
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
_CONTAINERS_FROM = int(min(Container))
_KEY, _VALUE = itemgetter(0), itemgetter(1)
_MANY = 16
"""From so many entries on a mapping of leaves is worth a look at all their types first."""
_CODES: dict[type, int] = {
    **_LEAVES,
    **{kind: code for code, kind in MAPPINGS.items()},
    PerRank: Container.PER_RANK,
}


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


def flatten(state: object, *, rank: int, trusted: bool = False) -> FlatState:
    """Names, leaves and skeleton of ``state`` (a mapping or Stateful). Checks no tensor: :func:`check_leaves` does.

    ``trusted`` lets a namedtuple and the like without tensors pass as one object.

    Raises:
        UnsupportedLeafError: a container or key that cannot be stored, or a cycle.
        DuplicateNameError: two leaves share a name.
        EmptyStateError: no leaf.
    """
    walk = _Walk(rank=rank, trusted=trusted)
    skeleton = walk.root(state)
    check_names(walk.names, skeleton, rank=rank)
    if not walk.names:
        raise EmptyStateError("the state holds no leaf: give at least one tensor or object")
    return FlatState(walk.names, walk.values, walk.kinds, skeleton)


def read_template(state: object, *, rank: int) -> Template:
    """Like :func:`flatten`, for ``load``: Stateful values are listed, not entered.

    Raises:
        UnsupportedLeafError, DuplicateNameError, EmptyStateError: as :func:`flatten`.
    """
    stateful: list[tuple[str, Any]] = []
    walk = _Walk(rank=rank, trusted=True, stateful=stateful)
    check_names(walk.names, walk.root(state), rank=rank)
    if not walk.names and not stateful:
        raise EmptyStateError("the template holds no leaf: give the state that is to be filled")
    return Template(walk.names, walk.values, walk.kinds, stateful)


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


def put_back(state: object, objects: Mapping[str, object], *, rank: int) -> None:
    """Set the leaves named in ``objects`` in the caller's containers; a tuple or ``PerRank`` is rebuilt in its parent.

    What a Stateful value or a tensor stands in is left alone, and so is every name that ``objects`` lacks.
    """
    _replaced(state, None, objects, rank, 0)


# -- the walk ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One walk over a state; the lists grow in step."""

    rank: int
    """Rank that PerRank values are stored for."""
    trusted: bool
    """Whether odd list and tuple classes pass as objects."""
    stateful: list[tuple[str, Any]] | None = None
    """Collects Stateful values instead of entering them, if given."""
    names: list[str] = field(default_factory=list)
    """Names of the leaves so far."""
    values: list[object] = field(default_factory=list)
    kinds: list[LeafKind] = field(default_factory=list)
    entered: int = 0
    """Containers so far, each as often as it stands somewhere."""

    def root(self, state: object, depth: int = 0) -> Skeleton:
        """The skeleton of the state itself, which must be a mapping or Stateful."""
        code = _code(state, "the state", trusted=False)
        if code not in MAPPINGS and code != Container.STATEFUL:
            raise UnsupportedLeafError(f"the state is a {type_name(state)}: give a dict or an object with state_dict()")
        return self.node(state, None, depth)

    def node(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """The skeleton of ``value``, whose name is ``name`` (None: the state itself)."""
        code = _code(value, name, trusted=self.trusted)
        if code >= _CONTAINERS_FROM:
            self.entered += 1
            if depth > MAX_DEPTH or self.entered > _MAX_ENTERED:
                raise _endless(f"{name}", depth)
        if code in MAPPINGS:
            return self.mapping(value, code, name, depth)
        prefix = _prefix(name)
        if code == Container.PER_RANK:
            return code, (), (self.node(value.value, f"{prefix}rank{self.rank}", depth + 1),)
        if code == Container.STATEFUL:
            return self.state_of(value, name, depth)
        if code in (Container.LIST, Container.TUPLE):
            return code, (), tuple([self.node(item, f"{prefix}{i}", depth + 1) for i, item in enumerate(value)])
        kind = LeafKind(code)
        self.names.append(name or "")
        self.values.append(value)
        self.kinds.append(kind)
        return kind

    def mapping(self, value: Mapping[Any, object], code: int, name: str | None, depth: int) -> Skeleton:
        """The hot loop: 20,000 tensors in one dict take no call each."""
        given, items = _entries(value, name)
        if len(given) >= _MANY and (skeleton := self.leaves(given, items, code, name)) is not None:
            return skeleton
        names, values, kinds, prefix = self.names, self.values, self.kinds, _prefix(name)
        keys: list[Key] = []
        children: list[Skeleton] = []
        for key, item in zip(given, items, strict=True):
            if type(key) is str:
                text = prefix + key
                keys.append(key)
            else:
                keys.append(freeze_key(key, name or "the state"))
                text = f"{prefix}{key}"
            kind = _LEAVES.get(type(item))
            if kind is None:
                children.append(self.node(item, text, depth + 1))
            else:
                names.append(text)
                values.append(item)
                kinds.append(kind)
                children.append(kind)
        return code, tuple(keys), tuple(children)

    def leaves(self, keys: tuple[Any, ...], values: list[object], code: int, name: str | None) -> Skeleton | None:
        """A mapping from str to leaves alone, without a line of Python a leaf; None if it is none."""
        if not {*map(type, values)} <= _LEAVES.keys() or {*map(type, keys)} != {str}:
            return None
        kinds = tuple(map(_LEAVES.__getitem__, map(type, values)))
        self.names += keys if name is None else map(_prefix(name).__add__, keys)
        self.values += values
        self.kinds += kinds
        return code, keys, kinds

    def state_of(self, value: Any, name: str | None, depth: int) -> Skeleton:
        """A Stateful value: the skeleton of its ``state_dict()``, or an entry in ``stateful``."""
        if name == "":
            raise UnsupportedLeafError(f"a {type_name(value)} under the key '': give it a name")
        if self.stateful is None:
            inner = value.state_dict()
            return self.root(inner, depth + 1) if name is None else self.node(inner, name, depth + 1)
        self.stateful.append((name or "", value))
        return Container.STATEFUL, (), ()


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
        items = list(value.items())
    except RuntimeError as error:
        raise SourceChangedError(
            f"{name or 'the state'}: another thread changed this {type_name(value)} while it was read ({error}): keep "
            "the state still until save() returns"
        ) from error
    return tuple(map(_KEY, items)), list(map(_VALUE, items))


def _prefix(name: str | None) -> str:
    return "" if name is None else name + "."


def _code(value: Any, name: str | None, *, trusted: bool) -> int:
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
    if _is_stateful_type(kind):
        return Container.STATEFUL
    if isinstance(value, Mapping):
        raise UnsupportedLeafError(f"{name}: a {type_name(value)} would come back as another type; give dict(value)")
    if isinstance(value, (list, tuple)):
        return _sequence_code(value, name, trusted)
    return LeafKind.OBJECT


def _sequence_code(value: Any, name: str | None, trusted: bool) -> int:
    is_entered = _holds_leaves(value, name, 0, set())
    if type(value) not in (list, tuple) and (is_entered or not trusted):
        raise UnsupportedLeafError(
            f"{name}: a {type_name(value)} would come back as another type; give a list, a tuple, or ._asdict()"
        )
    if not is_entered:
        return LeafKind.OBJECT
    return Container.LIST if isinstance(value, list) else Container.TUPLE


def _holds_leaves(values: Any, name: str | None, depth: int, without: set[int]) -> bool:
    """Whether a list or tuple is entered: decided by the set of its types, so that 10,000 ints cost one pass in C.

    ``without``: ids of those that hold others and no leaf; one that stands in many places is looked at once.
    """
    nested = False
    for kind in set(map(type, values)) - _NO_LEAVES:
        if issubclass(kind, (torch.Tensor, PerRank, Mapping)) or _is_stateful_type(kind):
            return True
        nested = nested or issubclass(kind, (list, tuple))
    if nested and depth > MAX_DEPTH:
        raise UnsupportedLeafError(f"{name}: a list nested deeper than {MAX_DEPTH} (does it hold itself?)")
    if nested:
        for item in values:
            is_new = isinstance(item, (list, tuple)) and id(item) not in without
            if is_new and _holds_leaves(item, name, depth + 1, without):
                return True
        without.add(id(values))
    return False


def _is_stateful_type(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _replaced(value: Any, name: str | None, objects: Mapping[str, object], rank: int, depth: int) -> object:
    """``value`` itself, changed in place where it can be, or what must stand in its parent in its stead."""
    code = _code(value, name, trusted=True)
    prefix = _prefix(name)
    if code in MAPPINGS or code == Container.LIST:
        items = list(value.items()) if code in MAPPINGS else list(enumerate(value))
        for key, item in items:
            new = _replaced(item, f"{prefix}{key}", objects, rank, depth + 1)
            if new is not item:
                value[key] = new
        return value
    if code == Container.TUPLE:
        elements = [_replaced(item, f"{prefix}{i}", objects, rank, depth + 1) for i, item in enumerate(value)]
        return value if all(map(lambda a, b: a is b, elements, value)) else tuple(elements)
    if code == Container.PER_RANK:
        inner = _replaced(value.value, f"{prefix}rank{rank}", objects, rank, depth + 1)
        return value if inner is value.value else PerRank(inner)
    if name is None or code in (Container.STATEFUL, LeafKind.TENSOR):
        return value
    return objects.get(name, value)
