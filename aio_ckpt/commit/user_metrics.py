"""Metrics of a step: the check of what the caller gave."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown


def check_metrics(metrics: Mapping[str, object] | None) -> dict[str, float | None]:
    """Return ``save(metrics=)`` as it is stored: numbers as floats, None for those that are not finite.

    Raises:
        ConfigError: a name that is no string or no UTF-8, or a value that is no single real number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={shown(metrics)}: give a dict of names and numbers")
    checked: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"metrics: {shown(name)} is no name: give a string")
        if name != name.encode(errors="ignore").decode():
            raise ConfigError(f"metrics: the name {shown(name)} has a lone surrogate, which no JSON holds: rename it")
        number = _number(name, value)
        checked[name] = number if math.isfinite(number) else None
    return checked


def _number(name: str, value: object) -> float:
    if isinstance(value, (str, bytes, bytearray)):
        raise ConfigError(f"metrics[{name!r}]: give a number, not text")
    try:
        item = getattr(value, "item", None)  # float() warns about a tensor that requires a gradient, such as a loss
        return float(item() if callable(item) else value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"metrics[{name!r}]: a {type(value).__name__} is no single number ({error})") from error
