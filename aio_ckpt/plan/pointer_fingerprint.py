"""Fingerprint of a state: the address of every tensor leaf. ``plan_cache`` reuses cached copies if it is the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aio_ckpt.errors import SourceChangedError
from aio_ckpt.leaves.tensor_memory import needed_bytes
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.flatten import FlatState


def fingerprint_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of the first element of every tensor: the fingerprint."""
    return list(map(torch.Tensor.data_ptr, tensors))


def storage_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the length of the storage of every tensor, in bytes."""
    return list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)))


def check_sources(flat: FlatState, tensors: Sequence[torch.Tensor], fingerprint: Sequence[int]) -> list[int]:
    """Check that all storages exist, and return the storage length of every tensor leaf, in bytes.

    Raises:
        SourceChangedError: a storage was freed, or is too short for its tensor.
    """
    names = (name for name, kind in zip(flat.names, flat.kinds, strict=True) if kind is not LeafKind.OBJECT)
    available_bytes = storage_bytes(tensors)
    for name, tensor, address, available in zip(names, tensors, fingerprint, available_bytes, strict=True):
        needed = needed_bytes(tensor)
        if needed and (not address or needed > available):
            raise SourceChangedError(
                f"{name!r}: a tensor of shape {tuple(tensor.shape)} needs {needed} bytes of its storage, which has "
                f"{available}: it was freed or resized; save before freeing it, or materialize it first"
            )
    return available_bytes
