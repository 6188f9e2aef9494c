"""Choice of the page cache: data files are read through it if ranks of one host read the same bytes."""

from __future__ import annotations

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.read_plan import ReadPlan

_SHARING_PAYS_READERS = 1.5
"""Readers a byte from which on the page cache, which serves all but the first, beats O_DIRECT for each. 2 GiB on 32
cores and a disk of 2.2 GB/s: two readers take 0.60 to 0.63 of the time, four 0.34 to 0.38
(``bench/results/2-cores/load-shared.txt``); where two cores read 1 GiB at 3.5 GB/s, 0.95 to 1.4 of it."""


async def share_page_cache(files: Files, pieces: ReadPlan, stored_bytes: int, *, ranks_on_host: int) -> None:
    """Read through the page cache if so many ranks of this host read each byte that it pays.

    Each of the ``ranks_on_host`` ranks is assumed to read as much of the ``stored_bytes`` as ``pieces``.
    """
    wanted = ranks_on_host * pieces.total_bytes if ranks_on_host > 1 else 0
    if wanted >= _SHARING_PAYS_READERS * stored_bytes > 0:
        await files.share()
        await files.measure(pieces.rows, {})
