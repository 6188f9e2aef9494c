"""Private names of torch that this package uses, and the versions of torch that it was tried with.

This file alone imports them, so that a new torch shows in one place what has moved. Each name says what to do then.
``tests/unit/test_torch_names.py`` tests each of them. Imports torch only.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import serialization
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import checkpoint
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as create_chunk_list
from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import SUPPORTED_NODES as PYTREE_NODES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms, _StorageWriterTransforms

__all__ = [
    "PYTREE_NODES",
    "AsyncCollectiveTensor",
    "DistWrapper",
    "PrefixStore",
    "ShardedTensor",
    "StorageInfo",
    "StorageWeakRef",
    "Store",
    "create_chunk_list",
    "narrow_tensor_by_index",
]
"""What others import from here besides what is defined here."""

NEWEST_TRIED = (2, 15)
"""Newest (major, minor) of torch with which the whole test suite passed."""

_log = logging.getLogger("aio_ckpt")

# -- imported above ---------------------------------------------------------------------------------
# StorageInfo: what DCP pickles into `.metadata` for the place of an item. If it moves, follow `FileSystemWriter`: the
#   pickled module and name have to be those of the running torch. Allow the new name in `format/dcp_metadata_read` too.
# ShardedTensor: what FSDP1 without a mesh and TorchRec give in a `state_dict()`. If it moves, DCP's planner has its new
#   place; if it goes, so does `leaves/sharded_tensor.py`.
# create_chunk_list: the box of the global tensor that this rank holds of a DTensor. If it moves, take what
#   `default_planner` calls. `compute_local_shape_and_global_offset` is no replacement: it moved more often.
# DistWrapper: what `state_dict_saver` makes of a process group, and NVRx hands to its users. If it moves, take it from
#   there; if it goes, hand out None.
# AsyncCollectiveTensor: a tensor whose values another rank may still be sending. If it moves, follow
#   `torch.distributed.tensor`. Such a tensor must not be read before its `wait()`.
# narrow_tensor_by_index: the part of a tensor that a read item names. If it moves, `tensor.narrow` for each dimension.
# PYTREE_NODES: the types of containers that somebody registered with torch's pytrees. If it moves: an empty mapping;
#   such containers then come back as plain ones unless they are trusted.
# PrefixStore, Store: public as `torch.distributed.PrefixStore`, where builds without distributed lack them.

local_tensor: Callable[[DTensor], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Return the shard of a DTensor itself. If it moves: ``to_local()`` under ``no_grad``, which costs 5 us each."""

DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""Value of ``Metadata.version`` in stock DCP; None before torch 2.9. If it moves, follow stock's ``finish``."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""Return a lazily negated view. If it moves, negate the copy that was made of the tensor."""


def storage_reference(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the storage of a tensor. Two are equal if they refer to one storage.

    If the class moves, ``frozen="trusted"`` needs another proof that a storage is the one of before.
    """
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


_strided = getattr(placement_types, "_StridedShard", None)
SHARDS_DIFFER: bool = _strided is None or Shard(0) != _strided(0, split_factor=2)
"""Whether ``Shard`` and ``_StridedShard`` compare unequal. If the class goes, this is True."""


def dtensor_over(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the memory of ``local``, laid out as ``like``.

    If ``_spec`` moves: ``DTensor.from_local`` with mesh, placements, shape and stride of ``like``.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target in few launches. If it moves, ``copy_`` one by one: 10 times the host time."""
    torch._foreach_copy_(targets, sources)


def unowned_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at ``address`` as a tensor that does not keep them allocated.

    If ``_construct_storage_from_data_pointer`` moves: views of the tensors themselves, made anew in each save.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def bare_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor of no subclass over the memory of ``tensor``, without gradients.

    If ``DisableTorchFunctionSubclass`` moves: ``torch.overrides``; a subclass may make everything one of its own.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def sparse_coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor, in its own memory, coalesced or not.

    If ``_indices`` or ``_values`` moves: ``indices()`` and ``values()``, which only a coalesced tensor gives.
    """
    return tensor._indices(), tensor._values()


def mark_coalesced(tensor: torch.Tensor, *, is_coalesced: bool) -> None:
    """Set the mark whether a sparse COO tensor is coalesced. If ``_coalesced_`` moves, leave the mark as it is."""
    with torch.no_grad():  # a leaf that requires grad refuses changes in place
        tensor._coalesced_(is_coalesced)


def is_load_of_torch(value: Any) -> bool:
    """Return whether ``load_state_dict`` of a module or optimizer is torch's own. Uses public names only."""
    return _is_of_torch(value.load_state_dict)


def has_load_hooks(module: torch.nn.Module) -> bool:
    """Return whether code outside of torch can see or change the values that this module loads.

    Torch's own hooks (FSDP2, BatchNorm's versions) leave a name that is in ``state_dict()`` under that name.
    If ``_load_state_dict_pre_hooks`` moves, follow ``Module.register_load_state_dict_pre_hook``.
    """
    hooks = (module._load_from_state_dict, *module._load_state_dict_pre_hooks.values())
    return not all(map(_is_of_torch, hooks))


def loads_by_names(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict`` of a module takes the names and shapes of its ``state_dict()``, and no others.

    A hook or a method of a module's own may change that. FSDP's hooks, and BatchNorm's method, do not.
    If a name moves, every module counts as one that may take others.
    """
    try:
        return is_load_of_torch(module) and all(map(_goes_by_names, module.modules()))
    except AttributeError:
        return False


def _goes_by_names(module: torch.nn.Module) -> bool:
    own, plain = type(module), torch.nn.Module
    by_use = (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    hooks = chain.from_iterable(hooks.values() for hooks in by_use)
    return (
        own._load_from_state_dict in (plain._load_from_state_dict, _NormBase._load_from_state_dict)
        and own._save_to_state_dict is plain._save_to_state_dict
        and own.state_dict is plain.state_dict
        and all(str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks)
    )


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledStorage:
    """What ``torch.save`` pickles in the place of a storage."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    """Dtype of the elements; uint8 for an untyped storage."""
    kind: Any
    """Class of the storage, such as ``torch.FloatStorage``."""
    location: str
    """Device of the storage, as ``torch.load`` takes it: ``cpu``, ``cuda:0``."""
    slots: int
    """Number of elements."""
    identity: int
    """Number that equals that of another Python object for the same storage, as long as one of them lives."""


_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)


def pickled_storage(value: object) -> PickledStorage | None:
    """Return what ``torch.save`` pickles for ``value``; None if it is no storage.

    If a name moves, follow ``persistent_id`` in ``torch.serialization._save``.
    """
    if not isinstance(value, _STORAGES):  # most values are none
        return None
    dtype, torch_names = torch.uint8, cast(Any, serialization)
    if isinstance(value, torch.storage.TypedStorage):
        typed = cast(Any, value)
        storage, dtype, slots = typed._untyped_storage, typed.dtype, typed._size()
        kind = getattr(torch, typed._pickle_storage_type())
    else:
        storage, slots, kind = value, value.nbytes(), torch_names.normalize_storage_type(type(value))
    return PickledStorage(
        storage=storage,
        dtype=dtype,
        kind=kind,
        location=torch_names.location_tag(storage),
        slots=slots,
        identity=storage._cdata,
    )


def default_store() -> Store | None:
    """Return the store of the default process group, or None without one.

    If it moves: let the user pass a store (``StoreCoordinator(store, ...)``).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError:  # another thread has just destroyed the group
        return None


def writer_transforms(extensions: Any) -> _StorageWriterTransforms:
    """Return stock's object that applies stream extensions. If it moves, follow ``_FileSystemWriter.__init__``."""
    return filesystem._StorageWriterTransforms(extensions)


def reader_transforms(registry: Any) -> _StorageReaderTransforms:
    """Return stock's object that undoes stream extensions. If it moves, follow ``FileSystemReader.__init__``."""
    return filesystem._StorageReaderTransforms(registry)


DcpRole = Literal["writer", "reader", "stager", "executor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpGlobal:
    """Global of a module of DCP. DCP calls it to make what its caller has not passed."""

    role: DcpRole
    """What a call of it makes."""
    module: ModuleType
    name: str

    @property
    def value(self) -> Any:
        """Value of the global now; None if this torch has no such global."""
        return getattr(self.module, self.name, None)

    def put(self, value: Any) -> None:
        setattr(self.module, self.name, value)

    @property
    def is_of_torch(self) -> bool:
        """Whether the value is torch's own."""
        return _is_of_torch(self.value)

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


def dcp_globals(*, package: bool) -> list[DcpGlobal]:
    """Return the globals by which DCP makes a writer, a reader, a stager and the executors of ``dcp.async_save``.

    ``package``: also those that callers take from ``torch.distributed.checkpoint`` itself. Before torch 2.9,
    ``async_save`` makes no stager: the writer stages. If a global moves, its value is None: follow ``_storage_setup``
    and ``async_save`` of the new torch. Until then, ``install()`` warns and leaves these calls to stock.
    """
    storage = getattr(checkpoint, "_storage_utils", ModuleType("torch.distributed.checkpoint._storage_utils"))
    found = [
        DcpGlobal(role="writer", module=storage, name="FileSystemWriter"),
        DcpGlobal(role="reader", module=storage, name="FileSystemReader"),
        DcpGlobal(role="executor", module=state_dict_saver, name="_ThreadBasedAsyncCheckpointExecutor"),
        DcpGlobal(role="executor", module=state_dict_saver, name="_ProcessBasedAsyncCheckpointExecutor"),
    ]
    if "async_stager" in inspect.signature(state_dict_saver.async_save).parameters:
        found.append(DcpGlobal(role="stager", module=state_dict_saver, name="DefaultStager"))
    if package:
        found.append(DcpGlobal(role="writer", module=checkpoint, name="FileSystemWriter"))
        found.append(DcpGlobal(role="reader", module=checkpoint, name="FileSystemReader"))
    return found


@functools.cache
def log_untried_torch() -> None:
    """Log one INFO line in a process whose torch is newer than any that was tried."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TRIED:
        newest = ".".join(map(str, NEWEST_TRIED))
        _log.info("torch %s is newer than %s, the newest that this aio_ckpt was tried with", torch.__version__, newest)
