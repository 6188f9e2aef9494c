"""Store objects of obstore, and ``memory://``, as the place of a root and of a mirror."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from child_python import child_environment, python
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig, Mirror, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ConfigError, ReadError, RootError
from aio_ckpt.remote_path import RemotePath, place_of
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.storage.object_client import COMMITS, DOWNLOADS, UPLOADS
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.storage.object_upload import ObjectUpload
from bench.common.seaweedfs import KEY, SECRET

TIMEOUT = 60.0


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(value)), "name": f"value {float(value)}"}


def value_of(loaded: dict[str, Any]) -> float:
    value = float(loaded["w"][0])
    assert torch.equal(loaded["w"], torch.full((50_000,), float(value)))
    assert loaded["name"] == f"value {value}"
    return value


def saved(engine: SyncCheckpointEngine, *steps: int) -> None:
    for step in steps:
        engine.save(state(step), step=step).result(TIMEOUT)


@pytest.fixture
def s3_store(bucket: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store whose credentials and endpoint the environment does not hold."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return S3Store(
        "bucket",
        prefix=bucket.removeprefix("s3://bucket/") + "/run",
        endpoint=endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )


def test_each_call_works_in_a_store_in_memory() -> None:
    store = MemoryStore()
    with SyncCheckpointEngine(store, EngineConfig(keep_last=2)) as engine:
        saved(engine, 1, 2, 3)
        engine.protect(2)
        saved(engine, 4, 5)
        engine.save(state(50.0), step=5, overwrite=True).result(TIMEOUT)
        engine.save(state(7.0), path=engine.root / "best").result(TIMEOUT)
        engine.load(loaded := state(0.0))
        assert value_of(loaded) == 50.0
        assert value_of(engine.read(path=engine.root / "best")) == 7.0
        assert engine.rollback(4) == [5]
        assert engine.steps() == [2, 4]
        engine.unprotect(2)
        engine.delete(2)
    with SyncCheckpointEngine(store) as later:
        assert later.steps() == [4]
        assert value_of(later.read()) == 4.0


async def test_an_upload_begins_once_the_caller_has_copied_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked, begun = asyncio.Event(), threading.Event(), threading.Event()
    begin = ObjectUpload._begin

    async def wait_issued(_: CapturedChunks) -> None:
        asked.set()
        while not gate.is_set():
            await asyncio.sleep(0.01)

    def begin_now(upload: ObjectUpload) -> Any:
        begun.set()
        return begin(upload)

    monkeypatch.setattr(CapturedChunks, "wait_issued", wait_issued)
    monkeypatch.setattr(ObjectUpload, "_begin", begin_now)
    async with CheckpointEngine(MemoryStore()) as engine:
        ticket = engine.save(state(1.0), step=1)
        assert await asyncio.to_thread(asked.wait, TIMEOUT)
        assert not await asyncio.to_thread(begun.wait, 0.2)
        gate.set()
        await ticket
        assert value_of(await engine.read()) == 1.0


def test_two_engines_with_one_store_exclude_each_other() -> None:
    store = MemoryStore()
    with SyncCheckpointEngine(store) as first, SyncCheckpointEngine(store) as second:
        saved(first, 1)
        with pytest.raises(RootError, match="another engine of this process writes here"):
            saved(second, 2)


@pytest.mark.slow
def test_a_fork_of_a_process_that_used_stores_is_refused_and_does_not_hang() -> None:
    """Its copy of obstore has no threads."""
    child = """
        import os, sys, aio_ckpt
        from aio_ckpt.errors import EngineForkedError

        def save():
            with aio_ckpt.SyncCheckpointEngine("memory://any/run") as engine:
                engine.save({"note": "n"}, step=1).result(60)

        save()
        pid = os.fork()
        if pid == 0:
            for call in (save, lambda: aio_ckpt.read("s3://bucket/run/step_000000001")):
                try:
                    call()
                except EngineForkedError as error:
                    assert f"process {os.getppid()} has used object stores" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    run = subprocess.run(
        python(child, options=()), env=child_environment(), capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_each_engine_has_a_memory_of_its_own() -> None:
    with SyncCheckpointEngine("memory://any/run") as engine:
        saved(engine, 1)
        assert str(engine.save(state(2.0), step=2).result(TIMEOUT).path) == "memory://any/run/step_000000002"
        assert value_of(engine.read()) == 2.0
    with SyncCheckpointEngine("memory://any/run") as engine, pytest.raises(CheckpointNotFoundError):
        engine.read()


def test_the_credentials_of_a_store_object_are_used_and_told_nowhere(
    s3_store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with SyncCheckpointEngine(s3_store) as engine:
        saved(engine, 1)
        assert str(engine.root) == f"s3://bucket/{s3_store.prefix}"
        assert SECRET not in repr(engine.root) + repr(engine)
        assert value_of(engine.read()) == 1.0
    assert SECRET not in caplog.text


def test_a_root_of_a_store_object_is_that_of_its_url(
    s3_store: S3Store, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(s3_store) as engine:
        saved(engine, 1, 2)
        engine.rollback(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with SyncCheckpointEngine(f"s3://bucket/{s3_store.prefix}") as engine:
        assert engine.steps() == [1]
        saved(engine, 2)
    assert value_of(aio_ckpt.read(f"s3://bucket/{s3_store.prefix}/step_000000002")) == 2.0


def test_a_mirror_is_a_store_object(s3_store: S3Store, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(mirror=Mirror(s3_store))) as engine:
        path = engine.save(state(1.0), step=1).mirrored.result(TIMEOUT)
    assert str(path) == f"s3://bucket/{s3_store.prefix}/step_000000001"
    with SyncCheckpointEngine(tmp_path / "lost", EngineConfig(mirror=Mirror(s3_store))) as engine:
        assert value_of(engine.read()) == 1.0


def test_a_root_in_a_store_object_is_mirrored_to_a_disk(tmp_path: Path) -> None:
    with SyncCheckpointEngine(MemoryStore(), EngineConfig(mirror=Mirror(tmp_path / "mirror"))) as engine:
        path = engine.save(state(1.0), step=1).mirrored.result(TIMEOUT)
    assert path is not None
    assert value_of(aio_ckpt.read(path)) == 1.0


def test_the_environment_lets_a_store_object_use_http(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = S3Store("bucket", prefix=uuid.uuid4().hex, endpoint=s3_server, access_key_id=KEY, secret_access_key=SECRET)
    with SyncCheckpointEngine(store) as engine:
        assert engine.latest_step() is None


def test_a_store_object_gets_the_limits_of_time_that_a_commit_needs(s3_store: S3Store) -> None:
    with SyncCheckpointEngine(s3_store) as engine:
        storage = engine._ctx.storage
        assert isinstance(storage, AnyStorage)
        used = storage.store_of(RemotePath.of("s3://bucket/any"))
    for client, limits in ((used._store, COMMITS), (used._uploads, UPLOADS), (used._downloads, DOWNLOADS)):
        assert client.retry_config["retry_timeout"] == timedelta(seconds=limits.retry_secs)
        assert client.retry_config["max_retries"] > 1000  # so that the time alone counts
        assert client.client_options["timeout"] in (f"{limits.try_secs}s", f"{limits.try_secs // 60}m")
        assert client.client_options["allow_http"]
        assert client.prefix is None
    assert s3_store.retry_config is None


@pytest.mark.parametrize(
    ("store", "url"),
    [
        (S3Store("b", prefix="runs/a/"), "s3://b/runs/a"),
        (GCSStore("b", prefix="runs/a", skip_signature=True), "gs://b/runs/a"),
        (AzureStore("c", prefix="runs/a", account_name="x", account_key="a2V5"), "az://c/runs/a"),
    ],
)
def test_the_place_of_a_store_object_is_its_url(store: Any, url: str) -> None:
    assert str(place_of("root", store)) == url


@pytest.mark.parametrize("store", [LocalStore("/tmp"), HTTPStore.from_url(f"https://key:{SECRET}@host/x")])
def test_a_store_of_another_kind_is_refused_by_name(store: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"root={type(store).__name__}: give a store object") as refused:
        SyncCheckpointEngine(store)
    assert SECRET not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^Mirror\(place\)="):
        Mirror(store)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [("minio:9000", "give http://HOST:PORT or https://HOST"), ("http://127.0.0.1:1", "set AWS_ALLOW_HTTP=true")],
)
def test_an_endpoint_that_cannot_be_asked_is_told_with_the_remedy(
    endpoint: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    store = S3Store("b", prefix="run", endpoint=endpoint, access_key_id="k", secret_access_key="s", region="r")
    with SyncCheckpointEngine(store) as engine, pytest.raises(ReadError, match=words):
        engine.latest_step()


def test_a_file_is_saved_by_an_engine_whose_root_is_on_a_disk(tmp_path: Path) -> None:
    with SyncCheckpointEngine(MemoryStore()) as engine, pytest.raises(ConfigError, match="open an engine whose root"):
        engine.save_file(state(1.0), tmp_path / "x.pt")


def test_a_step_is_not_copied_into_a_whole_bucket(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        path = engine.save(state(1.0), step=1).result(TIMEOUT).path
    with pytest.raises(ConfigError, match="a whole bucket, which is no root"):
        aio_ckpt.copy(path, "s3://bucket")


def test_a_store_object_whose_settings_obstore_cannot_tell_is_refused() -> None:
    with pytest.raises(ConfigError, match="in client_options"):
        SyncCheckpointEngine(S3Store("b", prefix="run", allow_http=True))


def test_a_store_object_without_a_prefix_is_a_whole_bucket() -> None:
    with pytest.raises(AioCkptError, match=r"a whole bucket: give a place in it, such as .* with a prefix"):
        SyncCheckpointEngine(S3Store("b"))
