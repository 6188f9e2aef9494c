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
    quantized_tensor,
    sparse_coo_parts,
)
from aio_ckpt.errors import AioCkptError
from aio_ckpt.leaves.containers import Notes, named_type
from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.leaves.tensor_memory import has_own_memory

_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
_SPARSE = frozenset(_LAYOUTS.values())
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})
"""Quantized dtypes whose integers have a byte or more each."""
_INTEGERS = (torch.int8, torch.uint8, torch.int32)
_PER_TENSOR, _PER_CHANNEL = "per_tensor_affine", ("per_channel_affine", "per_channel_affine_float_qparams")
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
_COMPARED = ("layout", "shape", "stride", "dtype")
"""Notes that must be equal in the template and in the checkpoint."""
_DATA = "data"
"""Name of the one part of a subclass that keeps its values in its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompoundTensor:
    """A tensor and the parts that it was taken apart into."""

    tensor: torch.Tensor
    """Tensor that was taken apart."""
    notes: Notes
    """Everything about the tensor but its parts."""
    parts: dict[str, torch.Tensor]
    """Tensors that hold its values, in its own memory. They may be compound, too. Of a quantized tensor, copies."""


# -- apart ------------------------------------------------------------------------------------------


def is_compound(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is stored by its parts."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return kind is not DTensor and (tensor.layout in _SPARSE or tensor.dtype in _QUANTIZED)
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
    if kind not in _PLAIN_TYPES:
        notes = [("type", f"{kind.__module__}:{kind.__qualname__}")]
        if _is_wrapper(kind):
            notes += [("shape", tuple(tensor.shape)), ("stride", tuple(tensor.stride()))]
            notes += [("dtype", str(tensor.dtype).removeprefix("torch."))]
            notes += [("context", _encoded(tensor.__tensor_flatten__()[1], f"{name}: the context"))]
        elif vars(tensor):
            notes += [("attributes", _encoded(dict(vars(tensor)), f"{name}: the attributes"))]
    elif tensor.is_quantized:
        notes = [("qscheme", str(tensor.qscheme()).removeprefix("torch."))]
        notes += [("dtype", str(tensor.dtype).removeprefix("torch."))]
        if tensor.qscheme() is not torch.per_tensor_affine:
            notes += [("axis", tensor.q_per_channel_axis())]
    else:
        notes = [("layout", str(tensor.layout).removeprefix("torch.")), ("shape", tuple(tensor.shape))]
        if tensor.layout is torch.sparse_coo:
            notes += [("coalesced", int(tensor.is_coalesced()))]
    if tensor.requires_grad and tensor.is_leaf:
        notes += [("grad", 1)]
    return CompoundTensor(tensor=tensor, notes=tuple(notes), parts=_parts(tensor))


def _parts(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the parts of a compound tensor by name."""
    kind = type(tensor)
    if kind not in _PLAIN_TYPES and _is_wrapper(kind):
        return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    if kind not in _PLAIN_TYPES:
        return {_DATA: bare_tensor(tensor)}
    bare = tensor.detach()
    if tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        scale, zero_point = torch.tensor(bare.q_scale(), dtype=torch.float64), torch.tensor(bare.q_zero_point())
        return {"int_repr": bare.int_repr(), "scale": scale, "zero_point": zero_point}
    if tensor.is_quantized:
        scales, zero_points = bare.q_per_channel_scales(), bare.q_per_channel_zero_points()
        return {"int_repr": bare.int_repr(), "scales": scales, "zero_points": zero_points}
    if tensor.layout is torch.sparse_coo:
        return dict(zip(("indices", "values"), sparse_coo_parts(bare), strict=True))
    return {name: getattr(bare, name)() for name in (*_COMPRESSED[tensor.layout], "values")}


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
    if "type" in notes:
        made = _subclass(notes, parts, trusted)
    else:
        made = _quantized(notes, parts) if "qscheme" in notes else _sparse(notes, parts)
    return made.requires_grad_() if made is not None and notes.get("grad") else made


def _sparse(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    layout, shape = _LAYOUTS[notes["layout"]], tuple(notes["shape"])
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            shape,
            is_coalesced=bool(notes.get("coalesced")),
            check_invariants=True,
        )
    compressed, plain = _COMPRESSED[layout]
    return torch.sparse_compressed_tensor(
        parts[compressed], parts[plain], parts["values"], shape, layout=layout, check_invariants=True
    )


def _quantized(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the quantized tensor of these notes and parts."""
    integers = parts["int_repr"]
    if integers.dtype not in _INTEGERS:
        raise TypeError(f"integers of {integers.dtype}")
    if notes["qscheme"] == _PER_TENSOR:
        return quantized_tensor(integers, parts["scale"], parts["zero_point"], None)
    if notes["qscheme"] not in _PER_CHANNEL:
        raise ValueError(f"a quantized tensor of scheme {notes['qscheme']}")
    axis, scales, zero_points = notes["axis"], parts["scales"], parts["zero_points"]
    if not scales.shape == zero_points.shape == integers.shape[axis : axis + 1]:
        raise ValueError(f"{scales.numel()} scales of {integers.shape} integers, along dimension {axis}")
    return quantized_tensor(integers, scales, zero_points, axis)


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
    return f"{found.get('qscheme') or found.get('layout') or 'plain'} tensor"


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


def settle(filled: CompoundTensor, stored: Notes) -> None:
    """Set the properties of a tensor with filled parts that its parts do not hold."""
    tensor, notes = filled.tensor, dict(stored)
    if "coalesced" in notes:
        mark_coalesced(tensor, is_coalesced=bool(notes["coalesced"]))
    elif "qscheme" in notes:
        with torch.no_grad():  # Through a detached view, the tensor would not get the scale.
            tensor.copy_(_quantized(notes, filled.parts))


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
