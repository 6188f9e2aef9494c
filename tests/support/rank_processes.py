"""Real ranks: one process each, in a gloo group whose store lives in this process, as it does under torchrun."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from warm_python import WarmPython

from aio_ckpt import EngineConfig, SaveTicket, SyncCheckpointEngine

SOURCE = """
    import multiprocessing, sys
    from rank_processes import serve
    rank, count, port, key = sys.argv[1:]
    multiprocessing.current_process().authkey = bytes.fromhex(key)  # torch sends tensors by its sockets
    serve(int(rank), int(count), int(port))
"""
WAIT_SECS = 60.0
needs_list_keys = pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="TCPStore of torch before 2.10 cannot list its keys"
)


class Ranks:
    """``count`` processes that call functions of test modules, all at once or one by one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._unfinished: set[int] = set()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes: list[WarmPython] = []
        key = multiprocessing.current_process().authkey.hex()
        for rank in range(count):
            mine, theirs = socket.socketpair()
            with theirs:
                self.processes.append(
                    WarmPython(SOURCE, str(rank), str(count), str(self.store.port), key, options=(), stdin=theirs)
                )
            self._pipes.append(Connection(mine.detach()))

    def start(self, rank: int, fn: Callable[..., object], *args: object) -> None:
        """``rank`` begins ``fn(rank, count, *args)``."""
        self._unfinished.add(rank)
        self._pipes[rank].send((fn, args))

    def finish(self, rank: int, timeout: float = WAIT_SECS) -> Any:
        """What the function of ``rank`` returned; AssertionError with its traceback if it raised."""
        assert self._pipes[rank].poll(timeout), f"rank {rank} is not done after {timeout} s"
        try:
            failure, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.wait_until_dead(rank)
            raise AssertionError(f"rank {rank} died with exit code {self.processes[rank].returncode}") from None
        assert not failure, f"rank {rank}:\n{failure}"
        self._unfinished.remove(rank)
        return value

    @property
    def is_clean(self) -> bool:
        """Whether every rank lives, and every call has ended without an error: others may use these ranks."""
        return not self._unfinished and all(process.poll() is None for process in self.processes)

    def run(self, fn: Callable[..., object], *args: object, timeout: float = WAIT_SECS) -> list[Any]:
        """``fn(rank, count, *args)`` on every rank; what each returned."""
        for rank in range(self.count):
            self.start(rank, fn, *args)
        found, failures = [], []
        for rank in range(self.count):  # every one, so that the next call finds all of them idle
            try:
                found.append(self.finish(rank, timeout))
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)
        return found

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Look until it holds: for what another process does."""
        deadline = time.monotonic() + WAIT_SECS
        while not holds():
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.001)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(rank, signal.SIGKILL)
        self.wait_until_dead(rank)

    def wait_until_dead(self, rank: int) -> None:
        """For one that ends of its own."""
        self.processes[rank].wait(WAIT_SECS)

    def close(self) -> None:
        """End every process."""
        for process in self.processes:
            process.kill()
            process.wait(WAIT_SECS)
        for pipe in self._pipes:
            pipe.close()


def engine_on(root: Path, stall_secs: float, **settings: Any) -> SyncCheckpointEngine:
    """One rank's engine, which gives up on the others after ``stall_secs``."""
    return SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=stall_secs, budget_bytes=64 << 20, **settings))


def error_of(save: Callable[[], SaveTicket], secs: float) -> BaseException | None:
    """What a save fails with, in the call or behind it."""
    try:
        return save().exception(secs)
    except Exception as error:  # noqa: BLE001 - the caller's to judge
        return error


class Pools:
    """Ranks that the tests of a worker share, one pool for each number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def of(self, count: int) -> Ranks:
        """Idle ranks: those of the test before, or new ones if that test left them in another state."""
        found = self._pools.get(count)
        if found is not None and not found.is_clean:
            found.close()
            found = None
        if found is None:
            found = self._pools[count] = Ranks(count)
        return found

    def close(self) -> None:
        """End every process."""
        for running in self._pools.values():
            running.close()


@contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """Processes for one test, or one module."""
    running = Ranks(count)
    try:
        yield running
    finally:
        running.close()


def serve(rank: int, count: int, port: int) -> None:
    """Call what :class:`Ranks` sends to standard input, until it ends."""
    pipe = Connection(os.dup(0))
    faulthandler.enable()  # a crash of native code names its line, on standard error
    torch.set_num_threads(1)  # as torchrun does: together the ranks have more threads than the machine has cores
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=WAIT_SECS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(WAIT_SECS - 5)  # one that hangs shows where
        try:
            pipe.send(("", fn(rank, count, *args)))
        except Exception:  # noqa: BLE001 - the parent's to judge
            pipe.send((traceback.format_exc(), None))
        finally:
            faulthandler.cancel_dump_traceback_later()
