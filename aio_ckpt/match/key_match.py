"""Match by keys: stored names for the leaves of a template whose keys are equal as text (``0`` and ``"0"``). Pure.

If two leaves have one name, the second has a marked one (``0~2``), in the order of the saved state. The template may
have another order, or one of the two leaves alone. Therefore the keys themselves are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.state import flatten as tree

__all__ = ["named_as_stored"]


def named_as_stored(checkpoint: Checkpoint, template: tree.Template, rank: int) -> tuple[tree.Template, list[str]]:
    """Return the template with the names of the checkpoint, and the faults of leaves that have no such name.

    If no name is marked on either side, the names are kept: another rank may have saved the leaf, or the key may be
    equal as text only.
    """
    catalog = checkpoint.catalog
    is_marked = any("~" in "".join(names) for names in (template.names, catalog.shards, catalog.objects))
    if not is_marked or not checkpoint.has_skeleton:
        return template, []
    taken = catalog.names()
    skeleton = skeleton_of(checkpoint, rank)
    stored = [leaf for leaf in tree.leaf_keys(skeleton, rank=rank) if leaf.name not in checkpoint.names]
    names, faults = _paired(tree.leaf_keys(template.skeleton, rank=rank), stored, taken)
    compounds, _ = _paired(
        tree.compound_keys(template.skeleton, rank=rank), tree.compound_keys(skeleton, rank=rank), ()
    )
    own = dict(zip(compounds, template.compounds.values(), strict=True))
    return replace(template, names=names, compounds=own), faults


def _paired(
    own: Sequence[tree.NamedKeys], stored: Sequence[tree.NamedKeys], taken: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the name of each leaf of ``own`` among ``stored``, and the faults.

    A leaf that is not stored gets a name outside of ``taken`` if another stored leaf has its name.
    """
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
