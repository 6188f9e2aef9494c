"""Paths of object stores: joined and taken apart like any path, and never one of this host."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, RootError
from aio_ckpt.remote_path import RemotePath, check_place

URL = "s3://bucket/runs/a/step_000000001"


def test_a_place_is_taken_apart_and_joined_like_a_path() -> None:
    path = RemotePath.of(URL)
    assert path is not None
    assert (str(path), path.name, path.key, path.bucket_url) == (
        URL,
        "step_000000001",
        "runs/a/step_000000001",
        "s3://bucket",
    )
    assert str(path.parent) == "s3://bucket/runs/a"
    assert str(path / ".metadata") == f"{URL}/.metadata"
    assert str(path.with_name("x")) == "s3://bucket/runs/a/x"
    assert (path / ".metadata").is_relative_to(path)
    assert str((path / "a" / "b").relative_to(path)) == "a/b"
    assert path.is_absolute()
    assert path.absolute() == path == pickle.loads(pickle.dumps(path))
    assert {path: 1}[RemotePath.of(URL)] == 1


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket//a//b/", "s3://bucket/a/b"),
        ("S3://bucket/A", "s3://bucket/A"),
        (Path("s3://bucket/a"), "s3://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
    ],
)
def test_the_urls_of_object_stores_are_places(given: str | Path, url: str) -> None:
    place = check_place("path", given)
    assert isinstance(place, RemotePath)
    assert str(place) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s3://", "no place in a bucket: give s3://BUCKET/PATH"),
        ("s3:///a", "no place in a bucket"),
        ("s3://bucket/a?X-Amz-Signature=abc", "without a query"),
        ("s3://bucket/a\\b", "a backslash, which some stores take for a slash: give another place"),
        ("s3a://bucket/a", "give s3://BUCKET/PATH"),
        ("gcs://bucket/a", "give gs://BUCKET/PATH"),
        ("s3://key:hidden@bucket/a", "give them by the environment"),
        ("s3://key:hidden/abc@bucket/a", "give them by the environment"),
        ("https://key:hidden@host/a?token=abc", "'https://host/a': a URL"),
        ("ftp:/key:hidden@host/a", "'ftp:/host/a': a URL"),
    ],
)
def test_what_is_no_place_is_refused_and_no_credential_repeated(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_place("path", given)
    assert "hidden" not in str(caught.value)
    assert "abc" not in str(caught.value)
    with pytest.raises((ConfigError, RootError)) as refused:
        SyncCheckpointEngine(given)
    assert "hidden" not in str(refused.value)
    assert "abc" not in str(refused.value)


def test_no_call_of_the_system_takes_a_place_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = check_place("path", URL)
    for call in (
        os.stat,
        os.listdir,
        os.mkdir,
        open,
        os.path.realpath,
        Path.exists,
        Path.is_dir,
        Path.mkdir,
        lambda place: place.iterdir(),
    ):
        with pytest.raises(TypeError, match="is in an object store"):
            list(call(path))
    assert os.listdir(tmp_path) == []
