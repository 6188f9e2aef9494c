"""``python -m bench.uring``: the write window by threads, as the engine writes, against io_uring.

Both write the same page-aligned memory in the same chunks to a fresh, preallocated file, ``depth`` writes in flight,
from the first submission until fdatasync has returned; creating and removing the file is not timed. The threads run
through aiofiles and an event loop, as in the engine; io_uring waits in one thread that does nothing else, without loop
and eventfd: what a backend of the engine could reach at best.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import anyio
import torch
from isal import isal_zlib

from aio_ckpt.plan.chunks import chunk_bytes_for
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.direct_io import RWF_DONTCACHE
from aio_ckpt.storage.local import Storage
from bench.common.limits import page_aligned
from bench.common.measure import Spread, cpu_secs
from bench.common.options import log
from bench.common.results import machine, out_folder
from bench.common.ring import Ring

__all__ = ["main"]

_CLOSE_SECS = 60.0
_WIN = 1.05
"""From this ratio on io_uring is worth its code."""
_NOT_HERE = frozenset({errno.EPERM, errno.ENOSYS, errno.EACCES, errno.ENOMEM})
"""What a kernel answers that has no io_uring, forbids it, or lets the user pin no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command line."""

    folders: tuple[Path, ...]
    """File systems to measure."""
    nbytes: int
    """Bytes of a file."""
    chunks: tuple[int, ...]
    """Sizes of one write."""
    depths: tuple[int, ...]
    """Writes in flight."""
    rounds: int
    """Timed ones."""
    out: Path
    """Where the JSON goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one contender does in one timed operation."""

    memory: mmap.mmap
    """The bytes."""
    chunk_bytes: int
    """Of one write."""
    depth: int
    """Writes in flight."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each write."""
        total = len(self.memory)
        return [(start, min(self.chunk_bytes, total - start)) for start in range(0, total, self.chunk_bytes)]

    @property
    def address(self) -> int:
        """Of the memory."""
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender at one depth and chunk size, on one file system."""

    folder: str
    """``disk`` or ``RAM disk``."""
    file_system: str
    """Its type."""
    mode: WriteMode
    """How the bytes go to the disk."""
    chunk_mib: float
    """MiB of one write."""
    depth: int
    """Writes in flight."""
    contender: str
    """Threads, or io_uring with plain or registered memory."""
    durable_gb_per_sec: Spread | None
    """None: it cannot run here."""
    cpu_secs_per_gb: float = 0.0
    """Median; threads of the kernel apart."""
    by_threads: float = 0.0
    """Median of the rounds' ratios to the threads of the same round, chunk and depth."""
    note: str = ""
    """Why it cannot run."""


def main() -> None:
    """Run the bench, print its rows and the verdict, write the JSON."""
    options = _parse()
    memory = page_aligned(options.nbytes)
    torch.frombuffer(memory, dtype=torch.int64).random_()
    rows: list[Row] = []
    described: dict[str, object] = {}
    for folder in options.folders:
        work = Path(tempfile.mkdtemp(prefix="aio_ckpt-uring-", dir=folder))
        try:
            for chunk_bytes in options.chunks:
                for depth in options.depths:
                    rows += _rows(work, Window(memory=memory, chunk_bytes=chunk_bytes, depth=depth), options.rounds)
            described = described or machine(work)
        finally:
            shutil.rmtree(work)
    verdict = _verdict(rows)
    print("\n".join([*_table(rows), "", *verdict]))
    options.out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    path = options.out / "uring.json"
    settings = {"bytes": options.nbytes, "rounds": options.rounds, "win": _WIN}
    document = {"date": date, "machine": described, "bench": "uring", "settings": settings, "verdict": verdict}
    path.write_text(json.dumps(document | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    log(f"wrote {path}")


def _parse() -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench.uring", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="on a RAM disk; '' leaves it out")
    parser.add_argument("--mib", type=int, help="MiB of a file (default 1024; 64 with --quick)")
    parser.add_argument("--chunk-mib", default="", help="comma-separated (default: the engine's smallest and largest)")
    parser.add_argument("--depths", default="1,2,4,8", help="writes in flight")
    parser.add_argument("--rounds", type=int, help="timed rounds, alternated (default 7; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    engines = (chunk_bytes_for(1), chunk_bytes_for(1 << 40))
    chosen = tuple(int(float(text) * 2**20) for text in given.chunk_mib.split(",") if text)
    return Options(
        folders=tuple(folder.absolute() for folder in (given.dir, given.ram) if folder != Path()),
        nbytes=(given.mib or (64 if given.quick else 1024)) << 20,
        chunks=chosen or engines,
        depths=tuple(map(int, given.depths.split(","))),
        rounds=given.rounds or (2 if given.quick else 7),
        out=out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=given.quick),
    )


# -- one window, timed ----------------------------------------------------------------------------


def _rows(work: Path, window: Window, rounds: int) -> list[Row]:
    """All contenders, alternated, after one round that warms up and whose files are compared."""
    path = work / "file"
    contenders: dict[str, Callable[[Path], _Timed]] = {
        "threads (aiofiles)": functools.partial(_by_threads, window),
        "io_uring": functools.partial(_by_ring, window, registers=False),
        "io_uring, registered": functools.partial(_by_ring, window, registers=True),
    }
    taken: dict[str, list[_Timed]] = {name: [] for name in contenders}
    refusals: dict[str, str] = {}
    expected = isal_zlib.crc32(window.memory)
    for number in range(rounds + 1):
        for name, run in contenders.items():
            if name in refusals:
                continue
            os.sync()
            try:
                timed = run(path)
            except OSError as error:
                if name.startswith("threads") or error.errno not in _NOT_HERE:
                    raise
                refusals[name] = f"cannot run here: {error.strerror}"
                continue
            finally:
                path.unlink(missing_ok=True)
            if number:
                taken[name].append(timed)
            elif timed.crc32 != expected:
                raise AssertionError(f"{name} wrote other bytes than it was given")
    return [_row(work, window, name, taken, refusals) for name in contenders]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    secs: float
    cpu_secs: float
    mode: WriteMode
    crc32: int


def _row(work: Path, window: Window, name: str, taken: dict[str, list[_Timed]], refusals: dict[str, str]) -> Row:
    threads, own = taken["threads (aiofiles)"], taken[name]
    gigabytes = len(window.memory) / 1e9
    is_disk = str(machine(work)["file_system"]) != "tmpfs"
    row = Row(
        folder="disk" if is_disk else "RAM disk",
        file_system=str(machine(work)["file_system"]),
        mode=threads[0].mode,
        chunk_mib=window.chunk_bytes / 2**20,
        depth=window.depth,
        contender=name,
        durable_gb_per_sec=Spread.of([gigabytes / timed.secs for timed in own]) if own else None,
        cpu_secs_per_gb=Spread.of([timed.cpu_secs for timed in own]).median / gigabytes if own else 0.0,
        by_threads=Spread.of([a.secs / b.secs for a, b in zip(threads, own, strict=True)]).median if own else 0.0,
        note=refusals.get(name, ""),
    )
    log(_cells(row))
    return row


@contextlib.contextmanager
def _stopwatch() -> Iterator[list[float]]:
    """[seconds, CPU seconds] of the block, at its end."""
    figures: list[float] = []
    cpu, began = cpu_secs(), time.perf_counter()
    yield figures
    figures += [time.perf_counter() - began, cpu_secs() - cpu]


def _by_threads(window: Window, path: Path) -> _Timed:
    return anyio.run(_by_engine, window, path)


async def _by_engine(window: Window, path: Path) -> _Timed:
    """The engine's data file and its window, without sums."""
    executor = Executor("bench-uring", window.depth)
    try:
        file = await Storage(executor).create_data_file(path, len(window.memory))
        view, spans = memoryview(window.memory), iter(window.spans)

        async def write() -> None:
            for start, nbytes in spans:
                await file.write(start, view[start : start + nbytes])

        try:
            with _stopwatch() as figures:
                async with anyio.create_task_group() as group:
                    for _ in range(window.depth):
                        group.start_soon(write)
                await file.sync()
        finally:
            await file.close()
    finally:
        executor.close(_CLOSE_SECS)
    return _Timed(secs=figures[0], cpu_secs=figures[1], mode=file.mode, crc32=_crc32_of(path))


def _by_ring(window: Window, path: Path, *, registers: bool) -> _Timed:
    """io_uring in the mode that the engine would choose for the file."""
    with Ring(window.depth) as ring:
        mode = anyio.run(_create, path, len(window.memory))
        spans = window.spans
        if registers:
            ring.register([(window.address + start, nbytes) for start, nbytes in spans])
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if mode == "direct" else 0))
        try:
            with _stopwatch() as figures:
                _drive(ring, window, file, registers=registers, flags=RWF_DONTCACHE if mode == "dontcache" else 0)
                os.fdatasync(file)
        finally:
            os.close(file)
    return _Timed(secs=figures[0], cpu_secs=figures[1], mode=mode, crc32=_crc32_of(path))


def _drive(ring: Ring, window: Window, file: int, *, registers: bool, flags: int) -> None:
    """Keep ``depth`` writes in flight until all are done; a short one is continued."""
    address = window.address
    waiting = [(start, start + nbytes, index) for index, (start, nbytes) in enumerate(window.spans)][::-1]
    flying: dict[int, tuple[int, int]] = {}
    while waiting or flying:
        while waiting and len(flying) < window.depth:
            start, stop, index = waiting.pop()
            flying[start] = (stop, index)
            buffer = index if registers else None
            ring.write(file, address + start, stop - start, start, buffer=buffer, flags=flags)
        for start, written in ring.completed():
            stop, index = flying.pop(start)
            if not written:
                raise OSError(errno.EIO, f"nothing was written at offset {start}")
            if start + written < stop:
                waiting.append((start + written, stop, index))


async def _create(path: Path, nbytes: int) -> WriteMode:
    executor = Executor("bench-uring", 1)
    try:
        file = await Storage(executor).create_data_file(path, nbytes)
        await file.write(0, memoryview(mmap.mmap(-1, mmap.PAGESIZE)))  # the first write shows the mode
        await file.close()
    finally:
        executor.close(_CLOSE_SECS)
    return file.mode


def _crc32_of(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return int(isal_zlib.crc32(content))


# -- what it says ---------------------------------------------------------------------------------


def _cells(row: Row) -> str:
    place = f"{row.folder} ({row.file_system}, {row.mode})"
    given = row.durable_gb_per_sec
    figures = (
        f"{given.median:.2f} | {given.low:.2f} .. {given.high:.2f} | {row.by_threads:.2f} | {row.cpu_secs_per_gb:.3f}"
        if given
        else f"{row.note} | | |"
    )
    return f"| {place} | {row.chunk_mib:g} | {row.depth} | {row.contender} | {figures} |"


def _table(rows: Sequence[Row]) -> list[str]:
    head = "| | chunk MiB | depth | | durable GB/s | min .. max | x threads | CPU-s/GB |"
    return [head, "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |", *map(_cells, rows)]


def _verdict(rows: Sequence[Row]) -> list[str]:
    """Per file system: which rows win, and the best of each side at any depth and chunk."""
    lines = []
    for folder in dict.fromkeys(row.folder for row in rows):
        here = [row for row in rows if row.folder == folder and row.durable_gb_per_sec is not None]
        threads = [row for row in here if row.contender.startswith("threads")]
        rings = [row for row in here if not row.contender.startswith("threads")]
        if not rings:
            lines.append(f"{folder}: io_uring cannot run here: {rows[1].note}")
            continue
        wins = [row for row in rings if row.by_threads >= _WIN]
        best, best_ring = max(map(_median, threads)), max(map(_median, rings))
        lines.append(
            f"{folder}: {len(wins)} of {len(rings)} rows of io_uring are {_WIN:.2f} x the threads at the same depth or "
            f"better; best of all depths: threads {best:.2f}, io_uring {best_ring:.2f} GB/s ({best_ring / best:.2f} x)"
        )
    return lines


def _median(row: Row) -> float:
    return 0.0 if row.durable_gb_per_sec is None else row.durable_gb_per_sec.median


if __name__ == "__main__":
    main()
