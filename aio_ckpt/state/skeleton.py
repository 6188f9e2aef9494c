"""Skeleton of a state: its containers, keys and order without the leaves; and its bytes.

A skeleton consists of tuples and plain values, so it compares and hashes by value. Each rank's manifest stores it as
msgpack. DCP's own flattening keeps no skeleton: key 0 comes back as ``'0'``, and ``{}`` does not come back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import IntEnum
from types import NoneType
from typing import Any, TypeAlias

import msgspec

from aio_ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.leaves.keys import Key, freeze_key, thaw_key
from aio_ckpt.leaves.objects import MAX_DEPTH
from aio_ckpt.leaves.values import LeafKind


class Container(IntEnum):
    """Containers of a skeleton. The numbers are part of the on-disk skeleton and differ from those of ``LeafKind``."""

    DICT = 16
    ORDERED_DICT = 17
    COUNTER = 18
    """Type of the milestones of torch's schedulers."""
    LIST = 19
    TUPLE = 20
    PER_RANK = 21
    """One child, whose name ends in ``.rank{rank}``."""
    STATEFUL = 22
    """Never stored: a skeleton has its ``state_dict()`` instead."""
    FIELDS = 23
    """A dataclass or namespace, taken apart into its attributes."""
    REFERENCE = 24
    """An enclosing container, by its number in the note ``same``. It has no children."""
    TENSOR = 25
    """A compound tensor, taken apart into its parts. It has no number."""


Skeleton: TypeAlias = (
    "int | tuple[int, tuple[Key, ...], tuple[Skeleton, ...]] | tuple[int, tuple[Key, ...], tuple[Skeleton, ...], Notes]"
)
"""A leaf code, or a tuple of ``Container``, keys (empty but for a keyed container), children, and notes if any.

Two skeletons are equal if and only if types, keys and order are. Containers are numbered in the order of the walk, each
before its children.
"""

TENSOR_WITH_GRAD = 4
"""Leaf code of a leaf tensor that requires gradients. Its ``LeafKind`` is TENSOR."""

MAPPINGS: dict[int, type[dict[Any, Any]]] = {
    Container.DICT: dict,
    Container.ORDERED_DICT: OrderedDict,
    Container.COUNTER: Counter,
}
"""Mappings whose exact type the code tells."""

INDEXED: frozenset[int] = frozenset({Container.LIST, Container.TUPLE})
"""Containers whose children are named by their index."""
KEYED: frozenset[int] = frozenset({*MAPPINGS, Container.FIELDS, Container.TENSOR})
"""Containers whose children are named by a key each."""
_NAMED = (Container.FIELDS, Container.TENSOR)
"""Containers whose keys are all str."""
_LEAF_CODES = frozenset({*map(int, LeafKind), TENSOR_WITH_GRAD})

_NOTE_TYPES: dict[str, tuple[type, ...]] = {
    "metadata": (bytes,),
    "type": (str,),
    "maxlen": (int,),
    "factory": (str, bytes),
    "same": (int,),
    "layout": (str,),
    "dtype": (str,),
    "context": (bytes,),
    "attributes": (bytes,),
    "coalesced": (int,),
    "grad": (int,),
}
"""Types of the values of a note, by its name."""

_NUMBERS = frozenset({"shape", "stride"})
"""Names of the notes whose values are lists of whole numbers."""


_CODE = msgspec.msgpack.Decoder(int)
_FIELDS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_CHILDREN = msgspec.msgpack.Decoder(list[int | list[msgspec.Raw]])


def encode_skeleton(skeleton: Skeleton) -> bytes:
    """Return the skeleton as msgpack.

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
    """Return whether an encoded skeleton may have a compound tensor: an array of four that begins with its code."""
    return bytes((0x94, Container.TENSOR)) in data


def has_empty_part(data: bytes) -> bool:
    """Return whether the state, or the value of one of its first keys, is an empty mapping, by the encoded skeleton.

    Only these are decoded: all of a large skeleton takes tenths of a second. False for bytes that are no skeleton.
    """
    try:
        root = _FIELDS.decode(data)
        children = _CHILDREN.decode(root[2])
        return any(isinstance(node, list) and _is_empty_mapping(node) for node in (root, *children))
    except (msgspec.MsgspecError, LookupError, RecursionError):  # decode_skeleton tells the damage
        return False


def _is_empty_mapping(node: list[msgspec.Raw]) -> bool:
    return _CODE.decode(node[0]) in MAPPINGS and not _FIELDS.decode(node[1])


def decode_skeleton(data: bytes, *, name: str) -> Skeleton:
    """Return the skeleton that was encoded; every number and key is checked.

    Raises:
        CorruptCheckpointError: names ``name``, the file that held it.
    """
    try:
        skeleton = _checked(msgspec.msgpack.decode(data), 0)
        if isinstance(skeleton, int):
            raise ValueError("the state is a leaf")  # noqa: TRY004, TRY301 - wrapped below like every other fault
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{name}: the skeleton of the state is damaged: {exc}") from exc
    return skeleton


def _checked(raw: Any, depth: int) -> Skeleton:
    """Return a decoded node as a skeleton.

    Raises:
        ValueError, TypeError, LookupError: no skeleton has this node.
    """
    if type(raw) is int and raw in _LEAF_CODES:
        return raw
    code, raw_keys, raw_children, *rest = raw
    keys = tuple([key if type(key) is str else _checked_key(key) for key in raw_keys])
    children = tuple([_checked(child, depth + 1) for child in raw_children])
    wanted = len(children) if code in KEYED else 0
    is_known = code in KEYED or code in INDEXED or code in (Container.PER_RANK, Container.REFERENCE)
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


def _checked_notes(raw: Any) -> Notes:
    """Return the notes, each of an allowed type. Notes of unknown names are kept and have no effect."""
    notes = tuple((str(name), _numbers(value) if name in _NUMBERS else value) for name, value in raw)
    for name, value in notes:
        if name not in _NUMBERS and type(value) not in _NOTE_TYPES.get(name, (int, str, bytes, NoneType)):
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
    return freeze_key(thaw_key(raw), "key")
