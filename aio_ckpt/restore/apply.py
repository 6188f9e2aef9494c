"""Apply what was read to the template: objects are set, and every ``load_state_dict`` is called, at the very end."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aio_ckpt.checkpoint.fetch import synchronize
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.match.compounds import check_targets
from aio_ckpt.match.match import Match, listed
from aio_ckpt.match.open_places import build_at, nested_at, with_numbers
from aio_ckpt.match.overlaps import write_shared
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.restore.fetch_values import FetchedValues, by_stored_name
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.runtime.error_notes import mark_modified
from aio_ckpt.state import flatten as tree
from aio_ckpt.state.compound import settle
from aio_ckpt.state.objects import type_name
from aio_ckpt.state.values import UntrustedObject

__all__ = ["prepare_apply", "target_modified"]

_log = logging.getLogger("aio_ckpt")


def prepare_apply(
    ctx: ReadContext,
    checkpoint: Checkpoint,
    state: object,
    found: Match,
    fetched: FetchedValues,
    shared: Mapping[str, torch.Tensor],
) -> Callable[[], None]:
    """Build every value that could be damaged; return what sets the objects and calls each ``load_state_dict``.

    ``shared``: the values of targets that share memory, by name.
    """
    check_targets(found.compounds)
    values, rank, trusted = dict(fetched.values), ctx.rank, ctx.trusted
    leaves = {name: values[name] for name in found.objects if name not in fetched.untrusted}
    for name, kind, dtype in found.arrays:
        tensor = values[name]
        assert isinstance(tensor, torch.Tensor)
        leaves[name] = tree.from_tensor(tensor.to(dtype), kind)
    refused = {name: UntrustedObject(name, reason) for name, reason in fetched.untrusted.items()}
    known = by_stored_name(checkpoint, values | refused)
    leaves |= build_at(checkpoint, found.open, known, rank=rank, trusted=trusted)
    skeleton = skeleton_of(checkpoint, rank) if found.stateful and checkpoint.has_skeleton else None
    below: list[tuple[str, Any, object]] = []
    for prefix, value, names in found.stateful:
        if not fetched.untrusted.keys().isdisjoint(names):  # which keep what the template has
            own = tree.leaves_of(value.state_dict(), prefix, rank=rank)
            values |= {name: own[name] for name in names if name in fetched.untrusted and name in own}
        branch = found.branches[prefix]
        if branch is None:
            inner: object = {name.removeprefix(f"{prefix}."): values[name] for name in names}
        elif skeleton is not None:
            stored, parts = by_stored_name(checkpoint, values), by_stored_name(checkpoint, found.own)
            inner = tree.build_below(
                skeleton, branch, stored, rank=rank, trusted=trusted, own=parts, untrusted=fetched.skipped
            )
        else:
            leaves_below = {checkpoint.stored_name(name): values[name] for name in names if name in values}
            inner = _dcp_state_dict(checkpoint, branch, leaves_below, value)
        below.append((prefix, value, _with_versions(inner, value)))

    def put_back() -> None:
        with target_modified():
            _write_rest(found, shared)
            if leaves:
                tree.put_back(state, leaves, rank=rank, names=found.names)
            for prefix, value, state_dict in below:
                with _noting_refusal(prefix, value, checkpoint):
                    value.load_state_dict(state_dict)
        if found.unexpected and rank == 0:  # the others would say the same
            _log.warning(
                "%s: the template lacks %s; they were not loaded (strict=True refuses them)",
                checkpoint.path,
                listed(found.unexpected),
            )

    return put_back


def _write_rest(found: Match, shared: Mapping[str, torch.Tensor]) -> None:
    """Write to tensors of the template what no read wrote: values of shared memory, parts of wrapper tensors."""
    written = [*(tensor for _, tensor in found.shared), *(target.own.tensor for target in found.compounds)]
    devices = {tensor.device for tensor in written if tensor.device.type != "cpu"}
    synchronize(devices)
    write_shared(found.shared, shared)
    for target in found.compounds:
        settle(target.own, target.stored)
    synchronize(devices)


def _dcp_state_dict(checkpoint: Checkpoint, prefix: str, leaves: dict[str, object], value: object) -> object:
    """Return the ``state_dict()`` called ``prefix``, which stock DCP flattened."""
    nested = nested_at(checkpoint, prefix, leaves)
    if isinstance(value, torch.optim.Optimizer):  # DCP drops {}
        nested["state"] = with_numbers(nested.get("state", {}))
    return nested


def _with_versions(state_dict: Any, value: object) -> Any:
    """Return the ``state_dict`` of a module with versions: its own or the module's, as stock ``dcp.load`` does."""
    if not isinstance(value, torch.nn.Module) or hasattr(state_dict, "_metadata"):
        return state_dict
    versions = getattr(value.state_dict(), "_metadata", None)
    if versions is None or not isinstance(state_dict, Mapping):
        return state_dict
    made: Any = OrderedDict(state_dict)
    made._metadata = versions
    return made


@contextmanager
def _noting_refusal(prefix: str, value: object, checkpoint: Checkpoint) -> Iterator[None]:
    """Add a note to what ``load_state_dict`` raises: which value refused which checkpoint."""
    try:
        yield
    except Exception as error:
        which = f"step {checkpoint.step} at {checkpoint.path}" if checkpoint.root else f"{checkpoint.path}"
        error.add_note(
            f"aio_ckpt: load_state_dict() of {prefix or 'the template'!r}, a {type_name(value)}, refused what {which} "
            "holds for it; the target was modified: tensors of other names were filled before"
        )
        raise


@contextmanager
def target_modified() -> Iterator[None]:
    """Mark what is raised inside: the template may hold a mix of old and new values."""
    try:
        yield
    except Exception as error:  # also what load_state_dict raises
        mark_modified(error)
        raise
