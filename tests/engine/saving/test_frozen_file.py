"""What does not change is not written again: the frozen file of a step, which the next step clones."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT, gated_engine
from power_loss import check_root_mode
from saved_files import data_file, root_manifest

import aio_ckpt
from aio_ckpt import EngineConfig, SaveReport, SyncCheckpointEngine
from aio_ckpt.checkpoint import verify
from aio_ckpt.cli.commands import run
from aio_ckpt.config import FrozenPolicy
from aio_ckpt.errors import ConfigError, CorruptCheckpointError, SaveCancelledError, WriteError
from aio_ckpt.format.root_names import ENGINE_DIRS
from aio_ckpt.storage import clone
from aio_ckpt.storage import data_file as data_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.load of one process
MIB = 1 << 20


def state(value: float, *, base: float = 1.0) -> dict[str, Any]:
    """2 MiB of a base that stays, and a little that does not."""
    return {
        "base": {"weight": torch.arange(MIB / 4) + base, "tied": torch.full((MIB // 4,), base)},
        "adapter": torch.full((100,), value),
        "rng": f"state {value}",
    }


def frozen_file(checkpoint: Path) -> Path | None:
    return next(checkpoint.glob("__*_0_1.distcp"), None)


def inode(checkpoint: Path) -> int:
    path = frozen_file(checkpoint)
    assert path is not None
    return path.stat().st_ino


def save(engine: SyncCheckpointEngine, *values: float, base: float = 1.0) -> list[SaveReport]:
    return [engine.save(state(value, base=base), step=int(value)).result() for value in values]


def assert_holds(checkpoint: Path, value: float, *, base: float = 1.0) -> None:
    """Checkpoint of :func:`state`, by our own reader, by stock, and byte by byte."""
    wanted, found = state(value, base=base), aio_ckpt.read(checkpoint)
    stock: dict[str, Any] = {
        "base": {key: torch.zeros(MIB // 4) for key in wanted["base"]},
        "adapter": torch.zeros(100),
    }
    dcp.load(stock, checkpoint_id=checkpoint, no_dist=True)
    for loaded in (found, stock):
        assert all(torch.equal(loaded["base"][key], tensor) for key, tensor in wanted["base"].items())
        assert torch.equal(loaded["adapter"], wanted["adapter"])
    assert found["rng"] == wanted["rng"]
    assert run(["verify", str(checkpoint)]) == 0


def step(root: Path, number: int) -> Path:
    return root / f"step_{number:09d}"


@pytest.fixture(autouse=True)
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no reflinks: steps share inodes, by which these tests tell them apart."""
    monkeypatch.setattr(clone, "_reflink", lambda *_: False)


@pytest.fixture
def settled(tmp_path: Path) -> Iterator[tuple[SyncCheckpointEngine, Path]]:
    """An engine that knows the frozen leaves: step 4 has written their file."""
    root = tmp_path / "root"
    with SyncCheckpointEngine(root, EngineConfig(relink_limit=4)) as engine:
        reports = save(engine, 1, 2, 3, 4)
        assert [(report.plan_hit, report.cloned_bytes) for report in reports] == [
            (False, 0), (True, 0), (True, 0), (False, 0)
        ]  # fmt: skip
        yield engine, root


def test_what_stayed_equal_for_two_saves_is_cloned_from_the_step_before(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    assert [frozen_file(step(root, number)) for number in (1, 2, 3)] == [None] * 3
    (report,) = save(engine, 5)
    assert (report.plan_hit, report.image_bytes) == (
        True,
        sum(f.stat().st_size for f in step(root, 5).glob("*.distcp")),
    )
    assert 2 * MIB < report.cloned_bytes < 2 * MIB + 20_000 < report.image_bytes + 20_000
    assert inode(step(root, 5)) == inode(step(root, 4))
    for number in (4, 5):
        assert_holds(step(root, number), number)


def test_each_step_is_whole_by_itself_whatever_becomes_of_the_others(
    settled: tuple[SyncCheckpointEngine, Path], tmp_path: Path
) -> None:
    engine, root = settled
    save(engine, 5, 6)
    engine.delete(4)
    shutil.rmtree(step(root, 5))
    shutil.copytree(step(root, 6), tmp_path / "copy")
    assert_holds(step(root, 6), 6)
    assert_holds(tmp_path / "copy", 6)
    save(engine, 7)
    assert inode(step(root, 7)) == inode(step(root, 6))


def test_a_new_plan_of_other_leaves_clones_the_same_file(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    save(engine, 5)
    report = engine.save(state(6) | {"more": torch.ones(7)}, step=6).result()
    assert (report.plan_hit, report.cloned_bytes > 2 * MIB) == (False, True)
    assert inode(step(root, 6)) == inode(step(root, 4))
    assert run(["verify", str(step(root, 6))]) == 0


def test_every_nth_step_has_a_copy_of_its_own(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    save(engine, *range(5, 13))
    inodes = [inode(step(root, number)) for number in range(4, 13)]
    assert [len({*inodes[at : at + 4]}) for at in (0, 4)] == [1, 1]
    assert len({*inodes}) == 3


@pytest.mark.parametrize("changed", ["weight", "tied"])
def test_a_frozen_tensor_that_changes_is_written_and_stays_with_the_others_from_then_on(
    settled: tuple[SyncCheckpointEngine, Path], changed: str
) -> None:
    engine, root = settled
    for number in range(5, 10):
        given = state(number)
        given["base"][changed][-1] = number
        report = engine.save(given, step=number).result()
        assert (report.cloned_bytes > 0) is (number > 6), number
        found = aio_ckpt.read(step(root, number))
        assert torch.equal(found["base"][changed], given["base"][changed])
        assert report.plan_hit is (number != 6)
    assert inode(step(root, 9)) == inode(step(root, 6))
    assert run(["verify", str(root)]) == 0


def test_parameters_that_need_no_gradient_have_their_file_from_the_first_save_on(tmp_path: Path):
    base, adapter = torch.nn.Linear(600, 600), torch.nn.Linear(600, 4)
    base.requires_grad_(False)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for number in (1, 2):
            with torch.no_grad():
                adapter.weight.add_(1)
            report = engine.save({"base": base, "adapter": adapter}, step=number).result()
            assert (report.cloned_bytes > MIB) is (number == 2)
        assert torch.equal(aio_ckpt.read(step(tmp_path / "root", 2))["base"]["weight"], base.weight)


def test_averaged_parameters_that_need_no_gradient_and_change_are_no_burden(tmp_path: Path):
    ema = torch.nn.Linear(600, 600).requires_grad_(False)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for number in range(1, 6):
            ema.weight.add_(1)
            report = engine.save({"ema": ema}, step=number).result()
            assert report.cloned_bytes == 0
            assert report.plan_hit is (number not in (1, 3))
        assert frozen_file(step(tmp_path / "root", 5)) is None


def test_with_a_limit_of_one_each_save_writes_all_and_the_format_is_the_older_one(tmp_path: Path):
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(relink_limit=1)) as engine:
        save(engine, *range(1, 7))
    assert frozen_file(step(tmp_path / "root", 6)) is None
    assert '"format": [\n  1,\n  0\n ]' in root_manifest(step(tmp_path / "root", 6)).read_text()


def test_a_step_with_a_frozen_file_has_a_format_that_older_readers_refuse(settled: tuple[SyncCheckpointEngine, Path]):
    _, root = settled
    assert '"format": [\n  2,\n  0\n ]' in root_manifest(step(root, 4)).read_text()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_that_is_no_number_of_steps_is_refused(limit: object):
    with pytest.raises(ConfigError, match="relink_limit"):
        EngineConfig(relink_limit=limit)  # type: ignore[arg-type]


def test_saves_by_path_clone_as_steps_do(tmp_path: Path):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for value in range(1, 7):
            report = engine.save(state(value), path=tmp_path / f"{value % 2}").result()
        assert report.cloned_bytes > 2 * MIB
    assert_holds(tmp_path / "1", 5)
    assert_holds(tmp_path / "0", 6)


def test_a_step_is_saved_over_while_it_shares_its_file(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    save(engine, 5)
    report = engine.save(state(50), step=5, overwrite=True).result()
    assert report.cloned_bytes > 2 * MIB
    assert_holds(step(root, 5), 50)
    assert_holds(step(root, 4), 4)


def test_two_saves_in_flight_share_the_file_of_a_committed_step(tmp_path: Path):
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(max_in_flight=2, keep_last=1)) as engine:
        tickets = [engine.save(state(value), step=value) for value in range(1, 13)]
        assert [ticket.result().step for ticket in tickets] == [*range(1, 13)]
        assert tickets[-1].result().cloned_bytes > 2 * MIB
    assert_holds(step(tmp_path / "root", 12), 12)


def test_saves_in_flight_together_share_no_more_than_the_limit(tmp_path: Path):
    base, trained = torch.nn.Parameter(torch.zeros(MIB), requires_grad=False), torch.zeros(3 * MIB)
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(max_in_flight=2, relink_limit=3)) as engine:
        tickets = [engine.save({"base": base, "trained": trained.add_(1)}, step=number) for number in range(1, 13)]
        assert any(ticket.result().cloned_bytes for ticket in tickets)
    inodes = [inode(step(tmp_path / "root", number)) for number in range(1, 13)]
    assert max(map(inodes.count, inodes)) <= 3


def test_a_save_that_is_cancelled_while_only_its_frozen_file_is_missing_says_so(tmp_path: Path):
    base = torch.nn.Parameter(torch.zeros(MIB), requires_grad=False)
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save({"base": base, "lr": 1}, step=1).result(TIMEOUT)
        gate = storage.hold("clone")
        ticket = engine.save({"base": base, "lr": 2}, step=2)
        gate.wait_reached()
        storage.wait_for("sync", "__*_0_0.distcp")
        assert ticket.cancel()
        storage.release(gate)
        assert type(ticket.exception(TIMEOUT)) is SaveCancelledError
        assert engine.save({"base": base, "lr": 3}, step=2).result(TIMEOUT).cloned_bytes > 2 * MIB


def test_an_image_in_waves_has_a_frozen_file_that_each_save_writes(tmp_path: Path):
    base = torch.nn.Linear(2048, 2048).requires_grad_(False)
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(budget_bytes=4 * MIB)) as engine:
        for number in (1, 2):
            report = engine.save({"base": base, "lr": number}, step=number).result()
            assert report.cloned_bytes == 0
        assert frozen_file(step(tmp_path / "root", 2)) is not None
        assert torch.equal(aio_ckpt.read(step(tmp_path / "root", 2))["base"]["weight"], base.weight)


# -- damage, edits, and files that are gone ----------------------------------------------------------------------


def edit(path: Path, *, keeps_time: bool) -> None:
    """Flip a bit of the values in the middle of a file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 4)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    after = before.st_mtime_ns if keeps_time else before.st_mtime_ns + 1
    os.utime(path, ns=(after, after))


def test_a_flipped_bit_is_found_in_each_step_that_shares_it_and_a_load_goes_back_past_them_all(
    settled: tuple[SyncCheckpointEngine, Path],
) -> None:
    engine, root = settled
    save(engine, *range(5, 11))
    assert inode(step(root, 8)) == inode(step(root, 10)) != inode(step(root, 7))
    frozen = frozen_file(step(root, 9))
    assert frozen is not None
    edit(frozen, keeps_time=True)
    for number in range(4, 11):
        assert run(["verify", str(step(root, number))]) == (1 if number >= 8 else 0), number
    loaded = state(0)
    report = engine.load(loaded)
    assert (report.step, [skipped.step for skipped in report.skipped]) == (7, [10, 9, 8])
    assert torch.equal(loaded["base"]["weight"], state(7)["base"]["weight"])


def test_a_step_that_somebody_edited_in_place_is_not_spread(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    save(engine, 5)
    frozen = frozen_file(step(root, 5))
    assert frozen is not None
    edit(frozen, keeps_time=False)
    (report,) = save(engine, 6)
    assert report.cloned_bytes == 0
    assert_holds(step(root, 6), 6)
    with pytest.raises(CorruptCheckpointError, match=r"_0_1\.distcp: tensor 'base"):
        aio_ckpt.read(step(root, 5))
    save(engine, 7)
    assert inode(step(root, 7)) == inode(step(root, 6))


def test_a_file_that_is_gone_is_written(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    shutil.rmtree(step(root, 4))
    (report,) = save(engine, 5)
    assert report.cloned_bytes == 0
    assert_holds(step(root, 5), 5)


def test_without_its_frozen_file_a_step_is_damaged_by_name(settled: tuple[SyncCheckpointEngine, Path]):
    _, root = settled
    frozen = frozen_file(step(root, 4))
    assert frozen is not None
    frozen.unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{frozen.name}: missing"):
        aio_ckpt.read(step(root, 4))
    assert run(["verify", str(step(root, 4))]) == 1
    assert data_file(step(root, 4)).exists()


def test_if_the_frozen_file_cannot_be_written_nothing_is_committed(tmp_path: Path):
    weight = torch.nn.Parameter(torch.zeros(MIB), requires_grad=False)

    with gated_engine(tmp_path / "root") as (engine, storage):
        storage.fail("create_data_file", "__*_0_1.distcp", WriteError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk"))
        with pytest.raises(WriteError, match="No space left"):
            engine.save({"weight": weight}, step=1).result(TIMEOUT)
        assert engine.steps().result() == []
        assert engine.save({"weight": weight}, step=1).result(TIMEOUT).step == 1


def fill_disk_for(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no room for files whose names end with ``end``."""
    reserve = data_files._reserve

    def reserve_unless_full(descriptor: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(end):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, nbytes)

    monkeypatch.setattr(data_files, "_reserve", reserve_unless_full)


@pytest.mark.parametrize("policy", ["compared", "trusted"])
def test_on_a_disk_without_room_for_a_fresh_copy_one_save_fails_and_later_ones_share_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: FrozenPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """Every save after the tenth failed, and to delete steps, as the error advised, freed nothing."""
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(MIB), requires_grad=False)})
    config = EngineConfig(relink_limit=2, frozen=policy, on_failure="log")
    with SyncCheckpointEngine(tmp_path / "root", config) as engine:
        for number in (1, 2):
            engine.save({"m": module}, step=number).result(TIMEOUT)
        fill_disk_for("_0_1.distcp", monkeypatch)
        with pytest.raises(WriteError, match="No space left"):
            engine.save({"m": module}, step=3).result(TIMEOUT)
        reports = [engine.save({"m": module}, step=number).result(TIMEOUT) for number in (4, 5, 6)]
    assert all(report.cloned_bytes > 4 * MIB for report in reports)
    (line,) = [line for line in caplog.messages if "no room for a fresh copy" in line]
    assert "beyond relink_limit=2" in line
    assert aio_ckpt.read(step(tmp_path / "root", 6))["m"]["w"].sum() == 0


@pytest.mark.parametrize("policy", ["compared", "trusted"])
@pytest.mark.parametrize("full", ["main", "frozen"])
def test_a_full_disk_is_told_with_what_a_clone_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: FrozenPolicy, full: str
) -> None:
    if full == "frozen":
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "no links")))
    weight = torch.nn.Parameter(torch.zeros(MIB), requires_grad=False)
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(frozen=policy)) as engine:
        engine.save({"weight": weight}, step=1).result()
        fill_disk_for({"main": "_0_0.distcp", "frozen": "_0_1.distcp"}[full], monkeypatch)
        with pytest.raises(WriteError, match="No space left") as caught:
            engine.save({"weight": weight}, step=2).result()
    needed = re.search(r"needs ([\d.]+ [kM]B)", str(caught.value))
    assert needed is not None
    assert (needed[1] == "4.1 kB") is (full == "main"), needed[1]
    assert needed[1].startswith("4.2") is (full == "frozen")


@pytest.mark.parametrize("number", [4, 5], ids=["written", "cloned"])
def test_a_power_loss_leaves_a_step_with_a_frozen_file_whole_or_invisible(tmp_path: Path, number: int):
    root = tmp_path / "root"
    for name in ENGINE_DIRS:  # as the first writer of a root does: the log of a save is without it
        (root / name).mkdir(parents=True)
    with gated_engine(root) as (engine, storage):
        for value in range(1, number + 1):
            engine.save(state(value), step=value).result(TIMEOUT)
        clones = [call for call in storage.calls if call.name == "clone"]
    assert len(clones) == number - 4
    check_root_mode(storage.calls, top=tmp_path, final=step(root, number))


def test_a_step_is_gone_as_soon_as_its_clone_is_made(settled: tuple[SyncCheckpointEngine, Path], tmp_path: Path):
    """Retention of one step: each save clones from the one that it replaces."""
    with SyncCheckpointEngine(tmp_path / "other", EngineConfig(keep_last=1)) as engine:
        reports = save(engine, *range(1, 9))
    assert [report.cloned_bytes > 0 for report in reports] == [False] * 4 + [True] * 4
    assert_holds(step(tmp_path / "other", 8), 8)


def test_the_process_that_goes_on_writes_all_of_its_first_steps(settled: tuple[SyncCheckpointEngine, Path]):
    engine, root = settled
    engine.close()
    with SyncCheckpointEngine(root) as again:
        reports = save(again, *range(5, 10))
    assert [report.cloned_bytes > 0 for report in reports] == [False] * 4 + [True]


# -- commands ----------------------------------------------------------------------------------------------------


def read_bytes_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of data files ``verify ROOT`` reads."""
    found: list[int] = []
    real = verify._Verification._check_ranges

    async def noted(self: Any, file: str, ranges: Any) -> int | None:
        found.append(self.files.sizes[file])
        return await real(self, file, ranges)

    monkeypatch.setattr(verify._Verification, "_check_ranges", noted)
    run(["verify", str(root)])
    return sum(found)


def test_verify_reads_what_steps_share_once_and_du_counts_it_once(
    settled: tuple[SyncCheckpointEngine, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, root = settled
    save(engine, *range(5, 10))  # steps 4 to 7 share a file, and 8 and 9
    files = {path.stat().st_ino: path.stat().st_size for path in root.glob("step_*/*.distcp")}
    assert read_bytes_of(root, monkeypatch) == sum(files.values()) < 11 * MIB
    assert capsys.readouterr().out.count(": good, 2.1") == 9
    assert run(["du", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(files.values()) <= told["checkpoints"] < sum(files.values()) + 100_000


def test_a_shared_file_with_a_fault_is_a_fault_of_each_step(
    settled: tuple[SyncCheckpointEngine, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, root = settled
    save(engine, 5, 6)
    frozen = frozen_file(step(root, 5))
    assert frozen is not None
    edit(frozen, keeps_time=True)
    assert run(["verify", str(root)]) == 1
    assert "6 checkpoints, 3 with faults" in capsys.readouterr().out


# -- a LoRA run ---------------------------------------------------------------------------------------------------


class LoraLinear(torch.nn.Module):
    """A frozen weight of 1 MiB, and an adapter of rank 4 that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(512, 512), requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(4, 512) / 23)
        self.up = torch.nn.Parameter(torch.zeros(512, 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given @ self.weight.T / 23 + given @ self.down.T @ self.up.T


def train(root: Path, last: int) -> tuple[list[float], list[bool]]:
    """Train up to step ``last`` from the newest step, and save each. Return losses, and whether each save cloned."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(LoraLinear(), torch.nn.ReLU(), LoraLinear())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "step": 0}
    losses, clones = [], []
    with SyncCheckpointEngine(root, EngineConfig(relink_limit=3, keep_last=2)) as engine:
        if engine.latest_step() is not None:
            engine.load(given)
            torch.set_rng_state(given["rng"])
        for number in range(given["step"] + 1, last + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 512)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            given |= {"rng": torch.get_rng_state(), "step": number}
            clones.append(engine.save(given, step=number).result().cloned_bytes > 2 * MIB)
    return losses, clones


def test_a_lora_run_resumes_bit_for_bit_and_writes_its_base_once_in_three_steps(tmp_path: Path):
    whole, clones = train(tmp_path / "whole", 8)
    assert clones == [False, True, True, False, True, True, False, True]
    first, _ = train(tmp_path / "parts", 5)
    then, _ = train(tmp_path / "parts", 8)
    assert [*first, *then] == whole
    found, wanted = (aio_ckpt.read(step(tmp_path / name, 8)) for name in ("parts", "whole"))
    assert all(torch.equal(found["model"][key], tensor) for key, tensor in wanted["model"].items())
    assert run(["verify", str(tmp_path / "parts")]) == 0
