"""Targets of a load that have another dtype than what is stored, and whether its range is smaller. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from aio_ckpt.checkpoint.catalog import Shards

_TOLERANCE = 1.01
"""Factor between two ranges that count as equal: bfloat16 ends 0.4 % below float32."""


def changed(
    targets: Iterable[tuple[str, torch.dtype]],
    shards: Mapping[str, Shards],
    counts: Callable[[torch.dtype, torch.dtype], bool],
) -> tuple[str, ...]:
    """Return each target whose change of dtype counts, as ``'name' (stored -> own)``.

    Args:
        targets: names and dtypes of the tensors of the template.
        counts: whether a change from the stored dtype to the template's counts.
    """
    pairs = [(name, shards[name][0].dtype, dtype) for name, dtype in targets]
    counted = {pair for pair in {(stored, own) for _, stored, own in pairs} if counts(*pair)}
    return tuple(
        f"{name!r} ({_short(stored)} -> {_short(own)})" for name, stored, own in pairs if (stored, own) in counted
    )


def is_narrower(stored: torch.dtype, own: torch.dtype) -> bool:
    """Return whether ``stored`` has finite values beyond the range of ``own``. The precision does not count."""
    if stored is own:
        return False
    of, to = _range(stored), _range(own)
    return of is not None and to is not None and (of[0] < to[0] * _TOLERANCE or of[1] > to[1] * _TOLERANCE)


def _range(dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the least and the largest finite value; None if the dtype has no such range, as bool has none."""
    about = torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo
    try:
        found = about(dtype).min, about(dtype).max
    except (TypeError, NotImplementedError):
        return None
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
