"""Leaves of a template's containers, compared with the stored ones.

A tensor or an array of a template has a shape, which the stored one must fit. None, a number, a text, ``{}`` and ``[]``
have no shape, and take any value stored at or below their name. Examples: a running best that began as ``0.0`` takes
the tensor that it became, and the ``state`` of an optimizer that was not stepped yet takes the moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.leaves.arrays import TORCH_ARRAY_DTYPES, as_tensor
from aio_ckpt.leaves.objects import type_name
from aio_ckpt.leaves.tensor_memory import memory_of, overlaps_itself
from aio_ckpt.leaves.values import LeafKind, Target
from aio_ckpt.match.fills import Fill, Fills
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import branches_of_rank, stored_branch
from aio_ckpt.match.takers import AnyLeaf, LeavesTaker, ReplacedArray
from aio_ckpt.match.tensors import exact_addresses, fill_fault, has_other_shape
from aio_ckpt.state.flatten import Template
from aio_ckpt.state.names import below_each, find_named, skeleton_names


def match_leaves(
    template: Template, fills: Fills, taker: LeavesTaker, options: LoadOptions
) -> tuple[list[str], dict[str, Target], list[str]]:
    """Add the leaves to ``fills`` and ``taker``.

    Returns the names that are missing, the tensors of another shape, which stay as they are, by name, and the faults.
    """
    checkpoint, catalog = taker.checkpoint, taker.checkpoint.catalog
    missing: list[str] = []
    mismatched: dict[str, Target] = {}
    faults: list[str] = []
    stored = list(map(catalog.shards.get, template.names))
    addresses = exact_addresses(template.values, stored)
    rows = zip(template.names, template.values, template.kinds, stored, addresses, strict=True)
    exact = fills.exact
    for name, value, kind, shards, address in rows:
        if address and shards is not None:
            exact.append((shards[0], value, address))  # type: ignore[arg-type]  # a tensor, and an Item
        elif shards is None:
            if name not in catalog.objects:
                missing.append(name)
            elif fault := _object_fault(checkpoint, kind, taker.ctx.config.trusted_objects):
                faults.append(f"{checkpoint.label(name)} {fault}")
            else:
                taker.objects.append(name)
                fills.objects.append(name)
        elif kind is LeafKind.OBJECT:
            if isinstance(value, np.ndarray):
                faults.append(f"{checkpoint.label(name)} {_tensor_for_array(value)}")
            else:
                _add_any(taker, fills, name, [name], checkpoint.stored_name(name))
        else:
            tensor = cast("Target", value) if kind is LeafKind.TENSOR else as_tensor(value, kind)
            if options.skip_mismatched and kind is not LeafKind.SCALAR_ARRAY and has_other_shape(tensor, shards):
                mismatched[name] = tensor
            elif fault := fill_fault(tensor, shards, casts=options.cast):
                if kind is LeafKind.SCALAR_ARRAY:
                    _add_any(taker, fills, name, [name], checkpoint.stored_name(name))
                else:
                    faults.append(f"{checkpoint.label(name)} {fault}")
            elif overlaps_itself(memory := memory_of(tensor)):
                faults.append(
                    f"{checkpoint.label(name)} shares memory with itself in the template (stride {memory.stride()}): "
                    "give its .clone()"
                )
            elif kind is LeafKind.TENSOR or (kind is LeafKind.ARRAY and _shares_memory(value, memory_of(tensor))):
                fills.others.append(Fill(name, tensor))
            else:
                taker.arrays.append(ReplacedArray(name, kind, memory_of(tensor).dtype))
                fills.others.append(Fill(name))
    return missing, mismatched, faults


def _object_fault(checkpoint: Checkpoint, kind: LeafKind, trusted: bool) -> str | None:
    """Return why a leaf of this kind does not take an object; None if it does.

    Stock DCP pickles numpy values. A loaded object replaces the template's value, of whatever type that is.
    """
    if kind is LeafKind.OBJECT or (kind is LeafKind.SCALAR_ARRAY and checkpoint.has_skeleton):
        return None
    what = {LeafKind.TENSOR: "a tensor", LeafKind.ARRAY: "an array"}.get(kind, "a numpy scalar")
    fault = f"is {what} in the template and an object in the checkpoint"
    if kind is LeafKind.TENSOR or checkpoint.has_skeleton:
        return f"{fault}: give None there, which takes what is stored, or leave it out of the template"
    remedy = "set trusted_objects=True, or give dcp.load an aio_ckpt.dcp.Reader, if you trust whoever wrote it"
    return None if trusted else f"{fault}, where dcp.save pickles numpy: {remedy}"


def _tensor_for_array(value: npt.NDArray[Any]) -> str:
    """Return why an array that is saved as an object takes no tensor, and the remedy."""
    what = f"is a {type_name(value)} of {value.dtype.str!r} in the template and a tensor in the checkpoint"
    native = value.dtype.newbyteorder("=")
    remedy = f"give numpy.asarray(..., {native.name!r}) of it" if native in TORCH_ARRAY_DTYPES else "give None there"
    return f"{what}, which fills plain arrays of native byte order: {remedy}"


def match_any_leaves(
    template: Template, fills: Fills, taker: LeavesTaker, missing: list[str]
) -> tuple[list[str], list[str]]:
    """Add the empty containers, and the leaves that hold nothing, to ``fills`` and ``taker``.

    Returns the names that are still missing, and the faults.
    """
    checkpoint, rank = taker.checkpoint, taker.ctx.rank
    absent = set(missing)
    rows = zip(template.names, template.values, strict=True) if absent else ()
    places = [name for name, value in rows if name in absent and _holds_nothing(value)] + template.empty
    if not places:
        return missing, []
    found, stored = _names_at(checkpoint, places, rank=rank), checkpoint.catalog.names()
    branches = branches_of_rank(checkpoint, rank)
    faults: list[str] = []
    for name, names in found.items():
        branch = stored_branch(checkpoint, name, names, branches) if names else name
        if branch is None:
            faults.append(
                f"{name!r} is empty, and rename= changes names inside of what is stored for it: rename the whole "
                "branch, or give the names"
            )
        elif stored.issuperset(names):
            _add_any(taker, fills, name, names, branch)
    missing = [name for name in missing if name not in found]
    return missing + sorted({name for names in found.values() for name in names if name not in stored}), faults


def _add_any(taker: LeavesTaker, fills: Fills, name: str, names: list[str], branch: str) -> None:
    taker.any_leaves[name] = AnyLeaf(names, branch)
    fills.add_new(taker.checkpoint.catalog, names)


def _holds_nothing(value: object) -> bool:
    """Return whether a leaf is None or an empty sequence: a container may have been saved in its place."""
    return value is None or (isinstance(value, (list, tuple, deque)) and not value)


def _names_at(checkpoint: Checkpoint, places: Iterable[str], *, rank: int) -> dict[str, list[str]]:
    """Return the names of the stored leaves at or below each place, for places at which anything is stored.

    If ``rank`` saved nothing at a place and another rank did, the other rank's leaves are taken.
    """
    left = set(places)
    if not checkpoint.has_skeleton:
        return below_each(left, checkpoint.names_of(rank))
    found: dict[str, list[str]] = {}
    for skeleton in checkpoint.skeletons(rank):
        found |= below_each(left, checkpoint.as_named(skeleton_names(skeleton, rank=rank)))
        found |= {place: [] for place in find_named(skeleton, left - found.keys(), rank=rank)}
        left -= found.keys()
        if not left:
            break
    return found


def _shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has the memory of the array ``value``. If not, it is a copy of the array."""
    return bool(value.__array_interface__["data"][0] == tensor.data_ptr())
