"""Compound tensors, whose values stand in other tensors, their parts: taken apart, and put together again.

The parts are leaves, named below the tensor. A skeleton notes the rest of the tensor. Putting a sparse tensor together
runs no code of its own. A subclass of Tensor is made if the user has allowed its type by
``torch.serialization.add_safe_globals``, or if the checkpoint is trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import (
    AsyncCollectiveTensor,
    ShardedTensor,
    bare_tensor,
    mark_coalesced,
    sparse_coo_parts,
)
from aio_ckpt.errors import AioCkptError
from aio_ckpt.leaves.containers import Notes, named_type
from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES, has_own_memory

_WHOLE_TYPES = PLAIN_TYPES | {DTensor}
_COO = "sparse_coo"
_COMPARED = ("layout", "shape", "stride", "dtype")
"""Notes that must be equal in the template and in the checkpoint."""
_DATA = "data"
"""Name of the one part of a subclass that keeps its values in its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompoundTensor:
    """A tensor and the parts that it was taken apart into."""

    tensor: torch.Tensor
    notes: Notes
    """Everything about the tensor but its parts."""
    parts: dict[str, torch.Tensor]
    """Tensors that hold its values, in its own memory. They may be compound, too."""


# -- apart ------------------------------------------------------------------------------------------


def is_compound(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is stored by its parts."""
    kind = type(tensor)
    if kind in _WHOLE_TYPES:
        return kind is not DTensor and tensor.layout is torch.sparse_coo
    if issubclass(kind, (DTensor, AsyncCollectiveTensor, ShardedTensor)) or is_lazy(tensor) or tensor.is_nested:
        return False
    return _is_wrapper(kind) or (has_own_memory(tensor) and tensor.layout is torch.strided)


def _is_wrapper(kind: Any) -> bool:
    """Return whether tensors of this type tell their inner tensors (torch: "traceable wrapper subclass")."""
    return callable(getattr(kind, "__tensor_flatten__", None)) and callable(getattr(kind, "__tensor_unflatten__", None))


def take_apart(tensor: Any, name: str) -> CompoundTensor:
    """Return a compound tensor, called ``name``, with its notes and parts.

    Raises:
        UnsafeObjectError, UnsupportedLeafError: pickle cannot store the context or attributes of a subclass.
    """
    kind = type(tensor)
    notes: list[tuple[str, Any]]
    if kind not in _WHOLE_TYPES:
        notes = [("type", f"{kind.__module__}:{kind.__qualname__}")]
        if _is_wrapper(kind):
            notes += [("shape", tuple(tensor.shape)), ("stride", tuple(tensor.stride()))]
            notes += [("dtype", str(tensor.dtype).removeprefix("torch."))]
            notes += [("context", _encoded(tensor.__tensor_flatten__()[1], f"{name}: the context"))]
        elif vars(tensor):
            notes += [("attributes", _encoded(dict(vars(tensor)), f"{name}: the attributes"))]
    else:
        notes = [("layout", _COO), ("shape", tuple(tensor.shape)), ("coalesced", int(tensor.is_coalesced()))]
    if tensor.requires_grad and tensor.is_leaf:
        notes += [("grad", 1)]
    return CompoundTensor(tensor=tensor, notes=tuple(notes), parts=_parts(tensor))


def _parts(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the parts of a compound tensor by name."""
    kind = type(tensor)
    if kind not in _WHOLE_TYPES and _is_wrapper(kind):
        return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    if kind not in _WHOLE_TYPES:
        return {_DATA: bare_tensor(tensor)}
    return dict(zip(("indices", "values"), sparse_coo_parts(tensor.detach()), strict=True))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the values: the tensor itself, or its parts and their parts."""
    if not is_compound(tensor):
        yield tensor
        return
    for part in _parts(tensor).values():
        yield from plain_tensors(part)


# -- together ---------------------------------------------------------------------------------------


def put_together(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor], *, trusted: bool) -> torch.Tensor | None:
    """Return the tensor of these notes and parts, over the memory of the parts; None if its type may not be made.

    Raises:
        ValueError, TypeError, LookupError, RuntimeError: no tensor has these notes and parts. Every index is checked.
    """
    made = _subclass(notes, parts, trusted) if "type" in notes else _sparse(notes, parts)
    return made.requires_grad_() if made is not None and notes.get("grad") else made


def _sparse(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if notes["layout"] != _COO:
        raise ValueError(f"layout {notes['layout']}")
    return torch.sparse_coo_tensor(
        parts["indices"],
        parts["values"],
        tuple(notes["shape"]),
        is_coalesced=bool(notes.get("coalesced")),
        check_invariants=True,
    )


def allowed_type(notes: Mapping[str, Any], *, trusted: bool) -> Any | None:
    """Return the subclass of Tensor that ``notes`` name; None if it is not imported or may not be made."""
    kind = named_type(notes, trusted=trusted)
    if kind is None or not issubclass(kind, torch.Tensor):
        return None
    return kind if trusted or kind in torch.serialization.get_safe_globals() else None


def _subclass(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor], trusted: bool) -> torch.Tensor | None:
    """Return the tensor of a subclass; None if its type may not be made or its code fails."""
    kind: Any = allowed_type(notes, trusted=trusted)
    if kind is None:
        return None
    made: Any
    try:
        if "context" in notes:
            context = decode_object(notes["context"], name="the context of a tensor", trusted=trusted)
            made = kind.__tensor_unflatten__(dict(parts), context, torch.Size(notes["shape"]), tuple(notes["stride"]))
        else:
            made = parts[_DATA].as_subclass(kind)
        if "attributes" in notes:
            vars(made).update(decode_object(notes["attributes"], name="the attributes of a tensor", trusted=trusted))
    except Exception:  # noqa: BLE001 - whatever a type's own code raises
        return None
    return made if isinstance(made, torch.Tensor) else None


def put_together_like(own: CompoundTensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor like ``own`` with other parts. Runs the code of its type, as the caller did to make ``own``."""
    if all(parts[name] is part for name, part in own.parts.items()):
        return own.tensor
    tensor: torch.Tensor = own.tensor
    kind: Any = type(tensor)
    made: torch.Tensor
    if _is_wrapper(kind):
        context = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        made = kind.__tensor_unflatten__(dict(parts), context, tensor.shape, tensor.stride())
    else:
        made = parts[_DATA].as_subclass(kind)
        vars(made).update(vars(tensor))
    return made.requires_grad_() if tensor.requires_grad and tensor.is_leaf else made


def plain_form(parts: Mapping[str, torch.Tensor]) -> object:
    """Return the value that replaces a tensor whose type may not be made: its parts, or the part with its shape."""
    return parts[_DATA] if parts.keys() == {_DATA} else dict(parts)


# -- what a template's own must be ------------------------------------------------------------------


def difference(own: Notes, stored: Notes) -> str | None:
    """Return why a tensor with the notes ``own`` cannot take the values of one with ``stored``; None if it can."""
    mine, theirs = dict(own), dict(stored)
    if kind_of(own) != kind_of(stored):
        return f"is a {kind_of(own)} in the template and a {kind_of(stored)} in the checkpoint"
    for note in _COMPARED:
        if mine.get(note) != theirs.get(note):
            return f"has {note} {mine.get(note)} in the template and {theirs.get(note)} in the checkpoint"
    if _contexts_differ(mine.get("context", b""), theirs.get("context", b"")):
        return (
            "was made with other settings (its __tensor_flatten__ gives another context) than the one in the checkpoint"
        )
    return None


def kind_of(notes: Notes) -> str:
    """Return a text for the kind of tensor with these notes. It omits modules, as libraries move their types."""
    found = dict(notes)
    if "type" in found:
        return str(found["type"]).rpartition(":")[2]
    return f"{found.get('layout', 'plain')} tensor"


def _contexts_differ(mine: bytes, theirs: bytes) -> bool:
    """Return whether both contexts can be read without trust and differ by more than devices."""
    if mine == theirs:
        return False
    try:
        one, other = (decode_object(data, name="a context", trusted=False) for data in (mine, theirs))
        return bool(_without_devices(one) != _without_devices(other))
    except (AioCkptError, RuntimeError, ValueError):  # Comparing tensors raises RuntimeError or ValueError.
        return False


def _without_devices(value: Any) -> Any:
    if isinstance(value, torch.device):
        return None
    if isinstance(value, (list, tuple)):
        return [type(value), *map(_without_devices, value)]
    if isinstance(value, dict):
        return {key: _without_devices(item) for key, item in value.items()}
    return value


def mark_as_stored(filled: torch.Tensor, stored: Notes) -> None:
    """Set the mark of coalesced, which the parts of a sparse tensor do not hold."""
    notes = dict(stored)
    if "coalesced" in notes:
        mark_coalesced(filled, is_coalesced=bool(notes["coalesced"]))


# -- contexts and attributes of subclasses ----------------------------------------------------------

_ATOMS = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.Size})


@dataclass(frozen=True, slots=True)
class _Described:
    """A value that equal text makes equal in bytes."""

    text: str
    """``repr`` of the value."""
    value: object = field(compare=False)


def _encoded(value: object, name: str) -> bytes:
    return _encoded_once(_Described(repr(value), value)) if _is_described(value) else encode_object(name, value)


@functools.lru_cache(maxsize=4096)
def _encoded_once(described: _Described) -> bytes:
    """Encode a value once for all equal ones: an optimizer has a few contexts in thousands of tensors."""
    return encode_object("a context", described.value)


def _is_described(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_described, value))
    if kind is dict:
        return all(type(key) is str and _is_described(item) for key, item in value.items())
    return kind in _ATOMS
