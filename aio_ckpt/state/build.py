"""Build a nested state, or a part of it, from its skeleton and leaves. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aio_ckpt.errors import CorruptCheckpointError, MissingNameError, UnsafeObjectError
from aio_ckpt.format.restricted_unpickler import check_key
from aio_ckpt.leaves.arrays import from_tensor
from aio_ckpt.leaves.compound import CompoundTensor, plain_form, put_together, put_together_like
from aio_ckpt.leaves.containers import Form, Opened, decode_metadata, open_container
from aio_ckpt.leaves.keys import HELD_KEYS, Key, key_text, thaw_key
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.names import NamedNode, children_of, containers_of, is_selected
from aio_ckpt.state.skeleton import KEYED, MAPPINGS, TENSOR_WITH_GRAD, Container, Skeleton

_FORMS: dict[int, Form] = {
    **dict.fromkeys(map(int, MAPPINGS), "mapping"),
    Container.FIELDS: "fields",
    Container.TUPLE: "tuple",
    Container.LIST: "list",
}
"""Form that the noted type of a container must have, by its code."""

_MISSING = object()
_NO_NOTES: dict[str, Any] = {}


def build(
    skeleton: Skeleton,
    leaves: Mapping[str, object],
    *,
    rank: int,
    only: Collection[str] | None = None,
    trusted: bool = False,
    plain: list[str] | None = None,
    untrusted: dict[str, str] | None = None,
) -> object:
    """Return the nested state that has these leaves, given by name. PerRank is unwrapped.

    Arrays and numpy scalars are given as tensors. ``only``: names to keep, with all values below; other elements of a
    list or tuple become None. ``plain`` gets a line for each container whose type has changed. ``untrusted``, if given,
    gets the versions of modules that only running code reads, with the reason; the state lacks them.

    Raises:
        MissingNameError: ``only`` selects nothing, or ``leaves`` lacks a selected leaf.
    """
    builder = _Builder(
        leaves=leaves,
        rank=rank,
        only=None if only is None else frozenset(only),
        trusted=trusted,
        plain=[] if plain is None else plain,
        untrusted=untrusted,
    )
    value: object = builder.value(skeleton, "", False)
    if value is _MISSING:
        raise MissingNameError(f"the checkpoint holds nothing named or below {sorted(only or ())[:5]}")
    if builder.absent:
        raise MissingNameError(f"the checkpoint lacks {len(builder.absent)} leaves of its state: {builder.absent[:5]}")
    return value


def build_part(
    part: NamedNode,
    name: str,
    leaves: Mapping[str, object],
    *,
    rank: int,
    trusted: bool = False,
    own: Mapping[str, CompoundTensor] | None = None,
    plain: list[str] | None = None,
    untrusted: dict[str, str] | None = None,
) -> object:
    """Return the value called ``name``, such as a ``state_dict()``, from leaves given by full name.

    ``part``: its part of the skeleton, by :func:`aio_ckpt.state.names.find_named`.
    ``own``: compound tensors of the value that takes the result, by full name. Their types are made without trust.
    ``plain``, ``untrusted``: as in :func:`build`.

    Raises:
        MissingNameError: ``leaves`` lacks one of its leaves.
    """
    builder = _Builder(
        leaves=leaves,
        rank=rank,
        only=None,
        trusted=trusted,
        own=own or {},
        plain=[] if plain is None else plain,
        untrusted=untrusted,
        number=part.number,
    )
    built: object = builder.value(part.node, f"{name}." if name else "", True)
    if builder.absent:
        lost = builder.absent
        raise MissingNameError(f"the checkpoint lacks {len(lost)} leaves of {name!r}: {lost[:5]}")
    return built


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Recursive build of containers around leaves."""

    leaves: Mapping[str, object]
    rank: int
    """Rank whose PerRank values are built."""
    only: frozenset[str] | None
    """Names to keep, with all below; None keeps all."""
    trusted: bool
    """True: reading types and keys may run code."""
    own: Mapping[str, CompoundTensor] = field(default_factory=dict)
    """Compound tensors of the value that takes the result, by name. The caller has made their types."""
    number: int = 0
    """Number of the next container."""
    made: dict[int, Any] = field(default_factory=dict)
    """Built containers by their number."""
    with_grad: dict[int, torch.Tensor] = field(default_factory=dict)
    """Built tensors that require gradients, by the id of the given leaf."""
    compounds: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    """Built compound tensors, by their notes and the ids of their parts: tied names get one tensor."""
    absent: list[str] = field(default_factory=list)
    """Names of the leaves that were selected and not given."""
    plain: list[str] = field(default_factory=list)
    """Names and types of the containers whose type has changed."""
    untrusted: dict[str, str] | None = None
    """Reasons why versions of modules are left out, by name. None: such versions are an error."""

    def value(self, node: Skeleton, prefix: str, is_kept: bool) -> Any:
        """Return the value at ``node``; ``_MISSING`` if it is not selected. ``prefix``: its name and a dot."""
        if isinstance(node, int):
            return self.leaf(prefix[:-1], node, is_kept)
        is_kept = is_kept or self.only is None or is_selected(prefix[:-1], self.only)
        if len(node) == 3 and node[0] in MAPPINGS:
            return self.plain_mapping(node, prefix, is_kept)
        if node[0] == Container.TENSOR:
            return self.compound(node, prefix, is_kept)
        number, notes = self.number, dict(node[3]) if len(node) > 3 else _NO_NOTES
        self.number += 1
        if node[0] == Container.REFERENCE:
            return self.made.get(notes["same"], _MISSING) if is_kept else _MISSING
        if "same" in notes and self.only is None and notes["same"] in self.made:
            self.number += containers_of(node) - 1
            return self.made[notes["same"]]
        number = notes.get("same", number)
        opened = self.opened(node[0], notes, prefix[:-1]) if "type" in notes else None
        parts: Any = MAPPINGS.get(node[0], dict)() if node[0] in KEYED else []
        self.made[number] = parts if opened is None or opened.value is None else opened.value
        is_any = False
        for part, text, child in children_of(node, self.rank):
            item = self.value(child, f"{prefix}{text}.", is_kept)
            is_any = is_any or item is not _MISSING
            if node[0] not in KEYED:
                parts.append(None if item is _MISSING else item)
            elif item is not _MISSING:
                parts[part if type(part) is str else self.key(part)] = item
        if not is_kept and not is_any:
            return _MISSING
        self.made[number] = made = self.finished(opened, parts, node[0], notes, prefix[:-1])
        return made

    def plain_mapping(self, node: Any, prefix: str, is_kept: bool) -> Any:
        """Return a mapping without notes: the fast path, as thousands of parameters have a state each."""
        made = self.made[self.number] = MAPPINGS[node[0]]()
        self.number += 1
        for key, text, child in children_of(node, self.rank):
            item = self.value(child, f"{prefix}{text}.", is_kept)
            if item is not _MISSING:
                made[key if type(key) is str else self.key(key)] = item
        return made if is_kept or made else _MISSING

    def compound(self, node: Any, prefix: str, is_kept: bool) -> Any:
        """Return a compound tensor; a dict of the selected parts if not all are selected."""
        items = [
            (key, self.value(child, f"{prefix}{text}.", is_kept)) for key, text, child in children_of(node, self.rank)
        ]
        parts = {key: item for key, item in items if item is not _MISSING}
        if len(parts) < len(items):
            return parts or _MISSING
        key = (node[3], *map(id, parts.values()))
        if key not in self.compounds:
            made = self.put_together(dict(node[3]), parts, prefix[:-1])
            if made is None:
                self.note_plain(dict(node[3]), prefix[:-1])
                return plain_form(parts)
            self.compounds[key] = made
        return self.compounds[key]

    def put_together(self, notes: Mapping[str, Any], parts: Mapping[str, Any], name: str) -> torch.Tensor | None:
        """Return the compound tensor of these parts; None if its type may not be made."""
        if name in self.own and "type" in notes:
            return put_together_like(self.own[name], parts)
        try:
            return put_together(notes, parts, trusted=self.trusted)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{name!r}: its parts are of no tensor: {error}") from error

    def opened(self, code: int, notes: Mapping[str, Any], name: str) -> Opened | None:
        """Return an opened container of the noted type; None if the container becomes a plain one."""
        try:
            found = open_container(notes, form=_FORMS.get(code), trusted=self.trusted)
        except Exception:  # noqa: BLE001 - whatever a type's own __new__ raises
            found = None
        if found is None:
            self.note_plain(notes, name)
        return found

    def note_plain(self, notes: Mapping[str, Any], name: str) -> None:
        """Add a value whose type has changed to ``plain``."""
        self.plain.append(f"{name or 'the state'} ({str(notes['type']).replace(':', '.')})")

    def finished(self, opened: Opened | None, parts: Any, code: int, notes: Mapping[str, Any], name: str) -> Any:
        """Return the container of these parts, with the versions that a ``state_dict()`` carries."""
        made: Any = tuple(parts) if code == Container.TUPLE else parts[0] if code == Container.PER_RANK else parts
        if opened is not None:
            try:
                made = opened.finish(parts)
            except Exception:  # noqa: BLE001 - whatever a type's own code raises
                self.note_plain(notes, name)
        if "metadata" in notes and isinstance(made, OrderedDict):
            try:
                made._metadata = decode_metadata(notes["metadata"], name=name, trusted=self.trusted)  # type: ignore[attr-defined]
            except UnsafeObjectError as error:
                if self.untrusted is None:
                    raise
                self.untrusted[f"{name}._metadata"] = str(error)
        return made

    def key(self, key: Key) -> Any:
        """Return a mapping's key; its text if only running code reads the key."""
        if key[0] not in HELD_KEYS:
            return thaw_key(key)
        try:
            thawed = thaw_key(key, trusted=self.trusted)
            check_key(thawed)
            hash(thawed)
        except UnsafeObjectError:
            self.plain.append(f"the key {key_text(key)} (its text)")
            return key_text(key)
        except (TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"the key {key_text(key)}: {error}") from error
        return thawed

    def leaf(self, name: str, code: int, is_kept: bool) -> object:
        """Return the value of the next leaf, ``_MISSING`` if it is not selected or not given."""
        if not (is_kept or self.only is None or is_selected(name, self.only)):
            return _MISSING
        value = self.leaves.get(name, _MISSING)
        if value is _MISSING:
            self.absent.append(name)
        elif isinstance(value, torch.Tensor):
            if code == TENSOR_WITH_GRAD:
                return self.tensor_with_grad(value)
            return from_tensor(value, LeafKind(code))
        return value

    def tensor_with_grad(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that requires gradients. Tied names get one tensor."""
        if not (value.is_floating_point() or value.is_complex()):
            return value
        if id(value) not in self.with_grad:
            self.with_grad[id(value)] = value.detach().requires_grad_()
        return self.with_grad[id(value)]
