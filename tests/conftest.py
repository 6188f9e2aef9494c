"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from rank_processes import Ranks, ranks

# A shell that starts a command in the background lets it ignore Ctrl-C, and so would every child of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's store asks for the host name of every client while all others wait; a name server that does not answer must
# not take longer than what these tests wait for a rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks for the tests of a module."""
    with ranks(2) as running:
        yield running


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four of them."""
    with ranks(4) as running:
        yield running
