"""Names of a template as the checkpoint has them, where keys are equal as text: by the keys themselves. Pure.

Of two leaves of one name the second has a marked name (``0`` and ``0~2``), in the order of the state that was saved. A
template may have another order, or one of the two alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.state.flatten import Template
from aio_ckpt.state.names import NamedKeys, compound_keys, leaf_keys

__all__ = ["named_as_stored"]


def named_as_stored(checkpoint: Checkpoint, template: Template, rank: int) -> tuple[Template, list[str]]:
    """The template with the names of the checkpoint, and why some of its leaves have none.

    Names that are not marked on either side are kept: a leaf may have been saved by another rank, or under a key that
    is equal as text alone.
    """
    catalog = checkpoint.catalog
    is_marked = any("~" in "".join(names) for names in (template.names, catalog.shards, catalog.objects))
    if not is_marked or not checkpoint.has_skeleton:
        return template, []
    taken = catalog.names()
    skeleton = skeleton_of(checkpoint, rank)
    stored = [leaf for leaf in leaf_keys(skeleton, rank=rank) if leaf.name not in checkpoint.names]
    names, faults = _paired(leaf_keys(template.skeleton, rank=rank), stored, taken)
    compounds, _ = _paired(compound_keys(template.skeleton, rank=rank), compound_keys(skeleton, rank=rank), ())
    own = dict(zip(compounds, template.compounds.values(), strict=True))
    return replace(template, names=names, compounds=own), faults


def _paired(
    own: Sequence[NamedKeys], stored: Sequence[NamedKeys], taken: Collection[str]
) -> tuple[list[str], list[str]]:
    """Names of ``own`` in ``stored``; a name outside of ``taken`` for a leaf whose own name another leaf has there."""
    by_keys = {leaf.keys: leaf.name for leaf in stored}
    others, held = {*by_keys.values()}, {leaf.keys for leaf in own}
    left = {leaf.text: leaf.name for leaf in stored if leaf.keys not in held}
    own_count, stored_count = (Counter(leaf.text for leaf in leaves) for leaves in (own, stored))
    names: list[str] = []
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
        names.append(_free(leaf.name, taken if leaf.name in others else ()) if name is None else name)
    return names, faults


def _free(name: str, taken: Collection[str]) -> str:
    free, number = name, 2
    while free in taken:
        free, number = f"{name}~{number}", number + 1
    return free
