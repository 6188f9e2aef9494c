"""Paths that users give: what a URL names, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from aio_ckpt.argument_checks import check_path, local_name, local_path
from aio_ckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("runs/ckpt", "runs/ckpt"),
        ("/runs/12:30/ckpt", "/runs/12:30/ckpt"),
        ("./s3:/x", "./s3:/x"),
        ("runs/s3://x", "runs/s3://x"),
        ("file:///runs/ckpt", "/runs/ckpt"),
        ("FILE://localhost/runs/ckpt", "/runs/ckpt"),
        ("file:///a%20b/%3Fc%23", "/a b/?c#"),
        ("file:///a%ff", "/a\udcff"),
        ("file:///", "/"),
    ],
)
def test_a_file_url_names_its_path_and_a_path_itself(text: str, path: str) -> None:
    assert local_name(text) == path


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("s3://bucket/x", r"URL \(s3:\).*mount it.*aio-ckpt cp"),
        ("gs://bucket/x", "mount it.*aio-ckpt cp"),
        ("hf://org/model", "mount it.*hf download"),
        ("https://host/x", "mount it.*curl"),
        ("az://container/x", "mount it.*aio-ckpt cp"),
        (str(Path("s3://bucket/x")), "mount it"),
        ("file://host/x", "'host'.*file:///absolute/path"),
        ("file://runs/ckpt", "'runs'.*file:///absolute/path"),
        ("file://", "two slashes|no file URL"),
        ("file:///a?b", "%3F"),
        ("file:///a%00b", "no file URL"),
        (str(Path("file:///runs/ckpt")), "as a str"),
    ],
)
def test_any_other_url_is_refused_and_the_message_says_what_to_give(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        local_name(text)
    with pytest.raises(ConfigError, match=rf"^path='.*': .*({remedy})"):
        check_path("path", text)


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        (Path("/a/../b"), "/b"),
        ("s3://a/b", None),
        (Path("s3://a/b"), None),
        ("file://host/a", None),
        ("~/a", None),
    ],
)
def test_a_local_path_is_absolute_and_none_stands_for_what_is_no_path(path: str | Path, local: str | None) -> None:
    assert local_path(path) == (None if local is None else Path(local))
