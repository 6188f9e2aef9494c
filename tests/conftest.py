"""What holds for every test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import property_examples  # noqa: F401 - registers the profiles before the plugin of Hypothesis chooses one
import pytest
import torch
from image_files import pin_chunk_bytes
from rank_processes import Ranks, ranks

# A shell that starts a command in the background lets it ignore Ctrl-C, and so would every child of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's store asks for the host name of every client while all others wait; a name server that does not answer must
# not take longer than what these tests wait for a rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


SHARED = frozenset({"two", "three", "four", "dead", "killed", "outcomes", "shown"})
"""Fixtures that start processes once for a module. pytest-xdist gives all tests of a module that use one of them to the
same worker; else every worker would start the processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where the GPUs are missing, and group what one worker has to run."""
    count = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            if item.get_closest_marker("gpu") is not None:  # the tests measure the memory of the devices
                item.add_marker(pytest.mark.xdist_group("gpu"))
            elif SHARED.intersection(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))
        for marker in item.iter_markers("gpu"):
            needed = marker.args[0] if marker.args else 1
            if count < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, and this machine has {count}"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where an engine shall make its root; it does not exist yet."""
    return tmp_path / "root"


@pytest.fixture
def chunks_of_4_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write moves 4 MiB, so that a test knows the number of writes."""
    pin_chunk_bytes(monkeypatch)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing below CRITICAL is logged: the test makes every failure itself."""
    logging.getLogger("aio_ckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("aio_ckpt").setLevel(logging.NOTSET)


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
