"""Remedies for names that a checkpoint lacks: what is stored instead, and how a load gets it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

import torch

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.message_texts import SHOWN, first_of
from aio_ckpt.state.names import branches_of, is_below, joined, listed


def prefix_remedy(own: Iterable[str], given: Collection[str], *, name: str, branch: str | None) -> str:
    """Return how ``rename=`` fits the keys that a module was given to its own; '' unless they differ by one prefix.

    A wrapper (``torch.compile``, DDP) puts one prefix before all keys.

    Args:
        own: keys of the module in the template.
        given: keys that are stored for it.
        name: name of the module in the template.
        branch: stored name of the branch that the module is given; None if it is given leaves of several.
    """
    keys = list(own)
    missing, unexpected = [key for key in keys if key not in given], sorted(set(given).difference(keys))
    if not missing or not unexpected:
        return ""
    if branch is not None and (prefix := _prefix(unexpected, missing)):
        pair = missing[0], missing[0].removeprefix(f"{prefix}.")
        rename = f"rename={{{branch!r}: {joined(name, prefix)!r}}} adds the prefix"
    elif branch is not None and (prefix := _prefix(missing, unexpected)):
        pair = missing[0], f"{prefix}.{missing[0]}"
        rename = f"rename={{{joined(branch, prefix)!r}: {name!r}}} takes the prefix off"
    else:
        return ""
    return f"the template has {pair[0]!r} where {pair[1]!r} is stored: {rename}"


def saved_elsewhere(checkpoint: Checkpoint, missing: Sequence[str], rank: int) -> str:
    """Return that other ranks saved all ``missing`` names, and the remedy; '' if one of the names is not stored.

    A Stateful value gets what its own rank saved. A leaf is read whoever saved it, and so is not missing then.
    """
    if not checkpoint.has_skeleton or checkpoint.union is not None or len(owners := checkpoint.owners()) < 2:
        return ""
    stored = {branch for name in checkpoint.catalog.names() for branch in branches_of(name)}
    if not stored.issuperset(missing):
        return ""
    for owner, *others in owners.values():
        if rank not in (owner, *others) and any(is_below(name, missing[0]) for name in checkpoint.names_of(owner)):
            return (
                f"rank {rank} did not save {listed(missing)}, and a value with load_state_dict() gets what its own "
                f"rank saved ({missing[0]!r} is of rank {owner}): give its state_dict() in its place, and call its "
                "load_state_dict() after the load"
            )
    return ""


def missing_remedies(
    checkpoint: Checkpoint, state: object, missing: Sequence[str], unexpected: Sequence[str], *, taken: Set[str]
) -> list[str]:
    """Return what to give to ``load`` instead.

    Args:
        state: the template.
        missing: names of the template that the checkpoint lacks.
        unexpected: stored names that are not loaded.
        taken: all names of the template.
    """
    if remedy := _per_rank_remedy(missing, checkpoint):
        return [remedy]
    left_out = {name for name, new in checkpoint.names.items() if new is None} & taken  # by rename= alone
    lacked = [name for name in unexpected if name not in left_out]
    # If ranks saved names of their own, what is close to a missing name may be another layer.
    are_alike = not checkpoint.has_skeleton or len(checkpoint.owners()) < 2
    unmoved = [name for name in lacked if checkpoint.names.get(name, name) == name]
    remedies = [
        _renamed_remedy(checkpoint, taken, missing),
        _list_remedy(missing[0], state, checkpoint.catalog.names())
        or _branch_remedy(checkpoint, state, missing, taken)
        or _kind_remedy(missing[0], unmoved)
        or (_close_remedy(missing, lacked) if are_alike else ""),
        "allow_missing=True leaves them as they are",
    ]
    return [*filter(None, remedies)]


def _branch_remedy(checkpoint: Checkpoint, state: object, missing: Sequence[str], taken: Set[str]) -> str:
    """Return the ``rename=`` if the template is one branch of the stored state, or has that as its own branch; else ''.

    As where a trainer saves ``{"model": model, ...}`` and an evaluation loads ``model``, or the other way round.
    """
    stored = {*checkpoint.catalog.names()}
    if checkpoint.names:  # the caller has renamed already
        return ""
    ends = [name.removesuffix(f".{missing[0]}") for name in stored if name.endswith(f".{missing[0]}")]
    found = sorted(branch for branch in ends if all(f"{branch}.{name}" in stored for name in missing))
    # A Stateful value that is the template takes all that is stored, whatever its own names are. Of dicts, the branch
    # has all names; one name alone may be anywhere, as "step" in each parameter's state of an optimizer.
    is_branch = hasattr(state, "load_state_dict") or (len(missing) > 1 and taken <= {*missing})
    if is_branch and 0 < len(found) <= SHOWN:
        branch = found[0]
        above, outside = {*branches_of(branch)}, [name for name in stored if not is_below(name, branch)]
        others = sorted({top for name in outside for top in [at for at in branches_of(name) if at not in above][-1:]})
        rename, more = {branch: ""} | dict.fromkeys(others), ""
        if len(others) > SHOWN:
            rename, more = {branch: ""}, f", with None for each of the {len(others)} branches beside it,"
        where = first_of([*map(repr, found)])
        return f"all of them are stored below {where}: rename={rename}{more} loads those of {branch!r}"
    return _wrapped_remedy(state, missing, stored, taken)


def _wrapped_remedy(state: object, missing: Sequence[str], stored: Set[str], taken: Set[str]) -> str:
    """Return the ``rename=`` if a branch of the template is stored without the prefix of that branch; else ''."""
    free, tried = {*stored}.difference(taken), set[str]()
    for name in missing:
        module = _value_at(state, name)
        if isinstance(module, torch.nn.Module):  # its state_dict() may wait for other ranks
            own = [key for key, _ in module.named_parameters()]
            if own and free.issuperset(own):
                return _adding_prefix(name, f"{_expression(name)}.state_dict()")
        for branch in branches_of(name.rpartition(".")[0]):
            if branch and branch not in tried and name.removeprefix(f"{branch}.") in free:
                tried.add(branch)
                if all(each.removeprefix(f"{branch}.") in free for each in missing if is_below(each, branch)):
                    return _adding_prefix(branch, _expression(branch))
    return ""


def _adding_prefix(branch: str, keys: str) -> str:
    rename = f"{{key: f'{branch}.{{key}}' for key in {keys}}}"
    return f"what {branch!r} lacks is stored without that prefix: rename={rename} adds it (state: the template)"


def _expression(name: str) -> str:
    return "state" + "".join(f"[{part!r}]" for part in name.split("."))


def _value_at(state: Any, name: str) -> object:
    """Return the value called ``name`` in nested dicts; None if there is none."""
    for part in name.split("."):
        state = state.get(part) if isinstance(state, dict) else None
    return state


def _list_remedy(name: str, state: Any, stored: Collection[str]) -> str:
    """Return what to give in the place of a list of the template that is longer than the stored one.

    '' if the missing ``name`` is not of an entry of such a list. Lists are looked for in dicts alone.
    """
    entry = ""
    for part in name.split("."):
        branch, entry = entry, joined(entry, part)
        if type(state) is list:
            has_any, has_entry = (any(is_below(each, at) for each in stored) for at in (f"{branch}.0", entry))
            text = f"{branch!r} is longer than the list that is stored: [] in its place takes all of that"
            return text if has_any and not has_entry else ""
        state = state.get(part) if isinstance(state, dict) else None
    return ""


def _kind_remedy(name: str, unexpected: Sequence[str]) -> str:
    """Return what is stored below the missing ``name``, or as a branch that it lies below; '' if nothing is.

    ``unexpected``: stored names that the template lacks.
    """
    example = next((other for other in unexpected if is_below(other, name)), None)
    if example is not None:
        return f"it holds names below {name!r} ({example!r}): give a container with these, or {{}} to take all"
    above = {*branches_of(name)}.intersection(unexpected)
    return f"it holds one value as {min(above)!r}, where the template has names below that" if above else ""


_MOST_COMPARED = 1000
"""Most stored names that are compared with a missing one. A comparison takes about 20 us."""


def _close_remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return which ``rename=`` loads a stored leaf or branch for the first missing one; if none is close, what is left.

    ``unexpected``: stored names that the template lacks.
    """
    name = missing[0]
    above, _, last = name.rpartition(".")
    near = [other for other in unexpected if other.rpartition(".")[0] == above or other.rpartition(".")[2] == last]
    # A module in the template is one name, and many below it are stored.
    beside = (branch for other in unexpected for branch in branches_of(other) if branch.rpartition(".")[0] == above)
    candidates = [*dict.fromkeys((*near[:_MOST_COMPARED], *beside))][:_MOST_COMPARED]
    other = _closest(name, [*filter(None, candidates)])
    if other is not None and _closest(other, missing[:_MOST_COMPARED]) == name:
        old, new = other.split("."), name.split(".")
        while old[-1] == new[-1] and min(len(old), len(new)) > 1:
            old, new = old[:-1], new[:-1]
        if old == new:  # the caller's own rename= has moved it, which another remedy tells
            return ""
        return f"rename={{{'.'.join(old)!r}: {'.'.join(new)!r}}} loads {other!r} as {name!r}"
    if not unexpected:
        return ""
    return f"it holds {listed(unexpected)}, which the template lacks, and rename= maps stored names to the template's"


def _closest(name: str, others: Sequence[str]) -> str | None:
    """Return which of ``others`` is closest to ``name``; None if none is close, or several are equally close.

    A guess among several could load one layer's weights into another of the same shape.
    """
    found = difflib.get_close_matches(name, others, n=2)
    ratios = [difflib.SequenceMatcher(None, other, name).ratio() for other in found]
    return found[0] if found and len({*ratios}) == len(ratios) else None


def _prefix(bare: Collection[str], wrapped: Collection[str]) -> str | None:
    """Return what stands before each of ``bare`` in ``wrapped``, without its dot; None if that is not one prefix."""
    first = min(bare)
    found = [key.removesuffix(f".{first}") for key in wrapped if key.endswith(f".{first}")]
    return next((prefix for prefix in found if {f"{prefix}.{key}" for key in bare} == set(wrapped)), None)


def _renamed_remedy(checkpoint: Checkpoint, taken: Set[str], missing: Iterable[str]) -> str:
    """Return the stored names that ``rename=`` gives names which the template lacks; '' if there is none.

    If the template has all of them, return the missing ones that are stored, and what ``rename=`` calls them.
    """
    unused = sorted(checkpoint.stored_names.keys() - taken)
    pairs = [f"{checkpoint.stored_names[name]!r} as {name!r}" for name in unused]
    if not pairs:
        pairs = [f"{name!r} as {new!r}" for name in missing if (new := checkpoint.names.get(name)) is not None]
    return f"rename= gives it {first_of(pairs)}" if pairs else ""


def _per_rank_remedy(missing: Iterable[str], checkpoint: Checkpoint) -> str:
    """Return the remedy if a missing name differs from a stored one by ``PerRank`` alone (``w``, ``w.rank0``); else ''.

    It may be the ``PerRank`` value of a rank that did not save, too.
    """
    for name in missing:
        bare, _, rank = name.rpartition(".rank")
        if rank.isdigit() and int(rank) >= checkpoint.world_size and checkpoint.holds(f"{bare}.rank0"):
            return (
                f"{bare!r} is PerRank, and rank {rank} did not save: {checkpoint.world_size} saved. On ranks that are "
                "new, leave it out of the template, or give allow_missing=True, which leaves it as it is"
            )
        if rank.isdigit() and checkpoint.holds(bare):
            return f"it holds {bare!r} of all ranks: give that without PerRank"
        if checkpoint.holds(f"{name}.rank0"):
            return f"it holds {name!r} of each rank by itself: give it as PerRank(...)"
    return ""
