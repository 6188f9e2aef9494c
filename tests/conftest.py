"""What holds for every test."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import property_examples  # noqa: F401 - registers the profiles before the plugin of Hypothesis chooses one
import pytest
import torch
from image_files import pin_chunk_bytes
from rank_processes import Pools, Ranks

# Workers and the processes of tests import compiled modules: compiling the tests takes ten seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts a command in the background lets it ignore Ctrl-C, and so would every child of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers and their processes are more than the cores. Threads of OpenMP spin while they wait for one that has no core:
# together they would take twice the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# torch's store asks for the host name of every client while all others wait; a name server that does not answer must
# not take longer than what these tests wait for a rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# pytest enters and leaves each logger that keeps its records to itself, six times a test: torch has 45 of them.
for logger in logging.Logger.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True


WORKERS = 4
"""More than the two cores of the smallest machine: many tests wait for a deadline."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of workers for ``-n auto``; 0 runs the tests in this process.

    On a machine with GPUs one process runs them all, because tests measure the memory of the devices.
    """
    if torch.cuda.is_available():
        return 0
    files = {given.partition("::")[0] for given in config.args}
    if all(os.path.isfile(file) for file in files):  # a worker runs whole files
        return min(WORKERS, len(files)) if len(files) > 1 else 0
    return WORKERS


def _import_tests_from_another_place_each(config: pytest.Config) -> None:
    """Import the modules of all tests, each worker from another one on.

    Workers that import them in one order all compile each of them, and none finds what another one has compiled.
    """
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None or config.args != config.getini("testpaths"):
        return
    files = sorted(config.rootpath.glob("tests/**/test_*.py"))
    first = int(workerinput["workerid"].removeprefix("gw")) * len(files) // workerinput["workercount"]
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection raises it again
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect the tests without collecting garbage, and never look again at what is there then.

    It lives as long as the tests: torch, the modules of the tests and their items, half a million objects.
    """
    gc.disable()
    try:
        _import_tests_from_another_place_each(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need GPUs; ``-m gpu`` runs them alone. Those of the nightly run have an hour each.

    Of a test marked ``sampled``, every case is ``slow`` but the first of those that the gate runs.
    """
    count = torch.cuda.device_count()
    sampled = set[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in sampled:
            item.add_marker("slow")
        elif item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            sampled.add(function)
        if item.get_closest_marker("campaign") or item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))
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


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Ranks for all tests of a worker: new ones cost a second of CPU time each, with what torch caches in them."""
    running = Pools()
    yield running
    running.close()


@pytest.fixture
def two(pools: Pools) -> Ranks:
    """Two ranks. A test that changes them for good, beyond killing one, makes ranks of its own."""
    return pools.of(2)


@pytest.fixture
def four(pools: Pools) -> Ranks:
    """Four of them."""
    return pools.of(4)
