"""Cases of parametrized tests that the nightly alone runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """Return a case that repeats, elsewhere or at a larger size, what a case of the gate proves."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
