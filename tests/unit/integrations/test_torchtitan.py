"""The manager for torchtitan without torchtitan. With it: ``tests/integrations/test_torchtitan.py``."""

from __future__ import annotations

import sys

import pytest


def test_without_torchtitan_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.components.checkpointer", None)
    monkeypatch.delitem(sys.modules, "aio_ckpt.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"torchtitan 0\.3\.0 .*known to work.*pip install torchtitan"):
        import aio_ckpt.integrations.torchtitan  # noqa: F401
