"""Upload of a data file: order, failure, end, and the memory of its copies."""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from aio_ckpt.errors import WriteError
from aio_ckpt.runtime.portal import watch_submissions
from aio_ckpt.storage.object_upload import PART_BYTES, ObjectUpload, _Parts

TIMEOUT = 60.0


async def test_ranges_that_arrive_in_any_order_make_the_object_in_order() -> None:
    put: list[bytes] = []
    upload, data = ObjectUpload(Path("any"), lambda parts: put.extend(map(bytes, parts))), os.urandom(3 * PART_BYTES)
    ends = [0, 7, PART_BYTES + 7, 3 * PART_BYTES - 1, len(data)]
    ranges = list(itertools.pairwise(ends))
    async with asyncio.TaskGroup() as group:
        for start, stop in ranges[2:] + ranges[:2]:
            group.create_task(upload.write(start, memoryview(data)[start:stop]))
    await upload.sync()
    assert b"".join(put) == data
    assert list(map(len, put)) == [PART_BYTES] * 3  # full parts, whatever the ranges


async def test_each_range_of_an_upload_that_fails_raises_its_error() -> None:
    def put(parts: Iterator[memoryview]) -> None:
        next(parts)
        raise OSError(errno.EACCES, "not yours")

    upload, held = ObjectUpload(Path("any"), put), list[Future[Any]]()
    with watch_submissions(held.append):
        data = memoryview(bytes(3 * PART_BYTES))
        writes = [
            asyncio.ensure_future(upload.write(start, data[start : start + PART_BYTES]))
            for start in (0, 2 * PART_BYTES, PART_BYTES)
        ]
        await asyncio.wait(writes)
        late = asyncio.ensure_future(upload.write(data.nbytes, data[:4]))
        await asyncio.wait([late])
    assert [str(each.exception()) for each in (*writes, late)] == [f"[Errno {errno.EACCES}] not yours: 'any'"] * 4
    assert len(held) == 4
    assert all(each.done() for each in held)  # nobody waits for ever for memory of this save


async def test_an_upload_that_is_closed_makes_no_object_and_copies_no_more() -> None:
    copied, failed, begun, gate = list[bytes](), list[str](), threading.Event(), threading.Event()

    def put(parts: Iterator[memoryview]) -> None:
        copied.append(bytes(next(parts)))
        begun.set()
        gate.wait(TIMEOUT)
        try:
            copied.extend(map(bytes, parts))
        except OSError as error:
            failed.append(str(error))
            raise

    upload, data = ObjectUpload(Path("any"), put), memoryview(bytes(PART_BYTES))
    writes = [asyncio.ensure_future(upload.write(number * PART_BYTES, data)) for number in range(3)]
    assert await asyncio.to_thread(begun.wait, TIMEOUT)
    closing = asyncio.ensure_future(upload.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert copied == [data]
    assert failed == [f"[Errno {errno.ECANCELED}] the upload was given up"]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), WriteError, WriteError]


def test_the_memory_of_a_part_is_used_again_once_nothing_holds_the_part() -> None:
    parts = _Parts()
    held, places = parts.take(), set[int]()
    held[:4] = b"held"
    for _ in range(3):
        part = parts.take()
        part[:4] = b"next"
        places.add(np.frombuffer(part, np.uint8).ctypes.data)
        end = part[2:4]
        del part
        assert np.frombuffer(parts.take(), np.uint8).ctypes.data not in places  # the end of the part holds it
        del end
    assert len(places) == 1
    assert held[:4] == b"held"


def test_the_memory_of_parts_goes_back_to_the_system() -> None:
    data = memoryview(bytes(PART_BYTES))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def upload(_: int) -> None:
        parts = _Parts()
        held = [parts.take() for _ in range(4)]
        assert [parts.copy(data, part) for part in held] == [PART_BYTES] * 4
        del held, parts

    begun = resident()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(upload, range(8)))
        assert resident() - begun < 16 << 20
