"""Match by keys: stored names for the leaves of a template whose keys are equal as text (``0`` and ``"0"``). Pure.

If two leaves have one name, the second has a marked one (``0~2``), in the order of the saved state. The template may
have another order, or one of the two leaves alone. Therefore the keys themselves are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.state.flatten import Template
from aio_ckpt.state.names import MARK, NamedKeys, compound_keys, leaf_keys, marked_name


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTemplate:
    """A template under the names of a checkpoint."""

    template: Template
    """The template, renamed."""
    names: Sequence[str] | None = None
    """Names of all leaves, in the order of the template. None: each leaf's name is its path."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Stand-in -> the template's own name of the leaf. The checkpoint gives that name to another leaf."""
    faults: list[str] = field(default_factory=list)
    """Reasons why leaves have no name in the checkpoint."""


def named_as_stored(checkpoint: Checkpoint, template: Template, rank: int) -> NamedTemplate:
    """Return the template under the names of the checkpoint.

    If no name is marked on either side, names are kept: another rank may have saved a leaf, or saved it under a key
    that is equal as text alone.
    """
    catalog = checkpoint.catalog
    is_marked = MARK in "".join(template.names)
    kept = NamedTemplate(template=template, names=template.names if is_marked else None)
    if not checkpoint.has_skeleton:
        return kept
    if not is_marked and not any(MARK in "".join(names) for names in (catalog.shards, catalog.objects)):
        return kept
    skeleton = checkpoint.skeleton(rank)
    own = leaf_keys(template.skeleton, rank=rank)
    stored = [leaf for leaf in leaf_keys(skeleton, rank=rank) if leaf.name not in checkpoint.names]
    found, faults = _paired(own, stored)
    names, stand_ins = _all_named(own, found, {leaf.name for leaf in stored}, catalog.names())
    own_compounds = compound_keys(template.skeleton, rank=rank)
    found, _ = _paired(own_compounds, compound_keys(skeleton, rank=rank))
    compound_names = [leaf.name if name is None else name for leaf, name in zip(own_compounds, found, strict=True)]
    compounds = dict(zip(compound_names, template.compounds.values(), strict=True))
    return NamedTemplate(
        template=replace(template, names=names, compounds=compounds),
        names=names if is_marked or names != template.names else None,
        stand_ins=stand_ins,
        faults=faults,
    )


def _paired(own: Sequence[NamedKeys], stored: Sequence[NamedKeys]) -> tuple[list[str | None], list[str]]:
    """Return the name that each of ``own`` has in ``stored`` (None: it has none), and why some are ambiguous."""
    by_keys = {leaf.keys: leaf.name for leaf in stored}
    held = {leaf.keys for leaf in own}
    left = {leaf.text: leaf.name for leaf in stored if leaf.keys not in held}
    own_count, stored_count = (Counter(leaf.text for leaf in leaves) for leaves in (own, stored))
    names: list[str | None] = []
    faults: list[str] = []
    for leaf in own:
        name = by_keys.get(leaf.keys)
        if name is None and leaf.text in left:
            name = left[leaf.text]
            if own_count[leaf.text] + stored_count[leaf.text] > 2:
                faults.append(
                    f"{leaf.text!r} is the name of several values, whose keys are equal as text, and the checkpoint "
                    "has other keys than the template: give those that were saved"
                )
        names.append(name)
    return names, faults


def _all_named(
    own: Sequence[NamedKeys], found: Sequence[str | None], stored: Collection[str], taken: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return a name for each of ``own``, and the stand-ins among them.

    A leaf that was not found keeps its own name. If that name is among ``stored``, it is another leaf's, and the leaf
    gets a stand-in: a name outside of ``taken``, so that the leaf is missing.
    """
    reserved = {*taken, *stored, *(leaf.name for leaf in own)}
    names: list[str] = []
    stand_ins: dict[str, str] = {}
    for leaf, name in zip(own, found, strict=True):
        if name is None and leaf.name in stored:
            name = _free(leaf.name, reserved)
            reserved.add(name)
            stand_ins[name] = leaf.name
        names.append(leaf.name if name is None else name)
    return names, stand_ins


def _free(name: str, taken: Collection[str]) -> str:
    """Return ``name`` with a mark that makes it none of ``taken``."""
    number = 2
    while (free := marked_name(name, number)) in taken:
        number += 1
    return free
