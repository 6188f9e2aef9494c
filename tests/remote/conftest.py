"""A real S3 server for the tests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator

import obstore
import pytest
from obstore.store import from_url

from bench.common import seaweedfs
from tests.remote.fault_proxy import Choose, fault_proxy


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server, which ends with the session."""
    try:
        with seaweedfs.s3_server(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
            yield endpoint
    except seaweedfs.MissingServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place in a bucket. The environment holds what a store needs."""
    for name, value in seaweedfs.environment(s3_server).items():
        monkeypatch.setenv(name, value)
    obstore.put(from_url("s3://bucket"), "first", b"")  # makes the bucket
    return f"s3://bucket/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def faulty(s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Choose], None]]:
    """From the call on, the environment leads to a proxy that makes requests fail."""
    with contextlib.ExitStack() as stack:

        def begin(choose: Choose) -> None:
            monkeypatch.setenv("AWS_ENDPOINT_URL", stack.enter_context(fault_proxy(s3_server, choose)))

        yield begin
