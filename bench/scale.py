"""``python -m bench.scale``: what the leader does for thousands of ranks, and what each of them reads to load.

No processes: the leader's own code is given the messages that so many ranks would send, in a model whose every tensor
is sharded by rows. Three small sizes give the cost of a rank and of an item on every rank, their sum is the model; the
whole size is measured too, at once, and tells how far off the model is.
"""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from aio_ckpt import PerRank
from aio_ckpt.commit.manifests import MetadataFile, render_metadata_file, render_root
from aio_ckpt.format.checkpoint_files import TRAILER_BYTES, rank_manifest_name
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.rank_manifest import decode_rank, encode_rank, encode_static
from aio_ckpt.format.root_manifest import FileEntry, decode_root
from aio_ckpt.format.tensor_columns import TensorEntry
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, TensorSignature
from aio_ckpt.ranks.messages import Frame, pack, unpack
from aio_ckpt.ranks.save_ledger import (
    AssignReply,
    ContentSums,
    Extent,
    Ledger,
    PlanMsg,
    Vote,
    extents_crc32,
)
from aio_ckpt.ranks.save_round import SAVE
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.skeleton import encode_skeleton
from bench.common.measure import Spread
from bench.common.options import log, parse
from bench.common.results import FigureRow, Goal, Report, publish

__all__ = ["main"]

T = TypeVar("T")
_RANKS, _ITEMS = 10_000, 1_000
_OBJECTS = 1
"""Of each rank's own: a random state."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Seconds and bytes of the leader at one size."""

    ranks: int
    items: int
    """Tensor items of each."""
    planned_secs: float
    """First save: what the ranks hold, taken apart and checked."""
    assign_secs: float
    """First save: who writes what."""
    words_secs: float
    """First save: the word to each rank."""
    written_secs: float
    """First save: what the ranks wrote and where, taken apart, checked and learned."""
    render_secs: float
    """First save: ``.metadata``, rendered, filled and summed."""
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

    @property
    def first_secs(self) -> float:
        """First save: all of it, the root manifest included."""
        parts = (self.planned_secs, self.assign_secs, self.words_secs, self.written_secs, self.render_secs)
        return sum(parts) + self.root_secs

    @property
    def later_secs(self) -> float:
        """A later save: all of it."""
        return self.gather_secs + self.metadata_secs + self.root_secs


def main() -> None:
    """Run the bench."""
    options = parse("scale", __doc__ or "")
    sizes = ((8, 20), (32, 20), (8, 80)) if options.quick else ((200, 250), (1_000, 250), (200, 1_000))
    _measure(*sizes[0])  # imports and caches
    leaders = []
    for ranks, items in sizes:
        log(f"{ranks} ranks of {items} items")
        leaders.append(_measure(ranks, items))
    few, many, wide = leaders
    figures = [row for leader in leaders for row in _rows(leader)]
    metadata_bytes = wide.metadata_bytes / (wide.ranks * wide.items) * _RANKS * _ITEMS
    figures.append(_figure(f"{_RANKS} ranks x {_ITEMS} items, modelled: .metadata, kept", metadata_bytes / 1e6, "MB"))
    figures += _load_rows(_RANKS, _ITEMS, metadata_bytes)
    title = f"{_RANKS:,} ranks x {_ITEMS:,} items"
    first_secs, later_secs = (_modelled(few, many, wide, cost) for cost in (_first_secs, _later_secs))
    received, memory_bytes = many.message_bytes * _RANKS / 1e6, many.memory_bytes / many.ranks * _RANKS
    goals = _goals(f"{title}, modelled", first_secs, later_secs, received, memory_bytes)
    if not options.quick:
        log(f"{_RANKS} ranks of {_ITEMS} items")
        whole = _measure(_RANKS, _ITEMS)
        figures += _rows(whole)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures.append(_figure(f"{title}: most memory of the process, all messages included", peak, "MiB"))
        received = whole.message_bytes * _RANKS / 1e6
        goals += _goals(f"{title}, measured", whole.first_secs, whole.later_secs, received, whole.memory_bytes)
    report = Report(bench="scale", settings=options.settings(), figures=figures, goals=goals)
    log(f"wrote {publish(report, options.folder, out=options.out)}")


def _goals(title: str, first_secs: float, later_secs: float, received_mb: float, memory_bytes: float) -> list[Goal]:
    return [
        Goal(text=f"{title}: a later save costs the leader", figure=later_secs, bound=1.0, unit="s"),
        Goal(text=f"{title}: it receives", figure=received_mb, bound=2.0, unit="MB"),
        Goal(text=f"{title}: memory that it takes", figure=memory_bytes / (1 << 20), bound=64.0, unit="MiB"),
        Goal(text=f"{title}: a first save costs the leader", figure=first_secs, bound=30.0, unit="s"),
    ]


def _modelled(few: Leader, many: Leader, wide: Leader, cost: Callable[[Leader], float]) -> float:
    """Seconds of the whole size: so much a rank, and so much an item of each rank."""
    an_item = (cost(wide) - cost(few)) / (wide.items - few.items) / few.ranks
    a_rank = (cost(many) - cost(few)) / (many.ranks - few.ranks) - an_item * few.items
    return max(a_rank, 0.0) * _RANKS + max(an_item, 0.0) * _RANKS * _ITEMS


def _first_secs(leader: Leader) -> float:
    return leader.first_secs


def _later_secs(leader: Leader) -> float:
    return leader.later_secs


def _rows(leader: Leader) -> list[FigureRow]:
    at = f"{leader.ranks} ranks x {leader.items} items: "
    values = [
        ("first save, plans taken apart", leader.planned_secs * 1e3, "ms"),
        ("first save, who writes what", leader.assign_secs * 1e3, "ms"),
        ("first save, words to the ranks", leader.words_secs * 1e3, "ms"),
        ("first save, what was written, taken apart", leader.written_secs * 1e3, "ms"),
        ("first save, .metadata rendered and summed", leader.render_secs * 1e3, "ms"),
        ("first save, of one item of one rank", leader.first_secs / (leader.ranks * leader.items) * 1e6, "us"),
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
    ledger = Ledger(ranks, differing="refuse")
    data = _sent(_planned(ranks, items))
    reports, planned_secs = _timed(lambda: _received(ledger, data))
    plan_bytes, data = len(data) / ranks, b""
    words, assign_secs = _timed(lambda: ledger.assign(reports))
    encoded, words_secs = _timed(lambda: [msgspec.msgpack.encode(word) for word in words])
    reports, told = [], [SAVE.replies.decode(word) for word in encoded]
    shares = [word.share_id for word in told if isinstance(word, AssignReply)]
    data = _sent(_written(share_id, items, is_first=True) for share_id in shares)
    (firsts, spans), written_secs = _timed(lambda: _gather(ledger, data))
    data = b""
    template, render_secs = _timed(lambda: ledger.template(firsts))
    _, fill_secs = _timed(lambda: _filled(template, spans))
    data = _sent(_written(share_id, items, is_first=False) for share_id in shares)
    (later, _), gather_secs = _timed(lambda: _gather(ledger, data))
    tracemalloc.start()
    metadata = _filled(template, ledger.learn(later))
    entries = [FileEntry(rank_manifest_name("s-1", rank), 1000, rank) for rank in range(ranks)]
    _, root_secs = _timed(
        lambda: render_root(metadata, entries, step=1, save_id="s-1", created_unix=1.0, metrics={}, extra={})
    )
    memory_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _, metadata_secs = _timed(lambda: _filled(template, ledger.learn(later)))
    return Leader(
        ranks=ranks,
        items=items,
        planned_secs=planned_secs,
        assign_secs=assign_secs,
        words_secs=words_secs,
        written_secs=written_secs,
        render_secs=render_secs + fill_secs,
        gather_secs=gather_secs,
        metadata_secs=metadata_secs,
        root_secs=root_secs,
        message_bytes=len(data) / ranks,
        plan_bytes=plan_bytes,
        metadata_bytes=sum(map(len, metadata.parts)),
        memory_bytes=memory_bytes,
    )


def _load_rows(ranks: int, items: int, metadata_bytes: float) -> list[FigureRow]:
    """Small files of the load of as many ranks as saved: those that exist are made, and counted by rank."""
    entry = TensorEntry(("w" * 20,), "bfloat16", (4, 64), (64, 1), (4, 0), 0, 1500, 512, 512, (4 * ranks, 64))
    tensors = encode_static([msgspec.structs.replace(entry, fqns=(f"model.layers.{n}.w",)) for n in range(items)])
    file, sums = FileEntry("__s-1_1_0.distcp", 1500 * items + 3000, 1), bytes(4 * items)
    own = encode_rank(
        save_id="s-1", step=1, rank=1, world_size=ranks, file=file, tensors=tensors, sums=sums, objects=(),
        skeleton=bytes(30 * items), stored_by=(0,),
    )  # fmt: skip
    manifests = [FileEntry(rank_manifest_name("s-1", rank), len(own), rank) for rank in range(ranks)]
    metadata = MetadataFile((), FileEntry(".metadata", round(metadata_bytes), 0))
    root = render_root(metadata, manifests, step=1, save_id="s-1", created_unix=1.0, metrics={}, extra={})
    _, root_secs = _timed(lambda: decode_root(root, name="root"))
    _, own_secs = _timed(lambda: decode_rank(own, name="own").data_files)
    small = TRAILER_BYTES + len(root) + 2 * len(own)
    at = f"{ranks} ranks x {items} items, load of as many: "
    before = metadata_bytes + len(root) + ranks * len(own)
    values = [
        ("small files, bytes of a rank", small / 1e6, "MB"),
        ("small files, bytes of all ranks", ranks * small / 1e9, "GB"),
        ("the same if each rank read all", ranks * before / 1e12, "TB"),
        ("small files decoded by a rank", (root_secs + 2 * own_secs) * 1e3, "ms"),
    ]
    return [_figure(at + text, value, unit) for text, value, unit in values]


def _filled(template: MetadataTemplate, spans: list[Extent]) -> MetadataFile:
    return render_metadata_file(template, spans, checkpoint_id="root/step_000000001", save_id="s-1")


def _sent(reports: Iterable[PlanMsg | Vote]) -> bytes:
    """The messages of all ranks, as they stand in the store."""
    return b"".join(pack(Frame(rank, msgspec.msgpack.encode(report))) for rank, report in enumerate(reports))


def _received(ledger: Ledger, data: bytes) -> list[PlanMsg | Vote]:
    reports = [SAVE.messages.decode(frame.body or b"") for frame in unpack(data)]
    received = [report for report in reports if report is not None]
    ledger.check_same_target(received)
    return received


def _gather(ledger: Ledger, data: bytes) -> tuple[list[Vote], list[Extent]]:
    written = [report for report in _received(ledger, data) if isinstance(report, Vote)]
    return written, ledger.learn(written)


def _planned(ranks: int, items: int) -> Iterator[PlanMsg]:
    """The ranks of a model whose every tensor is sharded by rows."""
    signature = TensorSignature((4, 64), (4 * ranks, 64), "bfloat16")
    holdings = [ShardInfo((f"model.layers.{number}.weight",), (0, 0), signature) for number in range(items)]
    state = {"model": {"layers": {str(number): {"weight": 0} for number in range(items)}}}
    state["rng"] = PerRank({str(number): 0 for number in range(_OBJECTS)})  # type: ignore[assignment]
    skeleton = encode_skeleton(flatten(state, rank=0).skeleton)
    plan = LocalPlan.of(holdings, (), skeleton)
    for rank in range(ranks):
        offsets = np.tile(np.array([4 * rank, 0], "<i8"), items).tobytes()
        objects = msgspec.msgpack.encode([f"rng.rank{rank}.{number}" for number in range(_OBJECTS)])
        own = msgspec.structs.replace(plan, offsets=offsets, objects=objects)
        yield PlanMsg(1, own, ContentSums(bytes(4 * _OBJECTS), bytes(8 * items)))


def _written(share_id: bytes, items: int, *, is_first: bool) -> Vote:
    spans = tuple((items * 1500 + 3000 * number, 3000) for number in range(_OBJECTS))
    moved = tuple((number, *span) for number, span in enumerate(spans)) if is_first else ()
    places = np.array([(1500 * number, 1500, 0) for number in range(items)], "<i8").tobytes() if is_first else None
    secs = (0.001234, 0.123456, 1.234567)
    content = ContentSums(bytes(4 * _OBJECTS))
    return Vote(123_456, share_id, 40 * items, 0xFFFFFFFF, secs, moved, extents_crc32(spans), content, places)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
