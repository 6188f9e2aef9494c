"""All leaves of a state that cannot be stored, in one error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aio_ckpt.errors import UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.leaves.objects import encode_object
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.check_leaves import leaf_fault
from aio_ckpt.state.flatten import FlatState

_SHOWN = 10
"""Most leaves that one error names."""


@contextlib.contextmanager
def naming_all_faults(flat: FlatState) -> Iterator[None]:
    """If a leaf of ``flat`` is refused inside, raise an error of the same type that names all leaves to refuse."""
    try:
        yield
    except (UnsupportedLeafError, UnsafeObjectError) as error:
        faults = _faults(flat)
        if len(faults) < 2:
            raise
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        listed = "; ".join(faults[:_SHOWN])
        raise type(error)(f"{len(faults)} leaves cannot be stored: {listed}{more}") from error


def _faults(flat: FlatState) -> list[str]:
    """Return, for each leaf that cannot be stored, its name, why, and what to give instead."""
    faults = []
    for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True):
        fault = leaf_fault(name, value, kind)
        if fault is not None:
            faults.append(f"{name!r}: {fault}")
        elif kind is LeafKind.OBJECT:
            try:
                encode_object(name, value)
            except (UnsupportedLeafError, UnsafeObjectError) as error:
                faults.append(str(error))
    return faults
