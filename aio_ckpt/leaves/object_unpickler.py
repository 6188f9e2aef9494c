"""Reader of the pickles of objects: harmless values, tensors, and values of the types that the user allowed.

The user allows types by ``torch.serialization.add_safe_globals``. The list is looked at and never changed.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.restricted_unpickler import Allowed, RefusedError, RestrictedUnpickler
from aio_ckpt.format.tensor_pickle import STORAGES, StorageRef, storage_ref, tensor_view
from aio_ckpt.format.tensor_zip import check_bounds
from aio_ckpt.leaves.pickle_allow_list import (
    FILLS,
    HARMLESS,
    ClassNotImportedError,
    enum_member,
    imported_class,
    is_enum,
    is_named_tuple,
    named_tuple,
    namespace,
)

_TENSOR_BYTES = 1024
"""Memory that a tensor takes beside its elements."""
_MESH = "torch.distributed.device_mesh.DeviceMesh"
"""Torch allows it once ``torch.distributed.tensor`` is imported. Making one opens a rendezvous, and waits in it."""


def read_object_pickle(data: bytes, storage_of: Callable[[str], torch.UntypedStorage]) -> Any:
    """Return the value of a pickle of ``torch.save``. No code runs but that of types that the user allowed.

    ``storage_of`` returns the record ``data/<key>`` of the zip. It raises CorruptCheckpointError if there is none.

    Raises:
        RefusedError: the value needs a class or function that is not allowed.
        Exception: the pickle is damaged or forged.
    """
    if not data:
        raise pickle.UnpicklingError("its zip has no record data.pkl")
    return _ObjectUnpickler(data, storage_of).read_whole()


class _ObjectUnpickler(RestrictedUnpickler):
    def __init__(self, data: bytes, storage_of: Callable[[str], torch.UntypedStorage]) -> None:
        super().__init__(data)
        self._storage_of = storage_of
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._owners: dict[int, str] = {}
        """Names of other classes by id. The pickle may ask them for an enumeration inside of them, and no more."""
        self._bare_storages = 0
        """Storages that no tensor has taken yet."""

    @functools.cached_property
    def _by_user(self) -> dict[str, Allowed]:
        """What the user has allowed so far, by full name."""
        found: dict[str, Allowed] = {}
        for entry in torch.serialization.get_safe_globals():
            value, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
            make = value if name != _MESH else _refuse_mesh
            new = functools.partial(value.__new__, value) if isinstance(value, type) else None
            found[name] = Allowed(value, make, new)
        return found

    def read_whole(self) -> Any:
        """Return the value. A class that it holds for another reason than an enumeration inside is refused."""
        value = self.read_all()
        if self._owners:
            raise RefusedError(next(iter(self._owners.values())))
        if self._bare_storages > 0:
            raise RefusedError("torch.UntypedStorage outside of a tensor")
        return value

    def allowed(self, module: str, name: str) -> Allowed:
        full_name = f"{module}.{name}"
        if full_name in _METHODS:
            value, method, nbytes = _METHODS[full_name]
            return Allowed(value, functools.partial(method, self), nbytes=nbytes)
        found = HARMLESS.get(full_name) or _REBUILT.get(full_name) or self._by_user.get(full_name)
        if found is not None:
            return found
        try:
            kind = imported_class(module, name)
        except ClassNotImportedError:
            is_known = name.partition(".")[0] in namespace(sys.modules.get(module))
            raise RefusedError(full_name if is_known else f"{full_name}, which is not imported here") from None
        if is_enum(kind):
            return Allowed(kind, functools.partial(enum_member, kind))
        if is_named_tuple(kind):
            return Allowed(kind, functools.partial(named_tuple, kind))
        self._owners[id(kind)] = full_name
        return Allowed(kind)

    def fill(self, value: Any, state: Any) -> None:
        if type(value) in FILLS:
            FILLS[type(value)](value, state)
        elif self._is_by_user(type(value)):
            _set_state(value, state)
        else:
            super().fill(value, state)

    def takes_items(self, kind: type) -> bool:
        return super().takes_items(kind) or self._is_by_user(kind)

    def _is_by_user(self, kind: Any) -> bool:
        return any(kind is allowed.value for allowed in self._by_user.values())

    def _class_inside(self, owner: Any, name: Any) -> Any:
        """Return an enumeration or namedtuple inside of a class, which protocol 2 names by ``getattr``; or a member."""
        if not isinstance(owner, type) or type(name) is not str:
            raise RefusedError("builtins.getattr")
        if is_enum(owner):
            return type.__getattribute__(owner, "_member_map_")[name]
        self._owners.pop(id(owner), None)
        module, qualname = (type.__getattribute__(owner, part) for part in ("__module__", "__qualname__"))
        return self.register(f"{module}.{qualname}.{name}", self.allowed(module, f"{qualname}.{name}"))

    # -- tensors ------------------------------------------------------------------------------------

    def persistent_load(self, pid: object) -> StorageRef:
        """Return a storage. Its length is compared with the stored bytes, as torch believes the pickle."""
        ref = storage_ref(pid)
        self._bare_storages += 1
        if ref.key not in self._storages:
            self._storages[ref.key] = self._storage_of(ref.key)
        stored = self._storages[ref.key].nbytes()
        if ref.slots * (1 if ref.dtype is None else ref.dtype.itemsize) != stored:
            raise CorruptCheckpointError(f"a storage of {ref.slots} elements of {ref.dtype} over {stored} stored bytes")
        return ref

    def _tensor(self, *arguments: Any) -> torch.Tensor:
        view = tensor_view(*arguments)
        self._bare_storages -= 1
        storage = self._storages[view.storage.key]
        check_bounds(view, storage.nbytes())
        made = torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.shape, view.stride)
        made = made.conj() if view.is_conj else made
        made = torch._neg_view(made) if view.is_neg else made
        return made.requires_grad_() if arguments[4] is True else made

    def _with_state(self, function: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
        """Return a tensor with attributes, or of a type that the user allowed."""
        if function is not tensor_view or not (kind is torch.Tensor or self._is_by_user(kind)):
            raise RefusedError("torch._tensor._rebuild_from_type_v2 of a subclass")
        made = self._tensor(*arguments)
        made = made if kind is torch.Tensor else made.as_subclass(kind)
        vars(made).update(state)
        return made


def _parameter(data: Any, requires_grad: Any, _hooks: Any, state: Any = None) -> torch.nn.Parameter:
    if not isinstance(data, torch.Tensor):
        raise TypeError("a Parameter of no tensor")
    made = torch.nn.Parameter(data, bool(requires_grad))
    vars(made).update(state or {})
    return made


def _sparse(layout: Any, parts: Any) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, *_ = parts
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


_REBUILT: dict[str, Allowed] = {
    "torch._utils._rebuild_parameter": Allowed(_parameter, _parameter, nbytes=_TENSOR_BYTES),
    "torch._utils._rebuild_parameter_with_state": Allowed(_parameter, _parameter, nbytes=_TENSOR_BYTES),
    "torch._utils._rebuild_sparse_tensor": Allowed(_sparse, _sparse, nbytes=_TENSOR_BYTES),
    "torch.Tensor": Allowed(torch.Tensor),
    "torch.nn.parameter.Parameter": Allowed(torch.nn.Parameter),
    **{name: Allowed(stand_in) for name, stand_in in STORAGES.items()},
}
_METHODS: dict[str, tuple[Any, Callable[..., Any], int]] = {
    "torch._utils._rebuild_tensor_v2": (tensor_view, _ObjectUnpickler._tensor, _TENSOR_BYTES),
    "torch._utils._rebuild_tensor_v3": (tensor_view, _ObjectUnpickler._tensor, _TENSOR_BYTES),
    "torch._tensor._rebuild_from_type_v2": (_ObjectUnpickler._with_state, _ObjectUnpickler._with_state, _TENSOR_BYTES),
    "builtins.getattr": (getattr, _ObjectUnpickler._class_inside, 0),
}
"""By full name: value, method that is called for it, and memory that a call takes."""


def _refuse_mesh(*_: object) -> None:
    raise RefusedError(_MESH)


def _set_state(value: Any, state: Any) -> None:
    """Give a value its state as pickle does."""
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    vars(value).update(attributes or {})
    for name, item in (slots or {}).items():
        setattr(value, name, item)
