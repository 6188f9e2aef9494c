"""``data.pkl`` of one tensor item: the pickle that ``torch.save`` makes of a plain tensor, to and from bytes.

Reading runs no code: the unpickler resolves every name to a stand-in of this file.

Sources: ``torch/_tensor.py`` (``_reduce_ex_internal``) and ``torch/_utils.py`` of 2.6 to 2.13, ``pickletools``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aio_ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.dtypes import V2_STORAGES, V3_NAMES, known_dtypes
from aio_ckpt.format.restricted_unpickler import Allowed, RefusedError, RestrictedUnpickler

_V2_DTYPES = known_dtypes(V2_STORAGES)
_V3_DTYPES = known_dtypes(V3_NAMES)
STORAGES: dict[str, Any] = {
    "torch.storage.UntypedStorage": torch.UntypedStorage,
    **{f"torch.{V2_STORAGES[name]}": dtype for name, dtype in _V2_DTYPES.items()},
}
"""What stands for the class of a storage, by its full name: the dtype of its elements, or ``UntypedStorage``."""
STORABLE_DTYPES = frozenset((*_V2_DTYPES.values(), *_V3_DTYPES.values()))
"""Dtypes that ``torch.save`` stores as a plain strided tensor. Quantized dtypes are none, nor int4."""
_LAZY_DTYPES = frozenset(_V2_DTYPES.values()) - {torch.bool}
"""Dtypes with which torch makes lazily negated and conjugated tensors."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A persistent id of the pickle: the record that holds the elements. Its values are not checked yet."""

    dtype: torch.dtype | None
    """None for an ``UntypedStorage``, whose slots are bytes."""
    key: str
    """The elements are the record ``data/<key>`` of the archive."""
    slots: int
    """Number of elements that the pickle claims."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as the pickle describes it. The types are checked, the numbers are not."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    """Elements of the storage before the first one."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    is_conj: bool = False
    """Whether its elements are the conjugates of the stored ones, as of ``x.conj()``."""
    is_neg: bool = False
    """Whether its elements are the negatives of the stored ones, as of ``x.conj().imag``."""


# -- render -----------------------------------------------------------------------------------------------


def render_pickle(spec: TensorSpec) -> bytes:
    """Return ``data.pkl`` of a dense tensor in record ``data/0``, without memo entries: no value occurs twice."""
    name = str(spec.dtype).removeprefix("torch.")
    slots = math.prod(spec.shape)
    if name in V2_STORAGES:
        version, storage, dtype = "2", f"torch\n{V2_STORAGES[name]}", ""
    else:
        version, storage, dtype = "3", "torch.storage\nUntypedStorage", f"ctorch\n{name}\n"
        slots *= spec.dtype.itemsize
    parts = (
        f"\x80\x02ctorch._utils\n_rebuild_tensor_v{version}\n((X\x07\x00\x00\x00storage",
        f"c{storage}\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu",
        _pickle_int(slots) + "tQK\0" + _pickle_tuple(spec.shape) + _pickle_tuple(spec.stride),
        f"\x89ccollections\nOrderedDict\n)R{dtype}tR.",
    )
    return "".join(parts).encode("latin-1")


def _pickle_int(value: int) -> str:
    """Return the protocol 2 opcode for an integer of at least 0."""
    for code, nbytes, limit in (("K", 1, 1 << 8), ("M", 2, 1 << 16), ("J", 4, 1 << 31)):
        if value < limit:
            return code + value.to_bytes(nbytes, "little").decode("latin-1")
    nbytes = value.bit_length() // 8 + 1
    return f"\x8a{chr(nbytes)}" + value.to_bytes(nbytes, "little").decode("latin-1")


def _pickle_tuple(values: Sequence[int]) -> str:
    body = "".join(map(_pickle_int, values))
    if len(values) > 3:
        return f"({body}t"
    return body + ")\x85\x86\x87"[len(values)]


# -- read --------------------------------------------------------------------------------------------------


def storage_ref(pid: object) -> StorageRef:
    """Return the storage that a persistent id of a pickle names."""
    match pid:
        case ("storage", torch.dtype() as dtype, str(key), str(), int(slots)):
            return StorageRef(dtype, key, slots)
        case ("storage", torch.UntypedStorage, str(key), str(), int(slots)):
            return StorageRef(None, key, slots)
    raise TypeError("no storage")


def tensor_view(storage: object, offset: int, shape: object, stride: object, *rest: object) -> TensorView:
    """Return the tensor of ``_rebuild_tensor_v2`` (``rest``: requires_grad, hooks) and ``_v3`` (a dtype more).

    Both may end in a dict with the lazy bits, ``conj`` and ``neg``.
    """
    if not isinstance(storage, StorageRef) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise TypeError("its tensor has no storage, shape or stride")
    bits = rest[-1] if rest and type(rest[-1]) is dict else None
    kept = rest if bits is None else rest[:-1]
    if bits is not None and not (bits and bits.keys() <= {"conj", "neg"} and {*map(type, bits.values())} == {bool}):
        raise UnsupportedLeafError("an item's pickle makes a dict: no plain tensor")
    dtype = kept[2] if len(kept) == 3 else storage.dtype
    if len(kept) not in (2, 3) or not isinstance(dtype, torch.dtype):
        raise TypeError("its tensor has no dtype")
    is_conj, is_neg = (bits is not None and bits.get(bit, False) for bit in ("conj", "neg"))
    if (is_conj and not dtype.is_complex) or ((is_conj or is_neg) and dtype not in _LAZY_DTYPES):
        raise UnsupportedLeafError(f"an item holds a lazy conjugate or negative of {dtype}")
    return TensorView(storage, dtype, offset, shape, stride, is_conj, is_neg)


def _rebuild_parameter(data: object, _grad: bool, _hooks: None) -> object:
    return data


_ALLOWED: dict[str, Allowed] = {
    "torch._utils._rebuild_tensor_v2": Allowed(tensor_view, tensor_view),
    "torch._utils._rebuild_tensor_v3": Allowed(tensor_view, tensor_view),
    "torch._utils._rebuild_parameter": Allowed(_rebuild_parameter, _rebuild_parameter),
    "collections.OrderedDict": Allowed(OrderedDict, OrderedDict),
    **{name: Allowed(stand_in) for name, stand_in in STORAGES.items()},
    **{f"torch.{name}": Allowed(dtype) for name, dtype in _V3_DTYPES.items()},
}


class _TensorUnpickler(RestrictedUnpickler):
    def allowed(self, module: str, name: str) -> Allowed:
        return _ALLOWED.get(f"{module}.{name}") or super().allowed(module, name)

    def persistent_load(self, pid: object) -> StorageRef:
        return storage_ref(pid)


def read_pickle(data: bytes) -> TensorView:
    """Return the tensor that ``data.pkl`` describes."""
    try:
        view = _TensorUnpickler(data).read_all()
    except RefusedError as exc:
        raise UnsupportedLeafError(f"an item names {exc}, which no plain tensor needs") from exc
    except (UnsupportedLeafError, MemoryError):
        raise
    except Exception as exc:  # crafted bytes can raise anything, down to OverflowError from the length of a frame
        raise CorruptCheckpointError(f"its torch.save zip is damaged: its pickle is malformed ({exc})") from exc
    if not isinstance(view, TensorView):
        raise UnsupportedLeafError("an item holds something else than one tensor")
    return view
