"""Falling back: a load passes damaged checkpoints by, says so, and sets aside what is proven, never deleting."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import torch
from builders import listing, save, value, weights
from gated_storage import TIMEOUT, Call, GatedStorage, gated_engine
from saved_files import data_file, rank_manifest, root_manifest

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli.commands import run
from aio_ckpt.commit.discovery import discover
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.quarantine import CorruptCandidate, Quarantine
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    ReadError,
    RootError,
    StallError,
    StepOrderError,
    TemplateMismatchError,
    WriteError,
)
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import UNKNOWN

NAMES = StepNames(EngineConfig().step_dir)
ONE, TWO, THREE = (f"step_{step:09d}" for step in (1, 2, 3))


def saved(root: Path, *steps: int) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, *steps)


def flip(file: Path) -> None:
    """One bit in the middle: of the values, in a data file of ours."""
    data = bytearray(file.read_bytes())
    place = data.index(torch.full((10,), float(int(file.parent.name[-9:]))).numpy().tobytes()) + 9
    data[place] ^= 0x10
    file.write_bytes(data)


def damage(root: Path, *steps: int) -> None:
    for step in steps:
        flip(data_file(root / f"step_{step:09d}"))


def bytes_below(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def aside(root: Path) -> list[Path]:
    return sorted(root.glob(".aio_ckpt/corrupt/*"))


# -- walking back ---------------------------------------------------------------------------------


def test_a_load_walks_back_and_says_which_and_why(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(root, 1, 2, 3)
    damage(root, 2, 3)
    state = weights(0)
    with SyncCheckpointEngine(root) as engine, caplog.at_level(logging.WARNING, "aio_ckpt"):
        report = engine.load(state)
    assert (report.step, float(state["w"][0])) == (1, 1)
    assert [(entry.step, entry.path, entry.quarantined) for entry in report.skipped] == [
        (3, root / THREE, None),
        (2, root / TWO, None),
    ]
    for entry in report.skipped:
        assert isinstance(entry.error, MismatchError)
        assert "_0_0.distcp: tensor 'w'" in str(entry.error)
        assert entry.error.__traceback__ is None
        assert f"skipped step {entry.step}, which does not verify: __" in caplog.text


def test_without_fallback_the_newest_must_verify_and_nothing_is_moved(root: Path) -> None:
    saved(root, 1, 2)
    damage(root, 2)
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(CorruptCheckpointError, match="'w'"):
            engine.load(weights(0), fallback=False)
        save(engine, 3)
    assert listing(root) == [ONE, TWO, THREE]


def test_a_load_of_a_given_step_raises_and_moves_nothing(root: Path) -> None:
    saved(root, 1, 2)
    damage(root, 2)
    with SyncCheckpointEngine(root) as engine:
        for call in (lambda: engine.load(weights(0), 2), lambda: engine.read(2)):
            with pytest.raises(MismatchError, match="'w'"):
                call()
        save(engine, 3)
    assert listing(root) == [ONE, TWO, THREE]


def test_if_none_verifies_each_is_listed_and_nothing_is_moved(root: Path) -> None:
    saved(root, 1, 2)
    damage(root, 1)
    data_file(root / TWO).unlink()
    with SyncCheckpointEngine(root) as engine:
        for _ in range(2):  # a restart must not find an empty root
            with pytest.raises(CorruptCheckpointError) as caught:
                engine.load(weights(0))
            assert not isinstance(caught.value, MismatchError)
            for text in (
                "step 1: __",
                "_0_0.distcp: tensor 'w'",
                "step 2: __",
                "_0_0.distcp: missing",
                "nothing was moved",
            ):
                assert text in str(caught.value)
            assert caught.value.target_modified
        save(engine, 3)
    assert listing(root) == [ONE, TWO, THREE]


def test_a_checkpoint_that_lost_its_metadata_is_passed_by_and_not_passed_over(root: Path) -> None:
    saved(root, 1, 2)
    (root / TWO / ".metadata").unlink()
    name = root_manifest(root / TWO).name
    with SyncCheckpointEngine(root) as engine:
        report = engine.load(weights(0))
        assert [(entry.step, str(entry.error)) for entry in report.skipped] == [
            (2, f".metadata: missing, although {name} is there")
        ]
        save(engine, 2)  # its directory would be in the way
        assert (engine.steps(), value(engine)) == ([1, 2], 2)
    assert len(aside(root)) == 1


def test_a_directory_that_a_save_is_writing_into_is_none_that_lost_its_metadata(root: Path) -> None:
    saved(root, 1, 2)
    (root / TWO / ".metadata").rename(root / TWO / ".metadata.replaced-x")
    with SyncCheckpointEngine(root) as engine:
        assert engine.load(weights(0)).skipped == ()
        with pytest.raises(FileNotFoundError):
            engine.read(2)


# -- setting aside --------------------------------------------------------------------------------


def test_the_first_save_after_the_load_sets_the_damaged_one_aside_whole(root: Path) -> None:
    saved(root, 1, 2, 3)
    damage(root, 3)
    before = bytes_below(root / THREE)
    with SyncCheckpointEngine(root) as engine:
        engine.load(weights(0))
        assert engine.steps() == [1, 2], "what was passed by counts no more"
        assert listing(root) == [ONE, TWO, THREE], "a load alone changes nothing"
        save(engine, 3)  # the number is free again
        assert engine.steps() == [1, 2, 3]
    (moved,) = aside(root)
    assert moved.name.startswith(f"{THREE}-")
    assert bytes_below(moved) == before
    damage(root, 3)
    with SyncCheckpointEngine(root) as engine:
        assert engine.load(weights(0)).step == 2
        save(engine, 3)
        assert (engine.latest_step(), value(engine)) == (3, 3)
    assert len(aside(root)) == 2


def test_a_save_below_the_damaged_step_needs_the_load_that_proved_it(root: Path) -> None:
    saved(root, 1, 5)
    damage(root, 5)
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(StepOrderError):
            save(engine, 2)
        engine.load(weights(0))
        save(engine, 2)
        assert engine.steps() == [1, 2]


def test_the_writer_sets_aside_at_once_and_durably(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        damage(root, 2)
        storage.calls.clear()
        report = engine.load(weights(0), None, strict=False, allow_missing=False, fallback=True).result(TIMEOUT)
        (entry,) = report.skipped
        assert [entry.quarantined] == aside(root)
        calls = [(call.name, call.path) for call in storage.calls]
        assert calls == [("rename", root / TWO), ("sync_dir", aside(root)[0].parent), ("sync_dir", root)]
        assert engine.steps().result() == [1]


def test_a_read_sets_damaged_checkpoints_aside(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        damage(root, 2)
        assert value(engine) == 1
        assert len(aside(root)) == 1


@pytest.mark.parametrize(
    ("hurt", "proof"),
    [
        pytest.param(lambda path: data_file(path).unlink(), "_0_0.distcp: missing", id="no data file"),
        pytest.param(lambda path: data_file(path).write_bytes(b"short"), "_0_0.distcp: 5 bytes", id="another length"),
        pytest.param(lambda path: rank_manifest(path).unlink(), ".0.bin: missing", id="no manifest"),
        pytest.param(lambda path: rank_manifest(path).write_bytes(bytes(99)), ".0.bin: ", id="another manifest"),
        pytest.param(lambda path: (path / ".metadata").write_bytes(bytes(99)), ".metadata: ", id="another metadata"),
        pytest.param(lambda path: os.truncate(path / ".metadata", 900), ".metadata: ", id="another end of metadata"),
        pytest.param(lambda path: root_manifest(path).unlink(), ".json: missing", id="no root manifest"),
    ],
)
def test_each_damage_proves_that_a_checkpoint_is_damaged(root: Path, hurt: Callable[[Path], None], proof: str) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        hurt(root / TWO)
        (entry,) = engine.load(weights(0)).skipped
        assert entry.quarantined is not None
        assert proof in str(entry.error)


def test_a_mere_reader_moves_nothing(root: Path) -> None:
    with SyncCheckpointEngine(root) as writer, SyncCheckpointEngine(root) as reader:
        save(writer, 1, 2)
        damage(root, 2)
        report = reader.load(weights(0))
        assert [entry.quarantined for entry in report.skipped] == [None]
        with pytest.raises(RootError):
            save(reader, 3)
        assert listing(root) == [ONE, TWO]


def test_what_cannot_be_renamed_is_logged_and_the_load_is_good(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        damage(root, 2)
        storage.fail("rename", TWO, WriteError(errno.EACCES, "not yours", "x"))
        load = lambda: engine.load(weights(0), None, strict=False, allow_missing=False, fallback=True)  # noqa: E731
        with caplog.at_level(logging.WARNING, "aio_ckpt"):
            assert [entry.quarantined for entry in load().result(TIMEOUT).skipped] == [None]
        assert "step 2 is damaged but could not be set aside" in caplog.text
        assert load().result(TIMEOUT).skipped[0].quarantined is not None


async def test_a_rename_that_hangs_holds_a_load_no_longer_than_its_limit(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(root, 1, 2)
    executor = Executor("test", 2)
    storage, quarantine = GatedStorage(executor), Quarantine()
    (damaged,) = [found for found in await discover(storage, root, NAMES) if found.step == 2]
    proof = [CorruptCandidate(checkpoint=damaged, error=MismatchError("a flipped bit"))]
    quarantine.claim = claim = Claim(storage, root, Owner.of_this_process(), stale_after_secs=600.0)
    await claim.take(UNKNOWN, is_locked=True)
    gate = storage.hold("rename", TWO)
    with caplog.at_level(logging.WARNING, "aio_ckpt"), anyio.fail_after(TIMEOUT):
        assert await quarantine.add(storage, root, proof, 0.05) == {}
    assert "steps [2] are damaged but were not set aside within 0.05 s" in caplog.text
    assert [found.step for found in await quarantine.committed(storage, root, NAMES)] == [1], "damaged for good"
    storage.release(gate)
    assert len(await quarantine.enforce(storage, root, claim, TIMEOUT)) == 1, "tried again"
    assert executor.close(TIMEOUT)
    assert len(aside(root)) == 1


# -- what is no proof -----------------------------------------------------------------------------


class OddReads(GatedStorage):
    """Reads of data files under test control."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.errors: list[BaseException] = []
        self.garbled: list[str] = []
        """Directories whose next read is garbled."""
        self.cached_wrong = False
        """Whatever may come from the page cache is garbled."""

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        if self.cached_wrong and page_cache != "pass":
            self.garbled.append(path.parent.name)
        return OddFile(self, await super().open_data_file(path, page_cache=page_cache))


class OddFile:
    def __init__(self, storage: OddReads, inner: ReadFile) -> None:
        self._storage, self._inner = storage, inner
        self.path, self.nbytes, self.is_direct = inner.path, inner.nbytes, inner.is_direct

    async def read_into(self, offset: int, *views: memoryview) -> int:
        if self._storage.errors:
            raise self._storage.errors.pop(0)
        got = await self._inner.read_into(offset, *views)
        if self.path.parent.name in self._storage.garbled:
            self._storage.garbled.remove(self.path.parent.name)
            for view in views:
                view[:] = bytes(view.nbytes)
        return got

    async def close(self) -> None:
        await self._storage.run(Call("close_read", self.path), self._inner.close)


@contextlib.contextmanager
def odd_engine(root: Path) -> Iterator[tuple[CheckpointEngine, OddReads]]:
    executor = Executor("odd", 4)
    storage = OddReads(executor)
    engine = CheckpointEngine(root, storage=storage)
    try:
        yield engine, storage
    finally:
        storage.open_gates()
        engine.close_blocking()
        assert executor.close(TIMEOUT)


def load(engine: CheckpointEngine, state: object, step: int | None = None):
    future = engine.load(state, step, strict=False, allow_missing=False, fallback=True)
    return future.result(TIMEOUT)


def test_what_the_page_cache_has_wrong_is_read_again_from_the_disk(root: Path) -> None:
    saved(root, 1, 2)
    with odd_engine(root) as (engine, storage):
        storage.cached_wrong = True
        assert load(engine, found := weights(0)).step == 2
        assert torch.equal(found["w"], weights(2)["w"])
        read = engine.read(None, only=None, skip_untrusted=False, with_report=False).result(TIMEOUT)
        assert torch.equal(read["w"], weights(2)["w"])
    assert aside(root) == []


@pytest.mark.parametrize(
    "error",
    [
        ReadError(errno.EIO, "broken", "x"),
        MemoryError("no room"),
        StallError("no answer"),
        TimeoutError("no answer"),
        OSError(errno.ENOMEM, "no room"),
    ],
    ids=["EIO", "MemoryError", "StallError", "TimeoutError", "ENOMEM"],
)
def test_an_error_of_the_system_is_raised_as_it_is_and_moves_nothing(root: Path, error: Exception) -> None:
    with odd_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.errors = [error]
        with pytest.raises(type(error)):
            load(engine, weights(0))
        assert listing(root) == [ONE, TWO]
        report = load(engine, weights(0))
        assert (report.step, report.skipped) == (2, ())


def test_what_does_not_match_once_and_matches_then_is_no_damage(root: Path) -> None:
    with odd_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        for step in (None, 2):
            storage.garbled = [TWO]
            report = load(engine, state := weights(0), step)
            assert (storage.garbled, report.step, report.skipped, float(state["w"][0])) == ([], 2, (), 2)
        assert listing(root) == [ONE, TWO]


def test_a_template_that_does_not_match_never_walks_back(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        with pytest.raises(TemplateMismatchError) as caught:
            engine.load({"w": torch.zeros(11)})
        assert not caught.value.target_modified
        damage(root, 2)
        with pytest.raises(TemplateMismatchError):
            engine.load({"w": torch.zeros(11)})
        assert listing(root) == [ONE, TWO]


def test_an_error_after_a_damaged_one_says_that_the_template_was_touched(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(3)}, 1).result(TIMEOUT)
        save(engine, 2)
        damage(root, 2)
        with pytest.raises(TemplateMismatchError) as caught:
            engine.load(weights(0))
        assert caught.value.target_modified


def test_a_renamed_directory_is_passed_by_but_proves_no_damage(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        (root / TWO).rename(root / THREE)
        report = engine.load(weights(0))
        assert report.step == 1
        assert [(entry.step, entry.quarantined) for entry in report.skipped] == [(3, None)]
        assert "holds step 2" in str(report.skipped[0].error)
        save(engine, 4)
        assert listing(root) == [ONE, THREE, "step_000000004"]


def test_what_was_overwritten_after_it_was_proven_damaged_stays(root: Path) -> None:
    saved(root, 1, 2)
    damage(root, 2)
    with SyncCheckpointEngine(root) as late:
        assert late.load(weights(0)).step == 1
        with SyncCheckpointEngine(root) as other:
            other.save(weights(20), 2, overwrite=True).result(TIMEOUT)
        assert late.steps() == [1, 2]
        save(late, 3)
        assert value(late, 2) == 20
    assert aside(root) == []


def test_a_damaged_step_that_a_save_replaces_meanwhile_is_not_set_aside(root: Path) -> None:
    with odd_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        damage(root, 2)
        end_of_reading = storage.hold("close_read", f"{ONE}/*")
        loading = engine.load(weights(0), None, strict=False, allow_missing=False, fallback=True)
        end_of_reading.wait_reached()  # step 2 is proven damaged
        exchange = storage.hold("replace", ".metadata.tmp-*")
        ticket = engine.save(weights(20), 2, overwrite=True)
        exchange.wait_reached()
        end_of_reading.open()
        for _ in range(5):  # as long as a rename would take: it must be waiting
            engine.read(1).result(TIMEOUT)
        assert ("rename", root / TWO) not in [(call.name, call.path) for call in storage.begun]
        exchange.open()
        assert ticket.result(TIMEOUT).step == 2
        assert [(entry.step, entry.quarantined) for entry in loading.result(TIMEOUT).skipped] == [(2, None)]
        assert engine.steps().result() == [1, 2]
        assert value(engine, 2) == 20
    assert aside(root) == []


class Removes(Storage):
    """Another process removes the step (or commits a newer one) while it is being opened."""

    act: Callable[[], None] | None = None

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        data = await super().read_file(path, max_bytes=max_bytes)
        if self.act is not None and path.parent.name == ONE:
            act, self.act = self.act, None
            act()
        return data


class Replaces(Storage):
    """Another process replaces the step once its manifests were read, before its data file is opened."""

    act: Callable[[], object] | None = None

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.are_read = anyio.Event()

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        data = await super().read_file(path, max_bytes=max_bytes)
        if path.name.endswith(".0.bin"):
            self.are_read.set()
        return data

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        if self.act is not None:
            act, self.act = self.act, None
            with anyio.fail_after(TIMEOUT):
                await self.are_read.wait()
            act()
        return await super().open_data_file(path, page_cache=page_cache)


def test_a_step_that_a_writer_removes_meanwhile_makes_the_reader_look_again(root: Path) -> None:
    saved(root, 1)
    executor = Executor("removes", 2)
    storage = Removes(executor)
    engine = CheckpointEngine(root, storage=storage)

    def overtake() -> None:
        with SyncCheckpointEngine(root) as writer:
            save(writer, 2)
        (root / ONE).rename(root / ".aio_ckpt/trash/one")

    storage.act = overtake
    report = load(engine, weights(0))
    engine.close_blocking()
    executor.close(TIMEOUT)
    assert (report.step, report.skipped) == (2, ())


def test_what_is_saved_in_the_place_of_a_damaged_step_is_not_protected_by_its_mark(root: Path) -> None:
    saved(root, 1, 2)
    damage(root, 2)
    with SyncCheckpointEngine(root) as engine:
        engine.protect(1)
        engine.protect(2)
        save(engine, 3)
        damage(root, 3)
        assert engine.load(weights(0)).step == 1
        save(engine, 2)
        assert engine.protected_steps() == [1]


def test_what_could_not_be_set_aside_is_out_of_the_way_before_the_next_save(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        damage(root, 2)
        storage.fail("rename", TWO, WriteError(errno.EIO, "broken", "x"))
        assert load(engine, weights(0)).step == 1
        assert (engine.steps().result(), aside(root)) == ([1], [])
        assert engine.save(weights(3)).result(TIMEOUT).step == 2
        assert len(aside(root)) == 1


def test_without_sums_a_step_that_is_overwritten_while_it_is_read_is_read_again(root: Path) -> None:
    """The manifest of the one and the data of the other: as many bytes, in another order."""
    swapped = {"b": torch.full((1000,), 20.0), "a": torch.full((1000,), 2.0)}
    with SyncCheckpointEngine(root) as writer:
        writer.save({"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 10.0)}, 1).result(TIMEOUT)
        executor = Executor("removes", 2)
        storage = Replaces(executor)
        engine = CheckpointEngine(root, EngineConfig(verify="never"), storage=storage)
        storage.act = lambda: writer.save(swapped, 1, overwrite=True).result(TIMEOUT)
        template = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        load(engine, template)
        engine.close_blocking()
        executor.close(TIMEOUT)
    assert (template["a"].unique().tolist(), template["b"].unique().tolist()) == ([2.0], [20.0])


# -- what the others see --------------------------------------------------------------------------


def test_the_command_line_lists_what_was_set_aside_and_no_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        with contextlib.suppress(FileNotFoundError):
            engine.rollback(1)
    saved(root, 2)
    damage(root, 2)
    with SyncCheckpointEngine(root) as engine:
        engine.load(weights(0))
        save(engine, 3)
    assert run(["ls", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in shown["checkpoints"]] == [1, 3]
    assert shown["quarantined"] == [f".aio_ckpt/corrupt/{aside(root)[0].name}"]
    assert run(["ls", str(root)]) == 0
    assert "damaged, set aside ('aio-ckpt rm ROOT --aside' deletes it): .aio_ckpt/corrupt/step_000000002-" in " ".join(
        capsys.readouterr().out.split()
    )
    assert run(["verify", str(root)]) == 0
