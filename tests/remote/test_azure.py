"""The calls of an engine on Azure Blob Storage, with the emulator Azurite: ``npm install -g azurite``."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aio_ckpt
from aio_ckpt import EngineConfig, SyncCheckpointEngine

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The one account of the emulator, by its documentation."""
TIMEOUT = 60.0
pytestmark = pytest.mark.slow


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    azurite, blobs = shutil.which("azurite-blob"), pytest.importorskip("azure.storage.blob")
    if azurite is None:
        pytest.skip("Azurite is missing: npm install -g azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [azurite, "--silent", "--skipApiVersionCheck", "--location", str(tmp_path / "azurite")]
    with subprocess.Popen([*command, "--blobPort", str(port)]) as server:
        try:
            _await_port(port, server)
            service = blobs.BlobServiceClient(
                f"{endpoint}/{ACCOUNT}", credential={"account_name": ACCOUNT, "account_key": KEY}
            )
            service.create_container("box")
            for name, value in (
                ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT),
                ("AZURE_STORAGE_ACCOUNT_KEY", KEY),
                ("AZURE_STORAGE_USE_EMULATOR", "true"),
                ("AZURITE_BLOB_STORAGE_URL", endpoint),
                ("AZURE_ALLOW_HTTP", "true"),
            ):
                monkeypatch.setenv(name, value)
            yield f"az://box/{uuid.uuid4().hex[:8]}"
        finally:
            server.kill()


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)  # until it listens
        else:
            return
    raise AssertionError("Azurite does not answer")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2_000_000,), value)}


def test_each_call_of_an_engine(container: str, tmp_path: Path) -> None:
    best = f"{container}/best"
    with SyncCheckpointEngine(f"{container}/run", EngineConfig(keep_last=3)) as engine:
        for step in range(1, 6):
            engine.save(weights(step), step=step, files={"card.md": b"mine"}).result(TIMEOUT)
        engine.save(weights(3.5), step=3, overwrite=True).result(TIMEOUT)
        for value in (8.0, 9.0):
            engine.save(weights(value), path=best).result(TIMEOUT)
        assert float(engine.read(path=best)["w"][0]) == 9.0
        engine.remove(best).result(TIMEOUT)
        assert engine.rollback(4) == [5]
        engine.protect(4)
    with SyncCheckpointEngine(f"{container}/run") as engine:
        engine.save(weights(6), step=6).result(TIMEOUT)
        engine.delete(3)
        assert engine.steps() == [4, 6]
        state = weights(0)
        assert engine.load(state).step == 6
        assert torch.equal(state["w"], weights(6)["w"])
    copied = aio_ckpt.copy(f"{container}/run/step_000000004", tmp_path / "back")
    assert torch.equal(aio_ckpt.read(copied.path)["w"], weights(4)["w"])
    aio_ckpt.copy(copied.path, f"{container}/other")
    assert torch.equal(aio_ckpt.read(f"{container}/other/step_000000004")["w"], weights(4)["w"])
