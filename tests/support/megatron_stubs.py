"""Megatron on a machine without triton, which ``megatron.core`` imports: no test here runs a kernel."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import typing
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch


class UnusedModule(ModuleType):
    """Module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def stub_triton() -> None:
    """Let ``import triton`` succeed, and ``torch.compile`` compile nothing, unless triton is installed.

    ``megatron.training`` is made for Python 3.12, and its modules for checkpoints import on 3.11 too.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
        return
    importlib.import_module("torch._dynamo")  # its first import looks for more of triton than the stub has

    for name in ("triton", "triton.language"):
        module = UnusedModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["triton"].__version__ = "3.0.0"  # type: ignore[attr-defined]
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    torch.compile = lambda fn=None, **_: fn or (lambda inner: inner)  # type: ignore[assignment]


def has_training() -> bool:
    """Whether the installed package contains ``megatron.training``, as wheels from 0.19 on do."""
    if importlib.util.find_spec("megatron") is None:
        return False
    return importlib.util.find_spec("megatron.training") is not None
