"""``python -m bench.scale``: what the leader does for thousands of ranks, by the constants of hundreds measured here.

No processes: the leader's own code is given the messages that so many ranks would send. Its costs are sums over ranks,
items and objects; two sizes give the cost of each, a third tells how far off the sum is.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from aio_ckpt import tree
from aio_ckpt.agreement import Assigned, Book, Planned, Written, decode_report, spans_crc32
from aio_ckpt.frames import Frame, pack, unpack
from aio_ckpt.holdings import Holding, LocalPlan, Look
from aio_ckpt.manifest import FileEntry, rank_manifest_name
from aio_ckpt.record import render_metadata_file, render_root
from bench.measure import Spread
from bench.options import log, parse
from bench.report import FigureRow, Goal, Report, publish

__all__ = ["main"]

T = TypeVar("T")
_RANKS, _ITEMS = 10_000, 1_000
_OBJECTS = 1
"""Of each rank's own: a random state."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Seconds and bytes of the leader at one size."""

    ranks: int
    """Ranks."""
    items: int
    """Tensor items of each."""
    assign_secs: float
    """First save: who writes what."""
    render_secs: float
    """First save: ``.metadata``, by DCP's planner."""
    gather_secs: float
    """A later save: the messages, taken apart and checked."""
    metadata_secs: float
    """A later save: ``.metadata`` filled and summed."""
    root_secs: float
    """A later save: the root manifest."""
    message_bytes: float
    """A later save: of one rank's message, as it stands in the store."""
    plan_bytes: float
    """First save: of one rank's message."""
    metadata_bytes: int
    """Length of ``.metadata``."""
    memory_bytes: int
    """A later save: most memory taken beside what the leader keeps."""


def main() -> None:
    """Run the bench."""
    options = parse("scale", __doc__ or "")
    sizes = ((8, 20), (16, 20), (8, 40)) if options.quick else ((50, 200), (200, 200), (50, 800), (1_000, 20))
    leaders = []
    for ranks, items in sizes:
        log(f"{ranks} ranks of {items} items")
        leaders.append(_measure(ranks, items))
    figures = [row for leader in leaders for row in _rows(leader)]
    few, many, wide = leaders[:3]
    a_rank = (few.gather_secs / few.ranks, many.root_secs / many.ranks, wide.metadata_secs / wide.ranks)
    an_item = _slope(few, wide, lambda leader: leader.render_secs + leader.assign_secs) / few.ranks
    memory_bytes = wide.memory_bytes / wide.ranks * _RANKS
    metadata_bytes = wide.metadata_bytes / (wide.ranks * wide.items) * _RANKS * _ITEMS
    figures.append(_figure(f"{_RANKS} ranks x {_ITEMS} items, modelled: .metadata, kept", metadata_bytes / 1e6, "MB"))
    title = f"{_RANKS:,} ranks x {_ITEMS:,} items, modelled"
    goals = [
        Goal(text=f"{title}: a later save costs the leader", figure=sum(a_rank) * _RANKS, bound=1.0, unit="s"),
        Goal(text=f"{title}: it receives", figure=many.message_bytes * _RANKS / 1e6, bound=2.0, unit="MB"),
        Goal(text=f"{title}: memory that it takes", figure=memory_bytes / (1 << 20), bound=64.0, unit="MiB"),
        Goal(text=f"{title}: a first save costs the leader", figure=an_item * _RANKS * _ITEMS, bound=30.0, unit="s"),
    ]
    report = Report(bench="scale", settings=options.settings(), figures=figures, goals=goals)
    log(f"wrote {publish(report, options.folder, out=options.out, writes_readme=options.write)}")


def _slope(few: Leader, wide: Leader, cost: Callable[[Leader], float]) -> float:
    """Seconds of one more item on every rank."""
    return (cost(wide) - cost(few)) / (wide.items - few.items)


def _rows(leader: Leader) -> list[FigureRow]:
    at = f"{leader.ranks} ranks x {leader.items} items: "
    values = [
        ("first save, who writes what", leader.assign_secs * 1e3, "ms"),
        ("first save, .metadata by DCP's planner", leader.render_secs * 1e3, "ms"),
        ("first save, message of a rank", leader.plan_bytes, "bytes"),
        ("later save, messages taken apart", leader.gather_secs * 1e3, "ms"),
        ("later save, .metadata filled and summed", leader.metadata_secs * 1e3, "ms"),
        ("later save, root manifest", leader.root_secs * 1e3, "ms"),
        ("later save, message of a rank", leader.message_bytes, "bytes"),
        ("later save, memory", leader.memory_bytes / 1e6, "MB"),
        (".metadata", leader.metadata_bytes / 1e6, "MB"),
    ]
    return [_figure(at + text, value, unit) for text, value, unit in values]


def _figure(text: str, value: float, unit: str) -> FigureRow:
    return FigureRow(text=text, values=Spread.of([value]), unit=unit)


def _measure(ranks: int, items: int) -> Leader:
    book = Book(ranks)
    reports: list[Planned | Written] = [_planned(rank, ranks, items) for rank in range(ranks)]
    plan_bytes = sum(len(pack(Frame(0, msgspec.msgpack.encode(report)))) for report in reports) / ranks
    words, assign_secs = _timed(lambda: book.assign(reports))
    firsts = [_written(word, items, is_first=True) for word in words]
    book.learn(firsts)
    template, render_secs = _timed(lambda: book.template(firsts))
    data = b"".join(
        pack(Frame(rank, msgspec.msgpack.encode(_written(word, items, is_first=False))))
        for rank, word in enumerate(words)
    )
    later, gather_secs = _timed(lambda: _gather(book, data))
    tracemalloc.start()
    metadata, metadata_secs = _timed(
        lambda: render_metadata_file(template, book.learn(later), checkpoint_id="root/step_000000001", save_id="s-1")
    )
    entries = [FileEntry(rank_manifest_name(rank), 1000, rank) for rank in range(ranks)]
    _, root_secs = _timed(lambda: render_root(metadata, entries, step=1, save_id="s-1", created_unix=1.0, metrics={}))
    memory_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _, metadata_secs = _timed(
        lambda: render_metadata_file(template, book.learn(later), checkpoint_id="root/step_000000001", save_id="s-1")
    )
    return Leader(
        ranks=ranks,
        items=items,
        assign_secs=assign_secs,
        render_secs=render_secs,
        gather_secs=gather_secs,
        metadata_secs=metadata_secs,
        root_secs=root_secs,
        message_bytes=len(data) / ranks,
        plan_bytes=plan_bytes,
        metadata_bytes=sum(map(len, metadata.parts)),
        memory_bytes=memory_bytes,
    )


def _gather(book: Book, data: bytes) -> list[Written]:
    reports = [decode_report(frame.body) for frame in unpack(data)]
    book.check(reports)
    written = [report for report in reports if isinstance(report, Written)]
    book.learn(written)
    return written


def _planned(rank: int, ranks: int, items: int) -> Planned:
    """One rank of a model whose every tensor is sharded by rows."""
    holdings = tuple(
        Holding((f"model.layers.{number}.weight",), (4 * rank, 0), Look((4, 64), (4 * ranks, 64), "bfloat16"))
        for number in range(items)
    )
    state = {"model": {"layers": {str(number): {"weight": 0} for number in range(items)}}}
    skeleton = tree.encode_skeleton(tree.flatten(state, rank=rank).skeleton)
    objects = tuple(f"rng.rank{rank}.{number}" for number in range(_OBJECTS))
    return Planned(1, LocalPlan.of(holdings, objects, skeleton), struct.pack(f"<{items}I", *range(items)))


def _written(word: Assigned, items: int, *, is_first: bool) -> Written:
    spans = tuple((items * 1500 + 3000 * number, 3000) for number in range(_OBJECTS))
    moved = tuple((number, *span) for number, span in enumerate(spans)) if is_first else ()
    places = np.array([(1500 * number, 1500) for number in range(items)], "<i8").tobytes() if is_first else None
    secs = (0.001234, 0.123456, 1.234567)
    return Written(123_456, word.share_id, 40 * items, 0xFFFFFFFF, secs, moved, spans_crc32(spans), places)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
