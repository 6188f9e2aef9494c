"""What the tests of the command line share: a root with the steps 10 and 20."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import state

from aio_ckpt.cli import sources
from aio_ckpt.config import EngineConfig
from aio_ckpt.sync import SyncCheckpointEngine


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "root"
    with SyncCheckpointEngine(root, EngineConfig()) as engine:
        engine.save(state(), step=10).result()
        engine.save(state(), step=20).result()
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names that conversions of this process read."""
    names: list[str] = []
    real = sources.read_leaves

    async def read_leaves(ctx, checkpoint, wanted, **options):
        names.extend(wanted)
        return await real(ctx, checkpoint, wanted, **options)

    monkeypatch.setattr(sources, "read_leaves", read_leaves)
    return names
