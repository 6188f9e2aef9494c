"""Rules of the package that neither import-linter nor ruff can express."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aio_ckpt

PACKAGE = Path(aio_ckpt.__file__).parent
FACES = ("cli", "dcp", "demo")


@pytest.mark.parametrize(
    ("pattern", "allowed", "reason"),
    [
        (
            r"\b(cuda|accelerator)\.synchronize\(",
            ("checkpoint", *FACES),
            "a save waits for its own copies, for no whole device",
        ),
        (r"\bempty_cache\(", FACES, "the caller's allocator is the caller's"),
        (r"\bdecode\(.*\btype=", (), "first decoded in two threads at once, a type crashes: a Decoder"),
        (r"\bdef __del__\b", ("ticket.py",), "resources belong to a with; a PendingCall only warns"),
    ],
)
def test_what_no_other_package_may_do(pattern: str, allowed: tuple[str, ...], reason: str) -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}
    assert {path for path in found if path.split("/")[0] not in allowed} == set(), reason


def test_only_the_tests_of_the_benches_import_them() -> None:
    tests = Path(__file__).parents[1]
    # The server of the tests in tests/remote is that of bench.remote.
    imports = re.compile(r"^\s*(from|import) bench\b(?!\.common(\.seaweedfs| import seaweedfs$))", re.M)
    found = [path for path in tests.rglob("*.py") if imports.search(path.read_text())]
    assert {path.relative_to(tests).parts[0] for path in found} == {"bench"}


def test_dir_shows_the_public_names_only() -> None:
    assert dir(aio_ckpt) == sorted(aio_ckpt.__all__)
