"""Stubs of experiment trackers, which cannot run here: TensorBoard is no dependency, and W&B needs an account."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

__all__ = ["install"]


class _Artifact:
    """Artifact of W&B, which takes the files of a directory."""

    def __init__(self, name: str, *, type: str, metadata: dict[str, object]) -> None:
        self.files: list[Path] = []

    def add_dir(self, path: str) -> None:
        self.files += [file for file in Path(path).rglob("*") if file.is_file()]

    def logged(self) -> _Artifact:
        assert any(file.suffix == ".distcp" for file in self.files)
        return self


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for ``torch.utils.tensorboard`` and ``wandb``. What is logged has to be numbers."""

    def add_scalar(name: str, value: object, step: int) -> None:
        assert isinstance(value, int | float), name

    def log(values: dict[str, object], *, step: int) -> None:
        for name, value in values.items():
            add_scalar(name, value, step)

    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter = lambda log_dir: SimpleNamespace(add_scalar=add_scalar)  # type: ignore[attr-defined]
    wandb.init = lambda *, project: SimpleNamespace(log=log, log_artifact=_Artifact.logged)  # type: ignore[attr-defined]
    wandb.Artifact = _Artifact  # type: ignore[attr-defined]
    for module in (tensorboard, wandb):
        monkeypatch.setitem(sys.modules, module.__name__, module)
