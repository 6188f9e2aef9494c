"""Places of stored values: measure the data files, check that each value lies inside its file, and parse envelopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from aio_ckpt.checkpoint.catalog import Item, StoredObject, UnparsedItem
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.errors import MismatchError
from aio_ckpt.format.tensor_zip import HEAD_BYTES, TAIL_BYTES
from aio_ckpt.runtime.portal import Executor, run_blocking

L = TypeVar("L", bound=Item | StoredObject)
Ends: TypeAlias = dict[int, tuple[bytearray, bytearray]]
"""First and last bytes of items, by the ``id`` of the item."""


async def locate(
    files: Files,
    stored: Sequence[Item | UnparsedItem | StoredObject],
    lengths: Mapping[str, int | None],
    parse: Callable[[UnparsedItem, bytearray, bytearray], L],
    *,
    executor: Executor,
    readers: int,
) -> list[Item | StoredObject | L]:
    """Measure the files of stored values, check that each value lies inside its file, and parse the envelopes.

    Args:
        lengths: length of each file by its manifest; None if none tells it.
        parse: :func:`parse_item`, or :func:`parse_or_object`.

    Raises:
        CorruptCheckpointError: a value lies outside its file, is damaged, or contradicts the metadata.
        UnsupportedLeafError: see ``parse``.
        ReadError: the operating system could not read.
    """
    await files.measure({each.file for each in stored}, lengths)
    for each in stored:
        if isinstance(each, StoredObject):
            check_inside(each.name, each.file, each.offset, each.nbytes, files.sizes)
    unparsed_items = [each for each in stored if isinstance(each, UnparsedItem)]
    if not unparsed_items:
        return list(stored)  # type: ignore[arg-type]  # none is an UnparsedItem
    ends = await read_ends(files, unparsed_items, executor=executor, readers=readers)

    def parsed() -> list[Item | StoredObject | L]:
        return [parse(each, *ends[id(each)]) if isinstance(each, UnparsedItem) else each for each in stored]

    return await run_blocking(executor, parsed)


async def read_ends(files: Files, unparsed_items: Sequence[UnparsedItem], *, executor: Executor, readers: int) -> Ends:
    """Read the bytes of each item that :func:`parse_item` needs.

    Raises:
        CorruptCheckpointError: an item lies outside its file.
    """
    ends: Ends = {}
    plan = ReadPlan()
    for unparsed in unparsed_items:
        check_inside(unparsed.name, unparsed.file, unparsed.item_offset, unparsed.item_bytes, files.sizes)
        head, tail = (bytearray(min(unparsed.item_bytes, nbytes)) for nbytes in (HEAD_BYTES, TAIL_BYTES))
        ends[id(unparsed)] = head, tail
        plan.add_bytes(unparsed.file, unparsed.item_offset, head, unparsed.name)
        plan.add_bytes(unparsed.file, unparsed.item_offset + unparsed.item_bytes - len(tail), tail, unparsed.name)
    await fetch(files, plan.requests(readers), executor=executor, readers=readers, verify=False)
    return ends


def check_inside(name: str, file: str, offset: int, nbytes: int, sizes: Mapping[str, int]) -> None:
    """Raise MismatchError if the place of an item does not lie inside its file. ``sizes``: length of each file."""
    if offset + nbytes > sizes[file] or not nbytes:
        raise MismatchError(
            f"{file}: {name!r} at bytes {offset} to {offset + nbytes} is not inside the file of {sizes[file]} bytes"
        )
