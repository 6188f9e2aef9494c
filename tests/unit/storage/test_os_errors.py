"""Errors of the operating system that a user can mend name the way out."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from aio_ckpt.errors import ReadError, WriteError
from aio_ckpt.storage.os_errors import translate_errors


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (errno.EMFILE, ReadError, f"may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open"),
        (errno.EMFILE, WriteError, r"raise the limit (ulimit -n)"),
        (errno.ENFILE, WriteError, "raise fs.file-max"),
        (errno.EFBIG, WriteError, "raise the limit on the size of files (ulimit -f)"),
        (errno.EROFS, WriteError, "give a path on a file system that is mounted for writing"),
        (errno.EACCES, WriteError, "give a path that this user may write to"),
        (errno.EACCES, ReadError, "let this user read it"),
        (errno.EIO, ReadError, "the kernel's log (dmesg) tells more"),
        (errno.ESTALE, ReadError, "look at the server, then mount it anew"),
        (errno.EEXIST, WriteError, "a file is in the way: move it"),
    ],
)
def test_an_error_with_a_known_way_out_names_it(
    tmp_path: Path, code: int, kind: type[WriteError | ReadError], remedy: str
) -> None:
    with pytest.raises(kind) as caught, translate_errors(kind, tmp_path):
        raise OSError(code, os.strerror(code))
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path))
    assert caught.value.strerror.startswith(f"{os.strerror(code)}: ")
    assert remedy in caught.value.strerror


@pytest.mark.parametrize(
    ("code", "text"), [(errno.EXDEV, os.strerror(errno.EXDEV)), (errno.EROFS, "said in other words")]
)
def test_another_error_keeps_its_text(tmp_path: Path, code: int, text: str) -> None:
    with pytest.raises(WriteError) as caught, translate_errors(WriteError, tmp_path):
        raise OSError(code, text)
    assert caught.value.strerror == text
