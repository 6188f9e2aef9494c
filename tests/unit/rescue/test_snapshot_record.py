"""Which sealed snapshots may be committed (pure), and what a seal holds."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from rings import plan_of

from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import BudgetExceededError, CorruptCheckpointError
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.format.rank_manifest import decode_rank
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.rescue.decision import decide
from aio_ckpt.rescue.found_segments import FoundSegment, find_segments, segment_prefix
from aio_ckpt.rescue.hooks import Rescue
from aio_ckpt.rescue.segment import SegmentDirectory, SharedSegment, StoredSegment, read_segment
from aio_ckpt.rescue.snapshot_record import SnapshotRecord, decode_record, layout_of, raw_sums, store_record
from aio_ckpt.snapshot.image import Image

HERE = Owner.of_this_process("here")

# -- the decision ---------------------------------------------------------------------------------


def left(
    *,
    step: int = 5,
    save_id: str = "s-1",
    is_dead: bool = True,
    overwrite: bool = False,
    replaces: str = "",
    metadata: bytes | None = None,
    created_unix: float = 0.0,
    since_boot_secs: float = 0.0,
    directory: str = "",
) -> FoundSegment:
    """A segment with a whole snapshot."""
    record = SnapshotRecord(
        directory=directory or f"step_{step:09d}",
        save_id=save_id,
        step=step,
        overwrite=overwrite,
        replaces=replaces,
        metrics={},
        created_unix=created_unix,
        since_boot_secs=since_boot_secs,
        metadata=b"metadata" if metadata is None else metadata,
    )
    return FoundSegment(owner_is_dead=is_dead, stored=StoredSegment(path=Path(f"/shm/{save_id}")), record=record)


def unsealed(*, is_dead: bool = True, is_damaged: bool = False) -> FoundSegment:
    fault = "torn" if is_damaged else "no snapshot record"
    stored = StoredSegment(path=Path("/shm/unsealed"), fault=fault, is_damaged=is_damaged)
    return FoundSegment(owner_is_dead=is_dead, stored=stored, record=None)


def outcome(
    found: list[FoundSegment], committed: dict[int, str] | None = None
) -> tuple[list[int], list[tuple[Any, ...]]]:
    """(steps to commit, (reason, is obsolete, is a loss) of each refusal)."""
    decision = decide(found, committed or {})
    refused = [(refusal.reason, refusal.is_obsolete, refusal.is_loss) for refusal in decision.refusals]
    return [save.step for save in decision.saves], refused


ANOTHER = "another step 5 was committed since"
UNTOLD = "nothing tells whether step 5, as it is committed, is what it was to replace"


@pytest.mark.parametrize(
    ("found", "committed", "reason", "is_obsolete", "is_loss"),
    [
        ([left(metadata=b"")], {}, "its .metadata is in no snapshot record", True, True),
        ([left(is_dead=False)], {}, "its trainer may be alive (s-1)", False, True),
        ([left()], {5: "s-1"}, "it is committed", True, False),
        ([left()], {5: "another"}, "step 5 is committed, which is not older", True, False),
        ([left()], {5: ""}, "step 5 is committed, which is not older", True, False),
        ([left()], {3: "x", 9: "y"}, "step 9 is committed, which is not older", True, False),
        ([left(overwrite=True)], {9: "y"}, "step 9 is committed, which is not older", True, False),
        ([left(overwrite=True, replaces="old")], {5: "new"}, ANOTHER, True, False),
        ([left(overwrite=True)], {5: "new"}, ANOTHER, True, False),
        ([left(save_id="s-9", overwrite=True, replaces="old")], {5: "s-10"}, ANOTHER, True, False),
        ([left(save_id="s-9", overwrite=True, replaces="old")], {5: "r-8"}, ANOTHER, True, False),
        ([left(overwrite=True, replaces="old")], {5: ""}, UNTOLD, True, True),
    ],
)
def test_a_save_is_refused_with_a_reason(
    found: list[FoundSegment], committed: dict[int, str], reason: str, is_obsolete: bool, is_loss: bool
) -> None:
    steps, refused = outcome(found, committed)
    assert steps == []
    assert (reason, is_obsolete, is_loss) in refused


def test_one_that_replaces_a_committed_step_is_committed() -> None:
    assert outcome([left(overwrite=True, replaces="old")], {5: "old", 9: "y"}) == ([5], [])
    assert outcome([left(overwrite=True, replaces="old")], {5: "s-1", 9: "y"})[0] == [], "it did already"
    assert outcome([left(overwrite=True, replaces="")], {5: ""}) == ([5], []), "a plain one was there, and is"
    behind = left(save_id="s-10", overwrite=True, replaces="old")
    assert outcome([behind], {5: "s-9"}) == ([5], []), "the one before it was committed meanwhile"


def test_several_saves_are_committed_in_the_order_of_their_steps() -> None:
    found = [left(step=7, save_id="s-2"), left(step=6), unsealed()]
    assert outcome(found, {5: "x"}) == ([6, 7], [("no snapshot record", True, False)])


def test_of_two_saves_of_one_step_the_later_one_counts() -> None:
    found = [left(save_id="old", created_unix=1.0), left(save_id="new", created_unix=2.0)]
    decision = decide(found, {})
    assert [save.record.save_id for save in decision.saves] == ["new"]
    assert [refusal.reason for refusal in decision.refusals] == ["a later snapshot of step 5 is there"]


def test_of_two_saves_that_replace_one_step_the_later_one_counts_whatever_the_time_was_set_to() -> None:
    old = left(save_id="old", overwrite=True, replaces="x", created_unix=9.0, since_boot_secs=1.0)
    new = left(save_id="new", overwrite=True, replaces="x", created_unix=5.0, since_boot_secs=2.0)
    for found in ([old, new], [new, old]):
        decision = decide(found, {5: "x"})
        assert [save.record.save_id for save in decision.saves] == ["new"]
        assert [(one.reason, one.is_obsolete) for one in decision.refusals] == [
            ("a later snapshot of step 5 is there", True)
        ]


def test_behind_a_later_save_whose_trainer_may_be_alive_an_earlier_one_waits() -> None:
    found = [left(save_id="old", since_boot_secs=1.0), left(save_id="new", since_boot_secs=2.0, is_dead=False)]
    assert outcome(found) == (
        [],
        [("its trainer may be alive (new)", False, True), ("a later snapshot of step 5 is there", False, False)],
    )
    found = [left(save_id="old", since_boot_secs=1.0), left(save_id="new", since_boot_secs=2.0, metadata=b"")]
    assert outcome(found)[0] == [5], "one that can never be committed is none"


def test_what_is_not_sealed_is_obsolete_if_its_writer_is_dead_and_a_loss_if_it_was() -> None:
    assert outcome([unsealed()]) == ([], [("no snapshot record", True, False)])
    assert outcome([unsealed(is_damaged=True)]) == ([], [("torn", True, True)])
    assert outcome([unsealed(is_dead=False)]) == ([], [("its trainer may be alive", False, False)])


@examples(200)
@given(
    st.lists(
        st.tuples(*(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.booleans())),
        max_size=8,
    ),
    st.dictionaries(st.integers(0, 4), st.sampled_from(["", "s-0", "s-1", "x"]), max_size=3),
)
def test_whatever_is_found_every_segment_is_decided_once_and_every_commit_is_whole_and_in_order(
    given_seals: list[tuple[int, int, bool, bool]], committed: dict[int, str]
) -> None:
    found = [
        left(step=step, save_id=f"s-{save}", is_dead=is_dead, overwrite=over, replaces="x")
        for step, save, is_dead, over in given_seals
    ]
    decision = decide(found, committed)
    taken = [save.orphan for save in decision.saves]
    taken += [refusal.orphan for refusal in decision.refusals]
    assert sorted(map(id, taken)) == sorted(map(id, found))
    steps = [save.step for save in decision.saves]
    assert steps == sorted(set(steps))
    for save in decision.saves:
        is_replaced = committed.get(save.step) in ("x", "s-0", "s-1") and save.record.overwrite
        assert is_replaced or save.step > max(committed, default=-1)
        assert save.orphan.owner_is_dead


# -- a seal ---------------------------------------------------------------------------------------


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path("/dev/shm") / f"test-{os.getpid()}"
    path.mkdir()
    yield path
    for one in path.iterdir():
        one.unlink()
    path.rmdir()


class Holder:
    """Stands for the lease of an image: the memory alone is asked for."""

    def __init__(self, memory: Any) -> None:
        self.arena = self
        self.memory = memory


def valid_segment(shm: Path, values: dict[str, Any], *, name: str = "segment") -> tuple[SharedSegment, Any]:
    plan = plan_of(values).plan
    layout = plan.layout
    objects = ObjectBytes(region=b"objects!", spans=tuple((0, 8) for _ in plan.object_names))
    image_bytes = align_up(layout.tensor_bytes + 8, PAGE_BYTES)
    segment = SharedSegment(shm / name, align_up(image_bytes, 1 << 16))
    for item in layout.items:
        raw = values[item.fqns[0]].contiguous().view(torch.uint8).numpy().tobytes()
        segment.memory[item.raw_offset : item.trailer_offset] = raw
    chunks = file_chunks(layout, image_bytes)
    image = Image(
        lease=Holder(segment.memory),  # type: ignore[arg-type]
        chunks=chunks,
        chunk_bytes=layout.chunk_bytes,
        slots=len(chunks),
        written=(),
    )
    record = left().record
    assert record is not None
    store_record(segment, record, plan, objects, image)
    return segment, plan


def test_a_snapshot_record_holds_the_layout_and_the_sums(shm: Path) -> None:
    values = {"a": torch.arange(700_000.0), "b": torch.ones(3, 5), "e": torch.zeros(0, 4), "o": 7}
    segment, plan = valid_segment(shm, values)
    stored = read_segment(segment.path)
    record = decode_record(stored)
    manifest, layout = layout_of(record)
    assert (record.step, record.objects, segment.is_valid) == (5, b"objects!", True)
    assert [(item.fqns, item.item_offset, item.envelope) for item in layout.items] == [
        (item.fqns, item.item_offset, item.envelope) for item in plan.layout.items
    ]
    assert [chunk.constants for chunk in layout.chunks] == [chunk.constants for chunk in plan.layout.chunks]
    assert manifest.sums == raw_sums(plan.layout, memoryview(segment.memory))
    assert [entry.fqns for entry in manifest.objects] == [("o",)]
    segment.memory[plan.layout.items[0].raw_offset] ^= 1
    assert manifest.sums != raw_sums(layout, memoryview(segment.memory))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"generation": 4},
        {"image_bytes": 1 << 40},
        {"tensor_bytes": 1 << 40},
        {"chunk_bytes": 100},
        {"directory": "../elsewhere"},
        {"directory": ".hidden"},
        {"step": -1},
    ],
)
def test_a_snapshot_record_whose_numbers_cannot_be_is_refused(shm: Path, changes: dict[str, Any]) -> None:
    segment, _ = valid_segment(shm, {"a": torch.ones(1000)})
    stored = read_segment(segment.path)
    record = msgspec.structs.replace(msgspec.msgpack.decode(stored.record, type=SnapshotRecord), **changes)
    with pytest.raises(CorruptCheckpointError):
        decode_record(
            StoredSegment(path=stored.path, generation=2, capacity=1 << 30, record=msgspec.msgpack.encode(record))
        )


@examples(100)
@given(st.data())
def test_no_bytes_in_a_snapshot_record_are_an_untyped_error(data: st.DataObject) -> None:
    manifest = msgspec.msgpack.encode(msgspec.structs.asdict(left().record))  # type: ignore[arg-type]
    cut = data.draw(st.integers(0, len(manifest)))
    noise = data.draw(st.binary(max_size=40))
    stored = StoredSegment(path=Path("/shm/x"), generation=0, capacity=1 << 20, record=manifest[:cut] + noise)
    with contextlib.suppress(CorruptCheckpointError):
        layout_of(decode_record(stored))


def test_a_manifest_that_was_laid_out_otherwise_is_refused(shm: Path) -> None:
    segment, _ = valid_segment(shm, {"a": torch.ones(1000), "b": torch.ones(1000)})
    record = decode_record(read_segment(segment.path))
    manifest = decode_rank(record.manifest, name="record")
    assert len(manifest.tensors) == 2
    with pytest.raises(CorruptCheckpointError, match="one behind the other"):
        layout_of(msgspec.structs.replace(record, tensor_bytes=record.tensor_bytes + 1))


# -- segments -------------------------------------------------------------------------------------


def test_a_segment_is_odd_until_it_is_sealed_and_odd_again_when_it_is_not(shm: Path) -> None:
    segment = SharedSegment(shm / "s", 1 << 16)
    for generation in (2, 4, 6):
        assert "no snapshot record" in read_segment(segment.path).fault
        assert segment.next_generation == generation
        segment.mark_valid(b"what it is" * generation)
        stored = read_segment(segment.path)
        assert (stored.generation, stored.capacity, stored.record) == (generation, 1 << 16, b"what it is" * generation)
        segment.mark_invalid()
        segment.mark_invalid()
    segment.remove()
    segment.remove()
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "fault", "is_damaged"),
    [
        (b"", "never filled", False),
        (bytes(20), "never filled", False),
        (bytes(5000), "never filled", False),
        (b"aiosegm1", "cut short", True),
        (b"x" * 20, "cut short", True),
        (b"x" * 5000, "no segment", True),
    ],
)
def test_what_is_no_segment_is_told_and_what_was_never_filled_is_no_loss(
    shm: Path, data: bytes, fault: str, is_damaged: bool
) -> None:
    (shm / "file").write_bytes(data)
    stored = read_segment(shm / "file")
    assert (stored.fault, stored.is_damaged) == (fault, is_damaged)


def test_what_cannot_be_opened_is_told(shm: Path) -> None:
    (shm / "foreign").touch()
    (shm / "link").symlink_to(shm / "foreign")
    assert "cannot be opened" in read_segment(shm / "link").fault
    assert "cannot be opened" in read_segment(shm / "none").fault


def test_an_invalid_segment_of_the_dead_is_found_by_its_name(shm: Path, tmp_path: Path) -> None:
    dead = msgspec.structs.replace(HERE, session="gone", pid=2**31 - 1)
    other = SegmentDirectory(shm, f"{segment_prefix(tmp_path)}gone-{dead.tag}", make_room=lambda: False)
    other.make(1 << 16)
    SegmentDirectory(shm, f"{segment_prefix(tmp_path)}mine-{HERE.tag}", make_room=lambda: False).make(1 << 16)
    SegmentDirectory(shm, f"{segment_prefix(tmp_path / 'other')}gone-{dead.tag}", make_room=lambda: False).make(1 << 16)
    (found,) = find_segments([shm, shm], tmp_path, HERE, stale_after_secs=600.0)
    assert (found.owner_is_dead, found.record, found.stored.is_damaged) == (True, None, False)
    assert find_segments([shm / "none"], tmp_path, HERE, stale_after_secs=600.0) == []


def test_an_owner_that_cannot_be_proven_dead_is_dead_after_a_long_silence(shm: Path, tmp_path: Path) -> None:
    """As one in another container, whose processes cannot be seen from here."""
    elsewhere = msgspec.structs.replace(HERE, pid_namespace="pid:[7]", pid=7)
    segment = SegmentDirectory(shm, f"{segment_prefix(tmp_path)}gone-{elsewhere.tag}", make_room=lambda: False).make(
        1 << 16
    )
    (found,) = find_segments([shm], tmp_path, HERE, stale_after_secs=600.0)
    assert not found.owner_is_dead
    os.utime(segment.path, (0, 0))
    (found,) = find_segments([shm], tmp_path, HERE, stale_after_secs=600.0)
    assert found.owner_is_dead


def test_a_directory_removes_what_it_made_but_not_in_a_fork(shm: Path) -> None:
    made = SegmentDirectory(shm, "aio_ckpt-x", make_room=lambda: False)
    segment = made.make(1 << 16)
    child = os.fork()
    if not child:
        try:
            made.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert list(shm.iterdir()) == [segment.path]
    made.close()
    assert list(shm.iterdir()) == []
    assert segment.memory[0] == 0, "who has the memory still has it"


def test_what_is_kept_is_given_up_by_steps_and_once(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [shm / name for name in ("a", "b", "gone")]
    for path in paths[:2]:
        path.touch()
    rescue = Rescue(None, None, shm, StepNames("step_{step:09d}"), HERE, EngineConfig())  # type: ignore[arg-type]
    rescue._kept = list(zip((1, 2, 3), paths, strict=True))
    rescue.give_up("why", after=1)
    assert (rescue.has_orphans, list(shm.iterdir())) == (True, [shm / "a"])
    rescue.give_up("why")
    rescue.give_up("why")
    assert (rescue.has_orphans, list(shm.iterdir())) == (False, [])
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [2, 1]


def test_a_segment_that_cannot_be_made_leaves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BudgetExceededError, match="enlarge it"):
        SegmentDirectory(shm, "aio_ckpt-x", make_room=lambda: False).make(1 << 16)
    assert list(shm.iterdir()) == []
