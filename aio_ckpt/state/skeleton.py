"""The skeleton of a state: its containers, keys and order without the leaves; names and values by it.

A skeleton is built of tuples and plain values only, so that it compares and hashes by value, and is stored as msgpack
in each rank's manifest. DCP's own flattening loses all of this: key 0 comes back as ``'0'``, and ``{}`` does not come
back.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec
import torch

from aio_ckpt.errors import CorruptCheckpointError, MissingNameError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.state.compound import CompoundTensor, plain_form, put_together, put_together_like
from aio_ckpt.state.containers import Form, Notes, Opened, decode_metadata, open_container
from aio_ckpt.state.harmless import harmless_type
from aio_ckpt.state.objects import MAX_DEPTH, check_key, decode_object, encode_object, from_tensor
from aio_ckpt.state.values import LeafKind

__all__ = [
    "MAPPINGS",
    "TENSOR_WITH_GRAD",
    "Container",
    "Key",
    "NamedKeys",
    "Skeleton",
    "build",
    "build_below",
    "compound_keys",
    "compound_notes",
    "copy_names",
    "dcp_paths",
    "decode_skeleton",
    "encode_skeleton",
    "freeze_key",
    "is_below",
    "key_text",
    "leaf_keys",
    "may_hold_compounds",
    "skeleton_names",
    "subtree",
    "unflatten_dcp",
    "unique_names",
    "without_copies",
]


class Container(IntEnum):
    """Containers of a skeleton. The numbers are part of the on-disk skeleton, disjoint from ``LeafKind``."""

    DICT = 16
    ORDERED_DICT = 17
    COUNTER = 18
    """Schedulers of torch keep their milestones in one."""
    LIST = 19
    TUPLE = 20
    PER_RANK = 21
    """One child, whose name ends in ``.rank{rank}``."""
    STATEFUL = 22
    """Never stored: its ``state_dict()`` stands in its place."""
    FIELDS = 23
    """A dataclass or namespace, by its attributes."""
    REFERENCE = 24
    """The container around it whose number its note ``same`` gives; has no children."""
    TENSOR = 25
    """A compound tensor, by its parts; it has no number."""


Key: TypeAlias = "str | tuple[str, Any]"
"""A mapping's key: a str as itself, others as (type tag, text), so that 1, True and 1.0 never compare equal."""

Skeleton: TypeAlias = (
    "int | tuple[int, tuple[Key, ...], tuple[Skeleton, ...]] | tuple[int, tuple[Key, ...], tuple[Skeleton, ...], Notes]"
)
"""A leaf code, or (``Container``, keys (of a mapping), children), and notes if there are any. Equal if and only if
types, keys, order are. Containers are numbered in the order of the walk, each before its children."""

TENSOR_WITH_GRAD = 4
"""Leaf code of a tensor that requires gradients; its ``LeafKind`` is TENSOR."""

MAPPINGS: dict[int, type[dict[Any, Any]]] = {
    Container.DICT: dict,
    Container.ORDERED_DICT: OrderedDict,
    Container.COUNTER: Counter,
}
"""Mappings that are kept as what they are."""

_INDEXED: frozenset[int] = frozenset({Container.LIST, Container.TUPLE})
_KEYED: frozenset[int] = frozenset({*MAPPINGS, Container.FIELDS, Container.TENSOR})
_NAMED = (Container.FIELDS, Container.TENSOR)
"""Containers whose keys are names."""
_FORMS: dict[int, Form] = {
    **dict.fromkeys(map(int, MAPPINGS), "mapping"),
    Container.FIELDS: "fields",
    Container.TUPLE: "tuple",
    Container.LIST: "list",
}
"""How the type of a container must be taken apart to fit its code."""
_MISSING = object()
_LEAF_CODES = frozenset({*map(int, LeafKind), TENSOR_WITH_GRAD})
_HELD_KEYS = frozenset("ot")
"""Tags of keys that hold others."""
_LEAF_TYPES = {int, LeafKind}
_KEY_BITS = 2040
"""What ``weights_only`` reads."""
_INDEX_SLACK = 1000
"""A list index of foreign metadata may exceed its number of leaves by this factor (empty containers have none)."""


# -- keys -------------------------------------------------------------------------------------------


def freeze_key(key: object, name: str) -> Key:
    """A mapping's key as it stands in a skeleton.

    Raises:
        UnsupportedLeafError: a tensor, or a whole number that no reader takes.
        UnsafeObjectError: a key that pickle cannot store.
    """
    if type(key) is str:
        return key
    frozen = _simple_key(key, name)
    if frozen is not None:
        return frozen
    if isinstance(key, torch.Tensor):
        raise UnsupportedLeafError(f"{name}: a tensor as a key, which has no name: give a str or a number")
    if harmless_type(key) is not None:
        return _object_key(key)
    return "o", (_text_of(key, name), encode_object(f"{name}: a key of type {type(key).__qualname__}", key))


def _simple_key(key: Any, name: str) -> Key | None:
    """A key that needs no object; None if it is another one."""
    kind = type(key)
    if kind is str:
        return str(key)
    if kind is int or kind is bool:
        if key.bit_length() > _KEY_BITS:
            raise UnsupportedLeafError(
                f"{name}: a whole number of {key.bit_length()} bits as a key, at most {_KEY_BITS}"
            )
        return ("b" if kind is bool else "i", str(int(key)))
    if kind is float:
        return ("f", key.hex())
    if key is None:
        return ("n", "")
    if kind is complex:
        return ("c", (key.real.hex(), key.imag.hex()))
    if kind is bytes:
        return ("y", key.hex())
    if kind is tuple:
        parts = [_simple_key(part, name) for part in key]
        return None if None in parts else ("t", tuple(parts))
    return None


@functools.lru_cache(maxsize=4096, typed=True)
def _object_key(key: Any) -> Key:
    return "o", (str(key), encode_object("a key", key))


def _text_of(key: object, name: str) -> str:
    try:
        return str(key)
    except Exception as error:  # whatever a type's own __str__ raises
        raise UnsupportedLeafError(f"{name}: a key of type {type(key).__qualname__} without a text: {error}") from error


def key_text(key: Key) -> str:
    """The part of a name that a key makes: ``str(key)``."""
    if isinstance(key, str):
        return key
    return str(key[1][0]) if key[0] == "o" else str(_thaw_key(key))


def _thaw_key(key: Any, *, trusted: bool = False) -> Any:
    """Inverse of :func:`freeze_key`; ValueError, TypeError or KeyError if ``key`` is none of its values.

    Raises:
        UnsafeObjectError: only running code reads the key.
    """
    if isinstance(key, str):
        return key
    tag, text = key
    if tag == "o":
        return decode_object(text[1], name=f"the key {text[0]}", trusted=trusted)
    return _THAW[tag](text)


_THAW: dict[str, Any] = {
    "i": lambda text: int(text),
    "b": lambda text: {"0": False, "1": True}[text],
    "f": lambda text: float.fromhex(text),
    "n": lambda text: {"": None}[text],
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "y": lambda text: bytes.fromhex(text),
    "t": lambda parts: tuple(map(_thaw_key, parts)),
}


# -- names ------------------------------------------------------------------------------------------


def is_below(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or lies below it; everything lies below ``""``, the state itself."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def unique_names(names: list[str]) -> list[str]:
    """``names``, where the second of two that are equal is marked: ``0`` and ``0~2``."""
    taken = set(names)
    if len(taken) == len(names):
        return names
    seen: set[str] = set()
    unique: list[str] = []
    for name in names:
        marked, number = name, 2
        while marked in seen or (marked is not name and marked in taken):
            marked, number = f"{name}~{number}", number + 1
        seen.add(marked)
        unique.append(marked)
    return unique


def skeleton_names(skeleton: Skeleton, *, rank: int) -> list[str]:
    """Names of the leaves, in the order of ``flatten``."""
    return unique_names([name for name, _ in _leaf_paths(skeleton, "", (), (rank,))])


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKeys:
    """A leaf or compound tensor by the keys that lead to it."""

    keys: tuple[Key, ...]
    """A key for each container; the index of a list or tuple counts as an int."""
    text: str
    """They as text, joined by dots."""
    name: str
    """The same, marked where another one of the state has it."""


def leaf_keys(skeleton: Skeleton, *, rank: int) -> list[NamedKeys]:
    """Keys of the leaves, in the order of ``flatten``."""
    return _with_names([(keys, text) for keys, text, node in _by_keys(skeleton, (), "", rank) if isinstance(node, int)])


def compound_keys(skeleton: Skeleton, *, rank: int) -> list[NamedKeys]:
    """Keys of the compound tensors, in the order of :func:`compound_notes`."""
    found = _by_keys(skeleton, (), "", rank)
    return _with_names([(keys, text) for keys, text, node in found if not isinstance(node, int)])


def _with_names(found: list[tuple[tuple[Key, ...], str]]) -> list[NamedKeys]:
    names = unique_names([text for _, text in found])
    return [NamedKeys(keys=keys, text=text, name=name) for (keys, text), name in zip(found, names, strict=True)]


def _by_keys(
    node: Any, keys: tuple[Key, ...], prefix: str, rank: int
) -> Iterator[tuple[tuple[Key, ...], str, Skeleton]]:
    """(keys, text, node) of every leaf and compound tensor."""
    if isinstance(node, int) or node[0] == Container.TENSOR:
        yield keys, prefix[:-1], node
    if isinstance(node, int):
        return
    for part, text, child in _children(node, rank):
        key = ("i", text) if node[0] in _INDEXED else part
        yield from _by_keys(child, (*keys, key), f"{prefix}{text}.", rank)


def dcp_paths(skeleton: Skeleton, *, rank: int, others: Sequence[int] = ()) -> dict[str, tuple[str | int, ...]]:
    """Name -> path as DCP's ``planner_data`` has it: mapping keys as str, list and tuple indices as int.

    ``others``: ranks with the same skeleton, whose PerRank values are named too.
    """
    found = list(_leaf_paths(skeleton, "", (), (rank, *others)))
    copies = dict(_copy_paths(skeleton, "", (), (rank, *others)))
    paths = dict(found)
    if len(paths) == len(found):
        return paths | copies
    paths = {}
    for number in (rank, *others):  # names are marked by what one rank has
        own = list(_leaf_paths(skeleton, "", (), (number,)))
        for marked, (name, path) in zip(unique_names([name for name, _ in own]), own, strict=True):
            paths[marked] = path if marked == name else (*path[:-1], f"{path[-1]}{marked.removeprefix(name)}")
    return paths | copies


def copy_names(skeleton: Skeleton, *, ranks: Sequence[int]) -> set[str]:
    """Names of the containers of which a second item is stored, as stock DCP stores them."""
    return {name for name, _ in _copy_paths(skeleton, "", (), tuple(ranks))}


def without_copies(skeleton: Skeleton, names: Collection[str], *, rank: int) -> Skeleton:
    """The skeleton, where no second item is noted of the containers of these names."""
    return _without_copies(skeleton, "", frozenset(names), rank)


def _without_copies(node: Any, prefix: str, names: frozenset[str], rank: int) -> Skeleton:
    if isinstance(node, int):
        return node
    below = [_without_copies(child, f"{prefix}{text}.", names, rank) for _, text, child in _children(node, rank)]
    notes = tuple(note for note in node[3] if note[0] != "copy" or prefix[:-1] not in names) if len(node) > 3 else ()
    return (*node[:2], tuple(below), notes) if notes else (*node[:2], tuple(below))


def compound_notes(skeleton: Skeleton, *, rank: int) -> dict[str, Notes]:
    """Notes of every compound tensor of a rank, by its name."""
    found = list(_compounds(skeleton, "", rank))
    return dict(zip(unique_names([name for name, _ in found]), [notes for _, notes in found], strict=True))


def _compounds(node: Any, prefix: str, rank: int) -> Iterator[tuple[str, Notes]]:
    if isinstance(node, int):
        return
    if node[0] == Container.TENSOR:
        yield prefix[:-1], node[3]
    elif set(map(type, node[2])) <= _LEAF_TYPES:
        return
    for _, text, child in _children(node, rank):
        yield from _compounds(child, f"{prefix}{text}.", rank)


def _copy_paths(node: Skeleton, prefix: str, path: _Path, ranks: tuple[int, ...]) -> Iterator[tuple[str, _Path]]:
    """(name, path) of every container with such an item."""
    if isinstance(node, int):
        return
    if len(node) > 3 and ("copy", 1) in node[3]:
        yield prefix[:-1], path
        return
    if set(map(type, node[2])) <= _LEAF_TYPES:
        return
    is_own = node[0] == Container.PER_RANK
    for rank in ranks if is_own else ranks[:1]:
        below = (rank,) if is_own else ranks
        for part, text, child in _children(node, rank):
            if not isinstance(child, int):
                step = part if node[0] in _INDEXED else text
                yield from _copy_paths(child, f"{prefix}{text}.", (*path, step), below)


_Path: TypeAlias = "tuple[str | int, ...]"


def _leaf_paths(node: Skeleton, prefix: str, path: _Path, ranks: tuple[int, ...]) -> Iterator[tuple[str, _Path]]:
    """(name, path) of every leaf of these ranks."""
    if isinstance(node, int):
        yield prefix[:-1], path
        return
    is_own = node[0] == Container.PER_RANK
    for rank in ranks if is_own else ranks[:1]:
        below = (rank,) if is_own else ranks
        for part, text, child in _children(node, rank):
            step = part if node[0] in _INDEXED else text
            yield from _leaf_paths(child, f"{prefix}{text}.", (*path, step), below)


def _children(node: Any, rank: int) -> Iterator[tuple[Any, str, Skeleton]]:
    """(key as it is stored or index, the same as a part of the name, child)."""
    code, keys, children = node[:3]
    if code in _KEYED:
        for key, child in zip(keys, children, strict=True):
            yield key, key_text(key), child
    elif code == Container.PER_RANK:
        yield f"rank{rank}", f"rank{rank}", children[0]
    else:
        for index, child in enumerate(children):
            yield index, str(index), child


# -- bytes ------------------------------------------------------------------------------------------


def encode_skeleton(skeleton: Skeleton) -> bytes:
    """msgpack.

    Raises:
        UnsupportedLeafError: a key has a lone surrogate.
    """
    try:
        return msgspec.msgpack.encode(skeleton)
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            f"the key {error.object!r} has a lone surrogate, which no UTF-8 file holds; rename it"
        ) from error


def may_hold_compounds(data: bytes) -> bool:
    """Whether an encoded skeleton may have a node of a compound tensor: an array of four that begins with its code."""
    return bytes((0x94, Container.TENSOR)) in data


def decode_skeleton(data: bytes, *, name: str) -> Skeleton:
    """Inverse of :func:`encode_skeleton`; every number and key is checked.

    Raises:
        CorruptCheckpointError: names ``name``, the file that held it.
    """
    try:
        skeleton = _checked(msgspec.msgpack.decode(data), 0)
        if isinstance(skeleton, int):
            raise ValueError("the state is a leaf")  # noqa: TRY004, TRY301 - wrapped below like every other fault
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{name}: the skeleton of the state is damaged: {exc}") from exc
    return skeleton


def _checked(raw: Any, depth: int) -> Skeleton:
    if type(raw) is int and raw in _LEAF_CODES:
        return raw
    code, raw_keys, raw_children, *rest = raw
    keys = tuple(map(_checked_key, raw_keys))
    children = tuple(_checked(child, depth + 1) for child in raw_children)
    wanted = len(children) if code in _KEYED else 0
    is_known = code in _KEYED or code in _INDEXED or code in (Container.PER_RANK, Container.REFERENCE)
    if not is_known or len(keys) != wanted or len(set(keys)) != wanted or depth > MAX_DEPTH:
        raise ValueError(f"container {code!r} with {len(keys)} keys and {len(children)} children")
    if len(children) != {Container.PER_RANK: 1, Container.REFERENCE: 0}.get(code, len(children)):
        raise ValueError(f"a container {code} with {len(children)} children")
    if code in _NAMED and not all(type(key) is str for key in keys):
        raise ValueError("an attribute whose name is no text")
    notes = _checked_notes(rest[0]) if rest else ()
    if code == Container.REFERENCE and "same" not in dict(notes):
        raise ValueError("a reference to nothing")
    if code == Container.TENSOR and not (children and notes):
        raise ValueError("a tensor of no parts")
    return (int(code), keys, children, notes) if notes else (int(code), keys, children)


_NOTE_TYPES: dict[str, tuple[type, ...]] = {
    "metadata": (bytes,),
    "type": (str,),
    "maxlen": (int,),
    "factory": (str, bytes),
    "same": (int,),
    "copy": (int,),
    "layout": (str,),
    "qscheme": (str,),
    "axis": (int,),
    "dtype": (str,),
    "context": (bytes,),
    "attributes": (bytes,),
    "coalesced": (int,),
    "grad": (int,),
}


_NUMBERS = frozenset({"shape", "stride"})
"""Notes that are lists of whole numbers."""


def _checked_notes(raw: Any) -> Notes:
    """Notes that are not known here are kept, and mean nothing."""
    notes = tuple((str(name), _numbers(value) if name in _NUMBERS else value) for name, value in raw)
    for name, value in notes:
        if name in _NOTE_TYPES and type(value) not in _NOTE_TYPES[name]:
            raise ValueError(f"a note {name!r} of type {type(value).__name__}")
        if type(value) not in (int, str, bytes, type(None)) and name not in _NUMBERS:
            raise ValueError(f"a note {name!r} of type {type(value).__name__}")
    return notes


def _numbers(raw: Any) -> tuple[int, ...]:
    if type(raw) is not list or not all(type(number) is int for number in raw):
        raise ValueError("a list in a note that is none of whole numbers")
    return tuple(raw)


def _checked_key(raw: Any) -> Key:
    if isinstance(raw, list) and len(raw) == 2 and raw[0] == "o":
        text, data = raw[1]
        if type(text) is not str or type(data) is not bytes:
            raise ValueError("an object as a key that is none")
        return "o", (text, data)
    return freeze_key(_thaw_key(raw), "key")


# -- values -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Rebuilds containers around leaves."""

    leaves: Mapping[str, object]
    """Value of each leaf, by its name."""
    rank: int
    """Rank whose PerRank values are built."""
    only: frozenset[str] | None
    """Names to keep, with all below; None keeps all."""
    trusted: bool
    """Whether types and keys may be read by running code."""
    marked: dict[int, str]
    """Names of leaves that are not their path, by the number of the leaf."""
    own: Mapping[str, CompoundTensor] = field(default_factory=dict)
    """Compound tensors of the value that is to take what is built: their types are the caller's."""
    number: int = 0
    """Of the next container."""
    leaf_number: int = 0
    """Of the next leaf."""
    made: dict[int, Any] = field(default_factory=dict)
    """Containers by their number."""
    with_grad: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that require gradients, by the id of the leaf that was given."""
    compounds: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    """Compound tensors by their notes and the ids of their parts: tied ones are one tensor."""
    absent: list[str] = field(default_factory=list)
    """Leaves that were wanted and not given."""
    plain: list[str] = field(default_factory=list)
    """Containers that are of another type than they were."""
    untrusted: dict[str, str] | None = None
    """Collects what is left out as only running code reads it, with the reason, if given."""

    def value(self, node: Skeleton, prefix: str, is_kept: bool) -> Any:
        """The value at ``node``, or ``_MISSING`` if it was not selected; its name is ``prefix`` less the last dot."""
        if isinstance(node, int):
            return self.leaf(prefix[:-1], node, is_kept)
        is_kept = is_kept or self.only is None or (prefix != "" and prefix[:-1] in self.only)
        if len(node) == 3 and node[0] in MAPPINGS:
            return self.plain_mapping(node, prefix, is_kept)
        if node[0] == Container.TENSOR:
            return self.compound(node, prefix, is_kept)
        number, notes = self.number, dict(node[3]) if len(node) > 3 else _NO_NOTES
        self.number += 1
        if node[0] == Container.REFERENCE:
            return self.made.get(notes["same"], _MISSING) if is_kept else _MISSING
        if "same" in notes and self.only is None and notes["same"] in self.made:
            containers, leaves = _sizes(node)
            self.number += containers - 1
            self.leaf_number += leaves
            return self.made[notes["same"]]
        number = notes.get("same", number)
        opened = self.opened(node[0], notes, prefix[:-1]) if "type" in notes else None
        parts: Any = MAPPINGS.get(node[0], dict)() if node[0] in _KEYED else []
        self.made[number] = parts if opened is None or opened.value is None else opened.value
        is_any = False
        for part, text, child in _children(node, self.rank):
            item = self.value(child, f"{prefix}{text}.", is_kept)
            is_any = is_any or item is not _MISSING
            if node[0] not in _KEYED:
                parts.append(None if item is _MISSING else item)
            elif item is not _MISSING:
                parts[part if type(part) is str else self.key(part)] = item
        if not is_kept and not is_any:
            return _MISSING
        self.made[number] = made = self.finished(opened, parts, node[0], notes, prefix[:-1])
        return made

    def plain_mapping(self, node: Any, prefix: str, is_kept: bool) -> Any:
        """What most containers are: the state of a parameter, of which there are thousands."""
        made = self.made[self.number] = MAPPINGS[node[0]]()
        self.number += 1
        for key, text, child in _children(node, self.rank):
            item = self.value(child, f"{prefix}{text}.", is_kept)
            if item is not _MISSING:
                made[key if type(key) is str else self.key(key)] = item
        return made if is_kept or made else _MISSING

    def compound(self, node: Any, prefix: str, is_kept: bool) -> Any:
        """A compound tensor, or a dict of its parts where not all of them were selected."""
        items = [
            (key, self.value(child, f"{prefix}{text}.", is_kept)) for key, text, child in _children(node, self.rank)
        ]
        parts = {key: item for key, item in items if item is not _MISSING}
        if len(parts) < len(items):
            return parts or _MISSING
        key = (node[3], *map(id, parts.values()))
        if key not in self.compounds:
            made = self.put_together(dict(node[3]), parts, prefix[:-1])
            if made is None:
                self.note_plain(dict(node[3]), prefix[:-1])
                return plain_form(parts)
            self.compounds[key] = made
        return self.compounds[key]

    def put_together(self, notes: Mapping[str, Any], parts: Mapping[str, Any], name: str) -> torch.Tensor | None:
        if name in self.own and "type" in notes:
            return put_together_like(self.own[name], parts)
        try:
            return put_together(notes, parts, trusted=self.trusted)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{name!r}: its parts are of no tensor: {error}") from error

    def opened(self, code: int, notes: Mapping[str, Any], name: str) -> Opened | None:
        """An empty container of the type that is noted; None if it comes back plain."""
        try:
            found = open_container(notes, form=_FORMS.get(code), trusted=self.trusted)
        except Exception:  # noqa: BLE001 - whatever a type's own __new__ raises
            found = None
        if found is None:
            self.note_plain(notes, name)
        return found

    def note_plain(self, notes: Mapping[str, Any], name: str) -> None:
        self.plain.append(f"{name or 'the state'} ({str(notes['type']).replace(':', '.')})")

    def finished(self, opened: Opened | None, parts: Any, code: int, notes: Mapping[str, Any], name: str) -> Any:
        """The container, with the versions that a ``state_dict()`` carries."""
        made: Any = tuple(parts) if code == Container.TUPLE else parts[0] if code == Container.PER_RANK else parts
        if opened is not None:
            try:
                made = opened.finish(parts)
            except Exception:  # noqa: BLE001 - whatever a type's own code raises
                self.note_plain(notes, name)
        if "metadata" in notes and isinstance(made, OrderedDict):
            try:
                made._metadata = decode_metadata(notes["metadata"], name=name, trusted=self.trusted)  # type: ignore[attr-defined]
            except UnsafeObjectError as error:
                if self.untrusted is None:
                    raise
                self.untrusted[f"{name}._metadata"] = str(error)
        return made

    def key(self, key: Key) -> Any:
        """A mapping's key; its text where only running code reads it."""
        if key[0] not in _HELD_KEYS:
            return _thaw_key(key)
        try:
            thawed = _thaw_key(key, trusted=self.trusted)
            check_key(thawed)
        except UnsafeObjectError as error:
            self.plain.append(f"the key {key_text(key)} ({error})")
            return key_text(key)
        except (TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"the key {key_text(key)}: {error}") from error
        return thawed

    def leaf(self, name: str, code: int, is_kept: bool) -> object:
        name = self.marked.get(self.leaf_number, name)
        self.leaf_number += 1
        if not (is_kept or self.only is None or name in self.only):
            return _MISSING
        value = self.leaves.get(name, _MISSING)
        if value is _MISSING:
            self.absent.append(name)
        elif isinstance(value, torch.Tensor):
            if code == TENSOR_WITH_GRAD:
                return self.tensor_with_grad(value)
            return from_tensor(value, LeafKind(code))
        return value

    def tensor_with_grad(self, value: torch.Tensor) -> torch.Tensor:
        """Over the same memory, which another name may have without gradients; tied names share a tensor."""
        if not (value.is_floating_point() or value.is_complex()):
            return value
        if id(value) not in self.with_grad:
            self.with_grad[id(value)] = value.detach().requires_grad_()
        return self.with_grad[id(value)]


_NO_NOTES: dict[str, Any] = {}


def _count(node: Any) -> int:
    """Numbers that a node takes, less those below it."""
    return int(node[0] != Container.TENSOR)


def _sizes(node: Skeleton) -> tuple[int, int]:
    """Containers and leaves of a skeleton, itself among them."""
    if isinstance(node, int):
        return 0, 1
    below = [_sizes(child) for child in node[2]]
    return _count(node) + sum(containers for containers, _ in below), sum(leaves for _, leaves in below)


@functools.lru_cache(maxsize=2)
def _marked(skeleton: Skeleton, rank: int) -> dict[int, str]:
    """Names of leaves that are not their path, by the number of the leaf."""
    names = [name for name, _ in _leaf_paths(skeleton, "", (), (rank,))]
    unique = unique_names(names)
    if unique is names:
        return {}
    return {number: new for number, (old, new) in enumerate(zip(names, unique, strict=True)) if old != new}


def build(
    skeleton: Skeleton,
    leaves: Mapping[str, object],
    *,
    rank: int,
    only: Collection[str] | None = None,
    trusted: bool = False,
    plain: list[str] | None = None,
    untrusted: dict[str, str] | None = None,
) -> object:
    """The nested state from leaf values by name; arrays and numpy scalars arrive as tensors. PerRank is unwrapped.

    With ``only``, what is neither one of these names nor below one is left out; list and tuple elements become None.
    ``plain`` gets a line for each container that is of another type than it was. ``untrusted``, if given, gets the
    versions of modules that only running code reads, with the reason, and they are left out.

    Raises:
        MissingNameError: ``only`` selects nothing, or a selected leaf is not in ``leaves``.
    """
    kept = None if only is None else frozenset(only)
    builder = _Builder(
        leaves=leaves,
        rank=rank,
        only=kept,
        trusted=trusted,
        marked=_marked(skeleton, rank),
        untrusted=untrusted,
    )
    value: object = builder.value(skeleton, "", False)
    if value is _MISSING:
        raise MissingNameError(f"the checkpoint holds nothing named or below {sorted(only or ())[:5]}")
    if builder.absent:
        raise MissingNameError(f"the checkpoint lacks {len(builder.absent)} leaves of its state: {builder.absent[:5]}")
    if plain is not None:
        plain += builder.plain
    return value


def subtree(skeleton: Skeleton, name: str, *, rank: int) -> Skeleton:
    """The skeleton of the value called ``name``; ``""`` is the state itself.

    Raises:
        MissingNameError: nothing is called so.
    """
    return _found(skeleton, name, rank)[0]


def _found(skeleton: Skeleton, name: str, rank: int) -> tuple[Skeleton, int, int]:
    """The skeleton of the value called ``name``, its number and that of its first leaf."""
    found = (skeleton, 0, 0) if not name else _find(skeleton, "", name, rank, (0, 0))
    if found is None:
        raise MissingNameError(f"the checkpoint holds nothing named {name!r}")
    return found


def _find(
    node: Skeleton, prefix: str, wanted: str, rank: int, numbers: tuple[int, int]
) -> tuple[Skeleton, int, int] | None:
    if isinstance(node, int):
        return None
    containers, leaves = numbers[0] + _count(node), numbers[1]
    for _, text, child in _children(node, rank):
        name = prefix + text
        if name == wanted:
            return child, containers, leaves
        below = wanted.startswith(f"{name}.")
        found = _find(child, f"{name}.", wanted, rank, (containers, leaves)) if below else None
        if found is not None:
            return found
        sizes = _sizes(child)
        containers, leaves = containers + sizes[0], leaves + sizes[1]
    return None


def build_below(
    skeleton: Skeleton,
    name: str,
    leaves: Mapping[str, object],
    *,
    rank: int,
    trusted: bool = False,
    own: Mapping[str, CompoundTensor] | None = None,
    untrusted: dict[str, str] | None = None,
) -> object:
    """The value called ``name`` (a module's or optimizer's ``state_dict()``), from leaves by their full names.

    ``own``: compound tensors of the value that takes it, by full name. Their types are made without trust.
    ``untrusted``: as in :func:`build`.

    Raises:
        MissingNameError: nothing is called so, or one of its leaves is not in ``leaves``.
    """
    node, number, leaf_number = _found(skeleton, name, rank)
    builder = _Builder(
        leaves=leaves,
        rank=rank,
        only=None,
        trusted=trusted,
        marked=_marked(skeleton, rank),
        own=own or {},
        untrusted=untrusted,
        number=number,
        leaf_number=leaf_number,
    )
    value: object = builder.value(node, f"{name}." if name else "", True)
    if builder.absent:
        raise MissingNameError(f"the checkpoint lacks {len(builder.absent)} leaves of {name!r}: {builder.absent[:5]}")
    return value


def unflatten_dcp(paths: Mapping[str, tuple[str | int, ...]] | None, leaves: Mapping[str, object]) -> dict[str, object]:
    """The nested state of a plain DCP checkpoint; a leaf without a path stands under its name.

    Int parts become list indices, and what a list lacks None: DCP stores no empty container.

    Raises:
        CorruptCheckpointError: paths that contradict each other.
    """
    root: dict[Any, Any] = {}
    branches = {id(root)}
    for name, leaf in leaves.items():
        path = (paths or {}).get(name) or (name,)
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path):
            raise CorruptCheckpointError(f"{name}: the metadata gives this leaf the path {path!r}")
        node = root
        for part in path[:-1]:
            if part not in node:
                node[part] = {}
                branches.add(id(node[part]))
            node = node[part]
            if id(node) not in branches:
                raise CorruptCheckpointError(f"{name}: the metadata puts this leaf below another leaf")
        if path[-1] in node:
            raise CorruptCheckpointError(f"{name}: the metadata puts two values at {path!r}")
        node[path[-1]] = leaf
    listed: dict[str, object] = _with_lists(root, branches, is_root=True)
    return listed


def _with_lists(node: Any, branches: set[int], *, is_root: bool = False) -> Any:
    """``node`` with every branch whose keys are all int made a list."""
    if id(node) not in branches:
        return node
    items = {key: _with_lists(item, branches) for key, item in node.items()}
    if is_root or not all(type(key) is int for key in items):
        return items
    size = max(items) + 1
    if min(items) < 0 or size > _INDEX_SLACK * (len(items) + 1):
        raise CorruptCheckpointError(f"the metadata places a list element at index {size - 1}")
    return [items.get(index) for index in range(size)]
