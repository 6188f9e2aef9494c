"""Choice of the page cache: data files are read through it if ranks of one host read the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from aio_ckpt.checkpoint.catalog import Catalog, Shards, global_shape
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.leaves.tensor_memory import memory_of
from aio_ckpt.match.fills import Fills

_SHARING_PAYS_READERS = 1.5
"""Readers a byte from which on the page cache, which serves all but the first, beats O_DIRECT for each. 2 GiB on 32
cores and a disk of 2.2 GB/s: two readers take 0.60 to 0.63 of the time, four 0.34 to 0.38
(``bench/results/2-cores/load-shared.txt``); where two cores read 1 GiB at 3.5 GB/s, 0.95 to 1.4 of it."""


def is_read_by_several(wanted: int, stored: int, *, ranks_on_host: int) -> bool:
    """Return whether so many ranks read each byte that the page cache pays.

    Each of the two or more ranks of the host wants ``wanted`` of the ``stored`` bytes.
    """
    return ranks_on_host * wanted >= _SHARING_PAYS_READERS * stored > 0


def wanted_bytes(fills: Fills, catalog: Catalog) -> int:
    """Return about how many bytes of data files this rank will read for its tensors."""
    wanted = sum(item.raw_bytes for item, _, _ in fills.exact)
    for name, target, like, _ in fills.others:
        shards, holder = catalog.shards[name], target if target is not None else like
        wanted += _bytes_for(global_shape(shards) if holder is None else memory_of(holder).shape, shards)
    return wanted


def _bytes_for(box: Sequence[int], shards: Shards) -> int:
    """Return :func:`covering_bytes` for the shape of the first shard. Torch cuts all shards alike."""
    return covering_bytes(shards[0].shape, box, shards[0].dtype.itemsize)


def covering_bytes(chunk: Sequence[int], box: Sequence[int], itemsize: int) -> int:
    """Return about how many bytes are read for a box of a tensor that is stored in dense shards of shape ``chunk``.

    Gaps shorter than a block are read, too. The box is assumed to begin where a shard begins.
    """
    if 0 in chunk or 0 in box:
        return 0
    extent = stride = itemsize
    count = 1
    # Not strict, because a shard with a wrong number of dimensions is refused later.
    for size, wanted in zip(reversed(chunk), reversed(box), strict=False):
        count *= -(-wanted // size)
        length = min(wanted, size)
        is_read_through = stride - extent < BLOCK_BYTES
        extent = extent + (length - 1) * stride if is_read_through else extent * length
        stride *= size
    return count * extent
