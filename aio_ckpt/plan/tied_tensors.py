"""Tied tensors: leaves that share their bytes are stored once, under all their names."""

from __future__ import annotations

from collections.abc import Sequence

from aio_ckpt.plan.structure import Structure


def partition(structure: Structure, fingerprint: Sequence[int]) -> list[int]:
    """Return, per tensor leaf, the first leaf with the same bytes, dtype, shape and stride.

    Empty tensors share nothing.
    """
    first: dict[tuple[object, ...], int] = {}
    rows = zip(
        fingerprint,
        structure.dtypes,
        structure.shapes,
        structure.strides,
        structure.conj,
        structure.neg,
        structure.devices,
        strict=True,
    )
    return [
        position if not row[0] else first.setdefault((*row, *structure.shards.get(position, ())), position)
        for position, row in enumerate(rows)
    ]


def tied_names(names: Sequence[str], aliases: Sequence[int]) -> dict[int, list[str]]:
    """Return the names of each stored leaf. ``aliases``: per name, the first leaf that shares its bytes."""
    tied: dict[int, list[str]] = {}
    for name, first in zip(names, aliases, strict=True):
        tied.setdefault(first, []).append(name)
    return tied
