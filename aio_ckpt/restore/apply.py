"""Apply loaded values to the template: set objects and call every ``load_state_dict``, once all is verified."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aio_ckpt._torch import has_load_hooks, is_load_of_torch
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.rank_names import first_of, listed
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.leaves.compound import mark_as_stored, put_together
from aio_ckpt.leaves.objects import from_tensor, type_name
from aio_ckpt.leaves.values import OwnedShard, UntrustedObject
from aio_ckpt.match.compounds import CompoundTarget
from aio_ckpt.match.match import Match, StatefulTarget
from aio_ckpt.match.open_places import OpenPlace
from aio_ckpt.match.rename import prefix_remedy
from aio_ckpt.restore.fetch_values import FetchedValues, by_stored_name
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.runtime.error_notes import mark_modified
from aio_ckpt.state.build import build_parts
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.flatten import leaves_of
from aio_ckpt.state.put_back import put_back

_log = logging.getLogger("aio_ckpt")


def prepare_apply(
    ctx: ReadContext,
    checkpoint: Checkpoint,
    state: object,
    found: Match,
    fetched: FetchedValues,
    *,
    fills_missing: bool,
) -> tuple[Callable[[], None], list[str]]:
    """Return a function that writes what the reads did not fill, and calls each ``load_state_dict``.

    That is compound tensors and objects. All values are built before this returns, because building finds damage.
    ``fills_missing``: whether a Stateful
    value gets from its own ``state_dict()`` what is not stored for it; the names of these values are returned, too.

    Raises:
        CorruptCheckpointError: a value cannot be built.
    """
    _check_parts(found.compounds)
    values, rank, trusted = dict(fetched.values), ctx.rank, ctx.trusted
    leaves = {name: values[name] for name in found.objects if name not in fetched.untrusted}
    for array in found.arrays:
        tensor = values[array.name]
        assert isinstance(tensor, torch.Tensor)
        leaves[array.name] = from_tensor(tensor.to(array.dtype), array.kind)
    refused = {name: UntrustedObject(name, reason) for name, reason in fetched.untrusted.items()}
    known = by_stored_name(checkpoint, values | refused)
    leaves |= _build_at(checkpoint, found.open, known, rank=rank, trusted=trusted)
    values |= {name: own.owner if isinstance(own, OwnedShard) else own for name, own in found.kept.items()}
    for prefix, value, names, _ in found.stateful:
        if not fetched.untrusted.keys().isdisjoint(names):  # untrusted leaves keep the template's values
            own = leaves_of(value.state_dict(), prefix, rank=rank)
            values |= {name: own[name] for name in names if name in fetched.untrusted and name in own}
    built: dict[str, object] = {}
    if found.stateful and checkpoint.has_skeleton:
        built = build_parts(
            checkpoint.skeleton(rank),
            [target.branch for target in found.stateful if target.branch is not None],
            by_stored_name(checkpoint, values),
            rank=rank,
            trusted=trusted,
            own=by_stored_name(checkpoint, found.own),
            untrusted=fetched.skipped,
        )
    state_dicts: list[tuple[StatefulTarget, Any]] = []
    filled: list[str] = []
    for target in found.stateful:
        prefix, value, names, branch = target
        if branch is None:
            inner: object = {name.removeprefix(f"{prefix}."): values[name] for name in names}
        elif branch in built:
            inner = built[branch]
        else:
            leaves_below = {checkpoint.stored_name(name): values[name] for name in names if name in values}
            inner = _dcp_state_dict(checkpoint, branch, leaves_below, value)
        if fills_missing:
            inner = _filled(inner, value.state_dict(), prefix, filled)
        state_dicts.append((target, _with_versions(inner, value)))

    def apply() -> None:
        with target_modified():
            for compound in found.compounds:
                mark_as_stored(compound.own.tensor, compound.stored)
            if leaves:
                put_back(state, leaves, rank=rank, empty=found.empty)
        is_written = bool(leaves) or found.writes_tensors
        for target, state_dict in state_dicts:
            with _noting_refusal(target, state_dict, checkpoint, is_written=is_written):
                target.value.load_state_dict(state_dict)
            is_written = True
        if found.narrowed and rank == 0:
            _log.warning(
                "%s: cast=True: %s: values beyond the range of the template's dtype are not kept",
                checkpoint.path,
                first_of(found.narrowed),
            )
        if found.mismatched and rank == 0:
            _log.warning(
                "%s: skip_mismatched=True: of another shape, and left as they are: %s",
                checkpoint.path,
                listed(found.mismatched),
            )
        if found.dropped and rank == 0:
            _log.warning(
                "%s: %d ranks saved, and %d load: the PerRank values of the others are not loaded: %s",
                checkpoint.path,
                len(checkpoint.ranks),
                ctx.world_size,
                listed(found.dropped),
            )
        if found.unexpected and rank == 0:  # only rank 0 logs; the report of every rank lists its own
            _log.warning(
                "%s: the template lacks %s; not loaded (strict=True refuses this)",
                checkpoint.path,
                listed(found.unexpected),
            )

    return apply, filled


def _check_parts(targets: Iterable[CompoundTarget]) -> None:
    """Check that the filled parts make a tensor: an index out of bounds would read beyond its memory.

    Raises:
        CorruptCheckpointError: names the tensor.
    """
    for target in targets:
        notes = dict(target.stored)
        if "type" in notes:  # the code of a subclass checks its own parts
            continue
        try:
            put_together(notes, target.own.parts, trusted=False)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{target.name!r}: its parts are of no tensor: {error}") from error


# -- open places and plain DCP ------------------------------------------------------------------------


def _build_at(
    checkpoint: Checkpoint,
    places: Mapping[str, OpenPlace],
    values: Mapping[str, object],
    *,
    rank: int,
    trusted: bool,
) -> dict[str, object]:
    """Return the value for each of ``places``, built as ``read`` does. ``values``: all that was read, by stored name.

    Plain DCP stores every key as a str. The keys of an optimizer's ``state`` are made numbers again.
    """
    left = dict(places)
    built: dict[str, object] = {}
    for skeleton in checkpoint.skeletons(rank) if left and checkpoint.has_skeleton else ():
        branches = {place.branch for place in left.values()}
        parts = build_parts(skeleton, branches, values, rank=rank, trusted=trusted)
        found = {name: parts[place.branch] for name, place in left.items() if place.branch in parts}
        built |= found
        left = {name: place for name, place in left.items() if name not in found}
        if not left:
            break
    for name, place in left.items():
        stored = {found: values[found] for found in map(checkpoint.stored_name, place.names)}
        if list(stored) == [place.branch]:
            built[name] = values[place.branch]
        else:
            nested = _nested_at(checkpoint, place.branch, stored)
            built[name] = _with_int_keys(nested) if name.rpartition(".")[2] == "state" else nested
    return built


def _nested_at(checkpoint: Checkpoint, place: str, leaves: dict[str, object]) -> Any:
    """Return the nested value called ``place``, which stock DCP flattened. ``leaves``: all its leaves, by name."""
    paths = checkpoint.dcp_paths or {}
    nested: Any = unflatten_dcp(paths, leaves)
    name = next(iter(leaves))
    path = paths.get(name, (name,))
    depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == place), None)
    if depth is None:
        return {name.removeprefix(f"{place}."): leaf for name, leaf in leaves.items()}
    for part in path[:depth]:
        nested = nested[part]
    return nested


def _with_int_keys(state: Any) -> Any:
    """Return the ``state`` of an optimizer with keys of digits as ints, by which the optimizer looks them up."""
    return {int(key) if str(key).isdigit() else key: item for key, item in state.items()}


# -- Stateful values ----------------------------------------------------------------------------------


def _filled(stored: Any, own: Any, name: str, names: list[str]) -> Any:
    """Return ``stored`` with the entries of ``own`` that it lacks, in mappings and in lists of equal length.

    ``names`` gets the names of these entries. ``name``: that of the value.
    """
    if isinstance(stored, Mapping) and isinstance(own, Mapping):
        lacking = [key for key in own if key not in stored]
        names += [_joined(name, key) for key in lacking]
        made: Any = copy.copy(stored)  # of the same type
        for key, value in own.items():
            made[key] = _filled(stored[key], value, _joined(name, key), names) if key in stored else value
        if hasattr(stored, "_metadata"):
            made._metadata = stored._metadata
        return made
    if type(stored) is list and type(own) is list and len(stored) == len(own):
        pairs = zip(stored, own, strict=True)
        return [_filled(one, other, _joined(name, number), names) for number, (one, other) in enumerate(pairs)]
    return stored


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _dcp_state_dict(checkpoint: Checkpoint, prefix: str, leaves: dict[str, object], value: object) -> object:
    """Return the ``state_dict()`` called ``prefix``, which stock DCP flattened. ``leaves``: its leaves by name."""
    nested = _nested_at(checkpoint, prefix, leaves)
    if isinstance(value, torch.optim.Optimizer):  # DCP drops an empty ``state`` and makes its int keys text
        nested["state"] = _with_int_keys(nested.get("state", {}))
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
def _noting_refusal(
    target: StatefulTarget, state_dict: Any, checkpoint: Checkpoint, *, is_written: bool
) -> Iterator[None]:
    """Note on an error of ``load_state_dict`` which value refused which checkpoint, and whether the template changed.

    ``is_written``: whether this load has written to the template before.
    """
    try:
        yield
    except Exception as error:
        which = f"{checkpoint.path}" if checkpoint.is_plain_dcp else f"step {checkpoint.step} at {checkpoint.path}"
        if is_written:
            change = "the target was modified: tensors or values were filled before"
        elif _may_have_begun(target.value, state_dict):
            change = "the target may be modified: load_state_dict() may have taken a part before it raised"
        else:
            change = ""
        if change:
            mark_modified(error)
        remedy = _remedy(target, state_dict)
        error.add_note(
            f"aio_ckpt: load_state_dict() of {target.name or 'the template'!r}, a {type_name(target.value)}, refused "
            f"what {which} holds for it; {change or 'nothing was modified'}{remedy}"
        )
        raise


def _may_have_begun(value: Any, state_dict: Any) -> bool:
    """Return whether a ``load_state_dict`` that raised may have changed ``value``.

    A module of torch copies what agrees in name and shape and then raises for the rest. An optimizer of torch
    compares its groups first. Of other code, nothing is known.
    """
    if isinstance(value, torch.optim.Optimizer):
        return not is_load_of_torch(value)
    if not isinstance(value, torch.nn.Module) or not is_load_of_torch(value):
        return True
    own: Mapping[str, Any] = value.state_dict()
    agree = (
        getattr(own[key], "shape", None) == getattr(state_dict[key], "shape", None) for key in own if key in state_dict
    )
    return any(agree) or any(map(has_load_hooks, value.modules()))


def _remedy(target: StatefulTarget, state_dict: Any) -> str:
    """Return the rest of a note: the options of ``load`` by which a module takes what is stored; '' if none helps."""
    if not isinstance(target.value, torch.nn.Module) or not isinstance(state_dict, Mapping):
        return ""
    own: Mapping[str, Any] = target.value.state_dict()
    remedies = [prefix_remedy(own, state_dict, name=target.name, branch=target.branch)]
    if own.keys() - state_dict.keys():
        remedies.append("allow_missing=True leaves what is not stored as it is")
    shapes = [
        (getattr(own[key], "shape", None), getattr(state_dict[key], "shape", None))
        for key in own.keys() & state_dict.keys()
    ]
    if any(one != other for one, other in shapes):
        remedies.append("skip_mismatched=True leaves tensors of another shape as they are")
    return "".join(f"; {remedy}" for remedy in remedies if remedy)


@contextmanager
def target_modified() -> Iterator[None]:
    """Note on an error of the block that the template may hold a mix of old and new values."""
    try:
        yield
    except Exception as error:
        mark_modified(error)
        raise
