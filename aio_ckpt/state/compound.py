"""Compound tensors: those whose values stand in other tensors, their parts. Taken apart, and put together again.

A skeleton notes what such a tensor is but for its parts. The parts are leaves, named below the tensor. Putting a sparse
tensor together runs no code of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from aio_ckpt._torch import mark_coalesced, sparse_coo_parts
from aio_ckpt.state.containers import Notes

__all__ = ["CompoundTensor", "difference", "is_compound", "put_together", "settle", "take_apart"]

_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
_COMPARED = {"layout": "layout", "shape": "shape"}
"""Notes that a template must share with what is stored, and what they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompoundTensor:
    """A tensor that was taken apart."""

    tensor: torch.Tensor
    """It itself."""
    notes: Notes
    """All that its parts do not say."""
    parts: dict[str, torch.Tensor]
    """Tensors that hold its values, in its own memory; they may be compound, too."""


def is_compound(tensor: torch.Tensor) -> bool:
    """Whether the tensor is stored by its parts."""
    return tensor.layout in _LAYOUTS.values() and not is_lazy(tensor)


def take_apart(tensor: torch.Tensor) -> CompoundTensor:
    """The parts and notes of a compound tensor."""
    layout = tensor.layout
    bare = tensor.detach()
    notes: list[tuple[str, Any]] = [("layout", str(layout).removeprefix("torch.")), ("shape", tuple(tensor.shape))]
    if layout is torch.sparse_coo:
        indices, values = sparse_coo_parts(bare)
        parts = {"indices": indices, "values": values}
        notes.append(("coalesced", int(tensor.is_coalesced())))
    else:
        parts = {name: getattr(bare, name)() for name in (*_COMPRESSED[layout], "values")}
    if tensor.requires_grad and tensor.is_leaf:
        notes.append(("grad", 1))
    return CompoundTensor(tensor=tensor, notes=tuple(notes), parts=parts)


def put_together(notes: Mapping[str, Any], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that has these notes and parts, over the memory of the parts.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: no tensor has them; every index is checked.
    """
    layout, shape = _LAYOUTS[notes["layout"]], tuple(notes["shape"])
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            shape,
            is_coalesced=bool(notes.get("coalesced")),
            check_invariants=True,
        )
    else:
        compressed, plain = _COMPRESSED[layout]
        made = torch.sparse_compressed_tensor(
            parts[compressed], parts[plain], parts["values"], shape, layout=layout, check_invariants=True
        )
    return made.requires_grad_() if notes.get("grad") else made


def difference(own: Notes, stored: Notes) -> str | None:
    """Why a tensor with the notes ``own`` cannot be filled from what has ``stored``; None if it can."""
    mine, theirs = dict(own), dict(stored)
    for note, what in _COMPARED.items():
        if mine.get(note) != theirs.get(note):
            return f"has {what} {mine.get(note)} in the template and {theirs.get(note)} in the checkpoint"
    return None


def settle(filled: CompoundTensor, stored: Notes) -> None:
    """Set on a tensor, whose parts were filled, what its parts do not say."""
    if filled.tensor.layout is torch.sparse_coo:
        mark_coalesced(filled.tensor, is_coalesced=bool(dict(stored).get("coalesced")))
