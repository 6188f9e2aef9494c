"""Lightning's real Trainer and Fabric with our plugin and our strategy. Skipped without Lightning.

``pip install -e '.[dev,integrations]'`` installs it. What needs no Lightning is tested in ``tests/unit/integrations``.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from child_python import child_environment, python
from dcp_states import assert_same_state
from gated_storage import TIMEOUT, GatedStorage
from rank_processes import Ranks
from saved_files import data_file, without_save_id
from waits import until

import aio_ckpt
from aio_ckpt import ConfigError, CorruptCheckpointError, EngineConfig, SyncCheckpointEngine, WriteError
from aio_ckpt.errors import EngineForkedError
from aio_ckpt.integrations import path_saves
from aio_ckpt.integrations.patch_points import moved_names
from aio_ckpt.runtime.portal import Executor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    import lightning
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.load import _METADATA_FILENAME
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from lightning_runs import Ranks as GivenRanks
    from lightning_runs import Sharded, Small, batches, trainer

    from aio_ckpt.integrations import lightning as adapter
    from aio_ckpt.integrations.lightning import AioCheckpointIO, AioModelParallelStrategy, load_from_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore")]
LONG_SECS = 300.0
EPOCHS = 4


@pytest.fixture
def io() -> Iterator[AioCheckpointIO]:
    made = AioCheckpointIO()
    yield made
    made.teardown()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedStorage]:
    """The storage of all engines of the test."""
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)

    def opened(*args: Any, **options: Any) -> SyncCheckpointEngine:
        return SyncCheckpointEngine(*args, storage=storage, **options)

    monkeypatch.setattr(path_saves, "SyncCheckpointEngine", opened)
    yield storage
    storage.open_gates()
    assert executor.close(TIMEOUT)


@pytest.fixture(scope="module")
def losses() -> dict[int, float]:
    """Losses of a run that nothing interrupts."""
    trainer(Path(), EPOCHS).fit(module := Small(), batches())
    return module.losses


def fitted(folder: Path, *plugins: Any, epochs: int = 2, **options: Any) -> Any:
    """A Trainer that has trained a :class:`Small` with ``ModelCheckpoint(folder, **options)``."""
    done = trainer(folder, epochs, *plugins, callbacks=[ModelCheckpoint(folder, **options)])
    done.fit(Small(), batches())
    return done


def dumped(folder: Path) -> dict[str, Any]:
    """The dict that a Trainer hands to its CheckpointIO."""
    return fitted(folder, AioCheckpointIO())._checkpoint_connector.dump_checkpoint()


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


# -- names of Lightning -------------------------------------------------------------------------------


def test_the_private_names_of_lightning_are_where_they_were() -> None:
    moved = moved_names(adapter.PRIVATE_NAMES)
    assert not moved, f"{moved} of Lightning {lightning.__version__} moved; known to work: {adapter.KNOWN_VERSIONS}"
    assert _METADATA_FILENAME == adapter.META_FILE


def test_if_a_private_name_moved_lightning_itself_saves_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "PRIVATE_NAMES", {"lightning.pytorch:Trainer._moved_elsewhere": None})
    strategy = AioModelParallelStrategy()
    (said,) = [record for record in caplog.records if record.name == "aio_ckpt"]
    assert said.levelname == "WARNING"
    assert "_moved_elsewhere" in said.getMessage()
    assert adapter.KNOWN_VERSIONS in said.getMessage()
    calls: list[str] = []
    for name in ("save_checkpoint", "remove_checkpoint", "load_checkpoint", "lightning_module_state_dict"):
        monkeypatch.setattr(ModelParallelStrategy, name, lambda self, *args, _name=name: calls.append(_name) or {})
    strategy.save_checkpoint({}, "a")
    strategy.remove_checkpoint("a")
    strategy.load_checkpoint("a")
    strategy.lightning_module_state_dict()
    assert calls == ["save_checkpoint", "remove_checkpoint", "load_checkpoint", "lightning_module_state_dict"]


def test_the_strategies_are_lightnings() -> None:
    assert isinstance(AioCheckpointIO(), lightning.fabric.plugins.CheckpointIO)
    assert issubclass(AioModelParallelStrategy, ModelParallelStrategy)


@pytest.mark.slow
def test_the_adapter_works_with_the_package_pytorch_lightning(tmp_path: Path) -> None:
    source = """
        import sys, pytorch_lightning as pl
        from aio_ckpt.integrations.lightning import AioCheckpointIO, AioModelParallelStrategy
        assert issubclass(AioModelParallelStrategy, pl.strategies.ModelParallelStrategy)
        pl.Trainer(accelerator="cpu", plugins=[AioCheckpointIO()], logger=False, default_root_dir=sys.argv[1])
        assert "lightning" not in sys.modules
    """
    done = subprocess.run(python(source, str(tmp_path), options=()), env=child_environment(), capture_output=True)
    if b"No module named 'pytorch_lightning'" in done.stderr:
        pytest.skip("pytorch_lightning cannot be imported")
    assert done.returncode == 0, done.stderr.decode()


# -- what is saved comes back -------------------------------------------------------------------------


def test_what_a_trainer_saves_comes_back_as_from_lightnings_own_file(tmp_path: Path, io: AioCheckpointIO) -> None:
    given = dumped(tmp_path)
    io.save_checkpoint(given, tmp_path / "ours.ckpt")
    TorchCheckpointIO().save_checkpoint(given, tmp_path / "stock.ckpt")
    wanted = TorchCheckpointIO().load_checkpoint(tmp_path / "stock.ckpt")
    for path in ("ours.ckpt", "stock.ckpt"):  # a file of Lightning is read, too
        found = io.load_checkpoint(tmp_path / path)
        assert found.keys() == wanted.keys()
        assert_same_state(found, wanted)
        assert type(found["state_dict"]) is type(wanted["state_dict"])
        assert [*found["optimizer_states"][0]["state"]] == [*wanted["optimizer_states"][0]["state"]]


def test_a_flipped_byte_is_found(tmp_path: Path, io: AioCheckpointIO) -> None:
    io.save_checkpoint({"state_dict": {"w": torch.ones(1 << 12)}}, path := tmp_path / "a.ckpt")
    io.flush()
    file = data_file(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        io.load_checkpoint(path)


def test_weights_only_is_lightnings_rule(tmp_path: Path, io: AioCheckpointIO) -> None:
    io.save_checkpoint({"state_dict": {"w": torch.ones(2), "extra": ModelCheckpoint}}, path := tmp_path / "a.ckpt")
    takes_it = "weights_only" in inspect.signature(CheckpointIO.load_checkpoint).parameters
    for weights_only in (None, True) if takes_it else (True,):  # before 2.6, Lightning ran code by default
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            io.load_checkpoint(path, weights_only=weights_only)
    found = io.load_checkpoint(path, weights_only=False)
    assert found["state_dict"]["extra"] is ModelCheckpoint
    if not takes_it:
        assert io.load_checkpoint(path)["state_dict"]["extra"] is ModelCheckpoint
    assert torch.equal(found["state_dict"]["w"], torch.ones(2))


def test_map_location_moves_all_tensors(tmp_path: Path, io: AioCheckpointIO) -> None:
    given = {"state_dict": {"w": torch.ones(2)}, "callbacks": {"c": torch.ones(1)}}
    io.save_checkpoint(given, path := tmp_path / "a.ckpt")
    for location, device in (
        (None, "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
    ):
        found = io.load_checkpoint(path, map_location=location)
        assert {found["state_dict"]["w"].device.type, found["callbacks"]["c"].device.type} == {device}


def test_load_waits_for_a_pending_save_of_the_path(tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO) -> None:
    gate = disk.hold("rename")
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, path := tmp_path / "a.ckpt")
    gate.wait_reached()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(io.load_checkpoint(path)))
    reader.start()
    assert not path.exists()
    gate.open()
    reader.join(TIMEOUT)
    assert torch.equal(found[0]["state_dict"]["w"], torch.ones(2))


def test_load_from_checkpoint_waits_for_a_pending_save_of_the_path(tmp_path: Path, disk: GatedStorage) -> None:
    """It is given a path alone, and no plugin."""
    done = fitted(tmp_path, plugin := AioCheckpointIO())
    done.save_checkpoint(path := tmp_path / "a.ckpt")
    saved = plugin.load_checkpoint(path)
    with torch.no_grad():
        done.lightning_module.net[0].weight.fill_(7.0)
    gate = disk.hold("replace")
    plugin.save_checkpoint(saved | {"state_dict": done.lightning_module.state_dict(), "global_step": 10**6}, path)
    gate.wait_reached()
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(load_from_checkpoint(Small, path)))
    reader.start()
    gate.open()
    reader.join(TIMEOUT)
    assert (found[0].net[0].weight == 7).all()
    plugin.teardown()


def test_storage_options_are_refused_and_urls_are_left_to_lightning(
    tmp_path: Path, io: AioCheckpointIO, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
    url = "memory://some/a.ckpt"
    io.save_checkpoint({"w": torch.ones(2)}, url)
    assert "Lightning itself saves it" in caplog.text
    assert torch.equal(io.load_checkpoint(url)["w"], torch.ones(2))
    io.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(url)


def test_load_from_checkpoint_makes_the_module(tmp_path: Path) -> None:
    done = fitted(tmp_path, AioCheckpointIO(), save_last=True)
    done.save_checkpoint(tmp_path / "ours.ckpt")
    done.strategy.teardown()
    torch.save(AioCheckpointIO().load_checkpoint(tmp_path / "ours.ckpt"), tmp_path / "stock.ckpt")
    for path in ("ours.ckpt", "last.ckpt", "stock.ckpt"):
        module = load_from_checkpoint(Small, tmp_path / path)
        assert torch.equal(module.net[0].weight, done.lightning_module.net[0].weight)
        assert module.hparams.width == 16
    assert load_from_checkpoint(Small, tmp_path / "ours.ckpt", strict=False, width=16).hparams.width == 16
    with pytest.raises(IsADirectoryError):  # why there is a function
        Small.load_from_checkpoint(tmp_path / "ours.ckpt")


def test_one_line_makes_a_file_that_stock_resumes_from(tmp_path: Path, losses: dict[int, float]) -> None:
    fitted(tmp_path, AioCheckpointIO(), save_last=True, save_top_k=0)
    torch.save(AioCheckpointIO().load_checkpoint(tmp_path / "last.ckpt"), tmp_path / "stock.ckpt")
    trainer(tmp_path, EPOCHS).fit(module := Small(), batches(), ckpt_path=tmp_path / "stock.ckpt")
    assert module.losses == {step: loss for step, loss in losses.items() if step >= 8}


# -- ModelCheckpoint ----------------------------------------------------------------------------------


def test_the_names_are_those_that_lightning_keeps(tmp_path: Path) -> None:
    for name, plugins in (("ours", [AioCheckpointIO()]), ("stock", [])):
        fitted(tmp_path / name, *plugins, epochs=EPOCHS, monitor="loss", save_top_k=2, save_last=True)
    assert visible(tmp_path / "ours") == visible(tmp_path / "stock")
    for name in visible(tmp_path / "ours"):
        assert_same_state(
            aio_ckpt.read(tmp_path / "ours" / name)["state_dict"], torch.load(tmp_path / "stock" / name)["state_dict"]
        )


@pytest.mark.parametrize("last", [True, "link"])
def test_a_stopped_run_resumes_with_equal_losses(tmp_path: Path, losses: dict[int, float], last: Any) -> None:
    fitted(tmp_path, AioCheckpointIO(), save_last=last)
    resumed = trainer(tmp_path, EPOCHS, AioCheckpointIO(), callbacks=[ModelCheckpoint(tmp_path, save_last=last)])
    resumed.fit(module := Small(), batches(), ckpt_path="last")
    assert module.losses == {step: loss for step, loss in losses.items() if step >= 8}
    assert aio_ckpt.read(tmp_path / "last.ckpt")["optimizer_0"]["state"][0]["step"] == 4 * EPOCHS
    assert (tmp_path / "last.ckpt").is_symlink() == (last == "link")


def waits_for_its_commit(disk: GatedStorage, io: AioCheckpointIO, checkpoint: dict[str, Any], path: Path) -> bool:
    """Whether a save has not returned while its commit is held."""
    gate = disk.hold("rename")
    saving = threading.Thread(target=io.save_checkpoint, args=(checkpoint, path))
    saving.start()
    gate.wait_reached()
    saving.join(0.3)  # a save that does not wait has returned long before
    waits = saving.is_alive()
    gate.open()
    saving.join(TIMEOUT)
    return waits


def test_a_link_to_the_newest_checkpoint_leads_somewhere_always(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO
) -> None:
    """ModelCheckpoint makes ``last.ckpt`` a link to what was saved, as soon as the save has returned."""
    callbacks = {"ModelCheckpoint": {"last_model_path": str(tmp_path / "last.ckpt")}}
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "callbacks": callbacks}
    assert not waits_for_its_commit(disk, io, checkpoint, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert waits_for_its_commit(disk, io, checkpoint, tmp_path / "b.ckpt")


@pytest.mark.parametrize("name", ["hpc_ckpt_1.ckpt", ".temp.ckpt"])
def test_a_save_before_the_end_of_the_process_waits_for_its_commit(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO, name: str
) -> None:
    assert waits_for_its_commit(disk, io, {"state_dict": {"w": torch.ones(2)}}, tmp_path / name)


def test_a_deletion_comes_behind_the_commit(tmp_path: Path, disk: GatedStorage) -> None:
    """ModelCheckpoint removes the last good checkpoint as soon as the save of the new one has returned."""
    seen: list[tuple[list[str], bool]] = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                disk.wait_for("rename")  # the first checkpoint
                self.gate = disk.hold("rename")
            if trainer.current_epoch == 2:  # the second is pending, and Lightning has removed the first
                self.gate.wait_reached()
                seen.append((visible(tmp_path), is_readable(tmp_path)))
                self.gate.open()
                disk.release(self.gate)

    done = trainer(tmp_path, 3, AioCheckpointIO(), callbacks=[Look(), ModelCheckpoint(tmp_path)])
    done.fit(Small(), batches())
    assert seen == [(["epoch=0-step=4.ckpt"], True)]
    assert visible(tmp_path) == ["epoch=2-step=12.ckpt"]


class HeldEpochs(Callback):
    """No save of an epoch is durable before the next one begins."""

    def __init__(self, disk: GatedStorage, io: AioCheckpointIO) -> None:
        self.disk, self.gate, self.io = disk, disk.hold("rename"), io

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.gate.open()
        self.io.flush()
        self.disk.release(self.gate)
        self.gate = self.disk.hold("rename")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.gate.open()


@pytest.mark.parametrize("options", [{}, {"save_last": True}], ids=str)
def test_two_callbacks_of_one_directory_get_names_of_their_own_as_from_stock(
    tmp_path: Path, disk: GatedStorage, options: dict[str, Any]
) -> None:
    """The better one of one callback would be deleted by it while the other one keeps it."""

    def names(folder: Path, *plugins: Any, callbacks: list[Callback]) -> list[str]:
        best = ModelCheckpoint(folder, monitor="loss", **options)
        every = ModelCheckpoint(folder, save_top_k=-1, **options)
        trainer(folder, 3, *plugins, callbacks=[*callbacks, best, every]).fit(Small(), batches())
        return visible(folder)

    stock = names(tmp_path / "stock", callbacks=[])
    assert len(stock) >= 4
    ours = AioCheckpointIO(EngineConfig(max_in_flight=8))
    assert names(tmp_path / "ours", ours, callbacks=[HeldEpochs(disk, ours)]) == stock


def is_readable(folder: Path) -> bool:
    return all("state_dict" in aio_ckpt.read(folder / name) for name in visible(folder))


def test_a_failed_save_keeps_the_checkpoint_that_it_would_replace(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO, quiet: None
) -> None:
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "old.ckpt")
    io.flush()
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(WriteError):
        io.teardown()
    assert visible(tmp_path) == ["old.ckpt"]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_failed_save_keeps_the_file_of_lightning_that_it_would_replace(
    tmp_path: Path,
    disk: GatedStorage,
    io: AioCheckpointIO,
    caplog: pytest.LogCaptureFixture,
    has_ended: bool,
) -> None:
    torch.save({"old": 1}, old := tmp_path / "old.ckpt")
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    io.save_checkpoint({"w": torch.ones(2)}, new := tmp_path / "new.ckpt")
    if has_ended:
        until(lambda: not io._saves.is_pending(new))
    io.remove_checkpoint(old)
    assert visible(tmp_path) == ["old.ckpt"]
    assert "old.ckpt stays: the save of" in caplog.text
    with pytest.raises(WriteError):  # the failure of the save before; this one goes on
        io.save_checkpoint({"w": torch.ones(1)}, new)
    io.remove_checkpoint(old)
    assert visible(tmp_path) == ["new.ckpt"]


def test_a_forked_process_does_not_wait_for_a_save_of_its_parent_to_delete_a_file(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO
) -> None:
    torch.save({"old": 1}, old := tmp_path / "old.ckpt")
    gate = disk.hold("rename")
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "new.ckpt")
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends one that waits
        try:
            io.remove_checkpoint(old)
        except EngineForkedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open()
    assert old.exists()


def test_a_name_that_is_taken_twice_is_replaced_in_the_order_of_the_saves(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO
) -> None:
    gate, path = disk.hold("rename"), tmp_path / "last.ckpt"
    for number in (1.0, 2.0):
        io.save_checkpoint({"state_dict": {"w": torch.full((2,), number)}}, path)
    gate.open()
    io.remove_checkpoint(path)
    io.save_checkpoint({"state_dict": {"w": torch.full((2,), 3.0)}}, path)
    io.teardown()
    assert io.load_checkpoint(path)["state_dict"]["w"][0] == 3


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_of_lightning_is_replaced_and_removed(tmp_path: Path, io: AioCheckpointIO, kind: str) -> None:
    path, target = tmp_path / "last.ckpt", tmp_path / "target.ckpt"
    torch.save({"old": 1}, target if kind == "link" else path)
    if kind == "link":
        path.symlink_to(target)
    io.save_checkpoint({"new": torch.ones(1)}, path)
    assert io.load_checkpoint(path)["new"] == 1
    assert visible(tmp_path) == ["last.ckpt", "target.ckpt"][: 2 if kind == "link" else 1]
    torch.save({}, tmp_path / "stock.ckpt")
    for name in ("stock.ckpt", "missing.ckpt", "last.ckpt"):
        io.remove_checkpoint(tmp_path / name)
    io.teardown()
    assert visible(tmp_path) == (["target.ckpt"] if kind == "link" else [])


def test_a_file_comes_back_if_the_save_in_its_place_fails(
    tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO, quiet: None
) -> None:
    torch.save({"old": 1}, path := tmp_path / "last.ckpt")
    gate = disk.hold("rename")
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    raised: list[BaseException] = []

    def save() -> None:
        try:
            io.save_checkpoint({"w": torch.ones(1)}, path)
        except WriteError as error:
            raised.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    gate.wait_reached()
    assert visible(tmp_path) == ["last-before.ckpt"]  # which ckpt_path="last" finds
    gate.open()
    saving.join(TIMEOUT)
    assert len(raised) == 1
    assert torch.load(path) == {"old": 1}
    assert visible(tmp_path) == ["last.ckpt"]


# -- the end of a fit ---------------------------------------------------------------------------------


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "aio_ckpt" in thread.name]


def test_a_fit_leaves_no_engine_and_a_second_fit_opens_one(tmp_path: Path) -> None:
    done = fitted(tmp_path, AioCheckpointIO(), save_last=True)
    assert engine_threads() == []
    done.fit_loop.max_epochs = EPOCHS
    done.fit(done.lightning_module, batches())
    assert engine_threads() == []
    assert aio_ckpt.read(tmp_path / "last.ckpt")["optimizer_0"]["state"][0]["step"] == 8
    done.save_checkpoint(tmp_path / "more.ckpt")
    assert engine_threads() == [], "nobody would close it, and another trainer could not save here"
    assert "more.ckpt" in visible(tmp_path)
    fitted(tmp_path, AioCheckpointIO(), epochs=1)


def test_the_end_of_a_fit_raises_the_failure_of_its_last_save(tmp_path: Path, disk: GatedStorage, quiet: None) -> None:
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    with pytest.raises(WriteError):
        fitted(tmp_path, AioCheckpointIO(), epochs=1)


def test_a_save_behind_the_end_of_a_fit_waits_and_raises_its_failure(
    tmp_path: Path, disk: GatedStorage, quiet: None
) -> None:
    """A script may end next, and nobody would hear of a failure."""
    done = fitted(tmp_path, AioCheckpointIO(), epochs=1)
    done.save_checkpoint(tmp_path / "a.ckpt")
    assert is_readable(tmp_path)
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    with pytest.raises(WriteError):
        done.save_checkpoint(tmp_path / "b.ckpt")


def test_a_second_fit_saves_in_the_background_again(tmp_path: Path, disk: GatedStorage, io: AioCheckpointIO) -> None:
    state = {"state_dict": {"w": torch.ones(2)}}
    io.teardown()
    for name in "abc":  # nothing is trained in between
        assert waits_for_its_commit(disk, io, state | {"global_step": 4}, tmp_path / name)
    io.save_checkpoint(state | {"global_step": 8}, tmp_path / "fit")
    assert not waits_for_its_commit(disk, io, state | {"global_step": 12}, tmp_path / "fit-12")


def test_an_exception_leaves_a_checkpoint_and_is_raised_though_the_save_before_failed(
    tmp_path: Path, disk: GatedStorage, quiet: None
) -> None:
    failing = trainer(tmp_path, 2, AioCheckpointIO(), callbacks=[OnExceptionCheckpoint(tmp_path)])
    with pytest.raises(RuntimeError, match="the step fails"):
        failing.fit(Small(fails_at=6), batches())
    assert aio_ckpt.read(tmp_path / "on_exception.ckpt")["optimizer_0"]["state"][0]["step"] == 6
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    failing = trainer(tmp_path, 2, AioCheckpointIO(), callbacks=[OnExceptionCheckpoint(tmp_path / "other")])
    with pytest.raises(RuntimeError, match="the step fails"):
        failing.fit(Small(fails_at=1), batches())
    assert not (tmp_path / "other" / "on_exception.ckpt").exists()


TRAINER = """
    import os, sys, signal, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from gated_storage import GatedStorage
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning_runs import Small, batches, trainer
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.integrations import path_saves
    from aio_ckpt.integrations.lightning import AioCheckpointIO
    from aio_ckpt.runtime.portal import Executor

    folder, disk = Path(sys.argv[1]), GatedStorage(Executor("gated", 4))
    path_saves.SyncCheckpointEngine = lambda *args, **options: SyncCheckpointEngine(*args, storage=disk, **options)

    class Kill(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 2:  # two checkpoints are durable
                for ticket in trainer.strategy.checkpoint_io._saves._tickets.values():
                    ticket.result()
                self.gate = disk.hold("rename")

        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 13:  # the third is pending, and Lightning has removed the second
                self.gate.wait_reached()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer(folder, 4, AioCheckpointIO(), callbacks=[Kill(), ModelCheckpoint(folder, save_last=True)]).fit(
        Small(), batches()
    )
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_the_middle_of_a_save_resumes_with_equal_losses(
    tmp_path: Path, losses: dict[int, float]
) -> None:
    done = subprocess.run(python(TRAINER, str(tmp_path), options=()), env=child_environment(), capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert visible(tmp_path) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    resumed = trainer(tmp_path, EPOCHS, AioCheckpointIO(), callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    resumed.fit(module := Small(), batches(), ckpt_path="last")
    assert module.losses == {step: loss for step, loss in losses.items() if step >= 8}


# -- Fabric -------------------------------------------------------------------------------------------


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    plugin = AioCheckpointIO()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(net := torch.nn.Linear(3, 2), torch.optim.AdamW(net.parameters()))
    fabric.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(tmp_path / "a.ckpt", state, filter={"model": lambda name, value: name != "bias"})
    fabric.save(tmp_path / "b.ckpt", state)
    wanted = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        net.weight.zero_()
    state["step"] = 0
    assert fabric.load(tmp_path / "b.ckpt", state) == {}
    assert state["step"] == 3
    assert_same_state(dict(net.state_dict()), wanted)
    assert fabric.load(tmp_path / "a.ckpt")["model"].keys() == {"weight"}
    plugin.teardown()


# -- many ranks ---------------------------------------------------------------------------------------


def test_the_plugin_can_be_sent_to_another_process(tmp_path: Path, io: AioCheckpointIO) -> None:
    io.save_checkpoint({"w": torch.ones(1)}, tmp_path / "a.ckpt")
    other = pickle.loads(pickle.dumps(io))
    io.teardown()
    other.save_checkpoint({"w": torch.ones(1)}, tmp_path / "b.ckpt")
    other.teardown()
    assert visible(tmp_path) == ["a.ckpt", "b.ckpt"]


@pytest.mark.slow
def test_spawned_ranks_save_and_the_main_process_gets_the_weights(tmp_path: Path) -> None:
    source = f"""
        import sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning_runs import Small, batches, trainer
        from aio_ckpt.integrations.lightning import AioCheckpointIO

        if __name__ == "__main__":
            folder, module = Path({str(tmp_path)!r}), Small()
            before = module.net[0].weight.clone()
            done = trainer(folder, 2, AioCheckpointIO(), devices=2, strategy="ddp_spawn",
                           callbacks=[ModelCheckpoint(folder, save_last=True)])
            done.fit(module, batches())
            assert not before.equal(module.net[0].weight)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run([sys.executable, script], env=child_environment(), capture_output=True, timeout=LONG_SECS)
    assert done.returncode == 0, done.stderr.decode()
    assert visible(tmp_path) == ["epoch=1-step=4.ckpt", "last.ckpt", "script.py"]


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns, without Lightning's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn()


def ddp_trains(rank: int, count: int, folder: Path) -> tuple[list[str], float]:
    """Train by DDP; the engines that this rank opened, and the sum of the weights."""
    os.environ["LOCAL_RANK"] = str(rank)
    opened: list[str] = []
    plain = path_saves.SyncCheckpointEngine

    def noted(root: Path, *args: Any, **options: Any) -> SyncCheckpointEngine:
        opened.append(str(root))
        return plain(root, *args, **options)

    def train() -> float:
        path_saves.SyncCheckpointEngine = noted  # type: ignore[assignment,misc]
        try:
            done = trainer(
                folder,
                2,
                AioCheckpointIO(),
                GivenRanks(rank, count),
                devices=count,
                strategy=DDPStrategy(process_group_backend="gloo"),
                callbacks=[ModelCheckpoint(folder, save_last=True)],
            )
            done.fit(Small(), batches())
            again = trainer(
                folder, 4, AioCheckpointIO(), GivenRanks(rank, count), devices=count, strategy=DDPStrategy()
            )
            again.fit(module := Small(), batches(), ckpt_path=folder / "last.ckpt")
            assert again.global_step == 8
            return float(sum(p.double().sum() for p in module.parameters()))
        finally:
            path_saves.SyncCheckpointEngine = plain  # type: ignore[misc]

    total = told(train)
    return opened, total


@pytest.mark.slow
def test_of_the_ranks_of_ddp_rank_0_alone_saves_and_all_load(two: Ranks, tmp_path: Path) -> None:
    (first, total), (second, other) = two.run(ddp_trains, tmp_path, timeout=LONG_SECS)
    assert (first, second) == ([str(tmp_path)], [])
    assert total == other
    assert visible(tmp_path) == ["epoch=1-step=4.ckpt", "last.ckpt"]


def sharded_trains(
    rank: int, count: int, folder: Path, is_ours: bool, epochs: int, resume: Path | None, accelerator: str = "cpu"
) -> dict[str, Any]:
    """Train by FSDP2 with ModelCheckpoint; the losses of this rank, and the devices of what was captured."""
    os.environ["LOCAL_RANK"] = str(rank)
    devices: set[str] = set()

    def train() -> dict[str, Any]:
        strategy = (AioModelParallelStrategy if is_ours else ModelParallelStrategy)(
            data_parallel_size=count, tensor_parallel_size=1
        )
        taken = strategy.lightning_module_state_dict

        def noted() -> dict[str, Any]:
            state = taken()
            devices.update(value.device.type for value in state.values())
            return state

        strategy.lightning_module_state_dict = noted
        checkpoints = ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last=True)
        done = trainer(
            folder,
            epochs,
            GivenRanks(rank, count),
            devices=count,
            strategy=strategy,
            accelerator=accelerator,
            callbacks=[checkpoints],
        )
        done.fit(module := Sharded(), batches(), ckpt_path=resume)
        until(lambda: not engine_threads())  # those of the pool end a moment later
        return {"losses": module.losses, "devices": devices, "steps": done.global_step}

    return told(train)


@pytest.mark.slow
def test_sharded_checkpoints_of_both_strategies_are_resumed_by_both(two: Ranks, tmp_path: Path) -> None:
    whole = two.run(sharded_trains, tmp_path / "whole", False, EPOCHS, None, timeout=LONG_SECS)
    for name, is_ours in (("ours", True), ("stock", False)):
        two.run(sharded_trains, tmp_path / name, is_ours, 2, None, timeout=LONG_SECS)
    assert visible(tmp_path / "ours") == visible(tmp_path / "stock")
    for name in visible(tmp_path / "ours"):
        files = map(without_save_id, os.listdir(tmp_path / "ours" / name))
        assert {"meta.pt", "aio_ckpt.*.json", ".metadata", "__*_0_0.distcp", "__*_1_0.distcp"} <= set(files)
    for name, is_ours in (("ours", True), ("ours", False), ("stock", True)):
        target = tmp_path / f"from {name} {is_ours}"
        found = two.run(sharded_trains, target, is_ours, EPOCHS, tmp_path / name / "last.ckpt", timeout=LONG_SECS)
        for rank in range(2):
            wanted = {step: loss for step, loss in whole[rank]["losses"].items() if step >= 4}
            assert found[rank]["losses"] == wanted


def sharded_replaces(rank: int, count: int, folder: Path) -> list[list[str]]:
    """Save where a file of Lightning stands, then remove the checkpoint, a file, and nothing; what was visible."""
    os.environ["LOCAL_RANK"] = str(rank)

    def train() -> list[list[str]]:
        strategy = AioModelParallelStrategy(data_parallel_size=count, tensor_parallel_size=1)
        done = trainer(folder, 1, GivenRanks(rank, count), devices=count, strategy=strategy)
        done.fit(Sharded(), batches())
        done.save_checkpoint(folder / "last.ckpt")
        seen = [visible(folder)]
        done.strategy.barrier()
        for name in ("last.ckpt", "file.ckpt", "sharded.ckpt", "missing.ckpt"):
            done.strategy.remove_checkpoint(folder / name)
        done.strategy.teardown()
        done.strategy.barrier()
        return [*seen, visible(folder)]

    return told(train)


@pytest.mark.slow
def test_the_strategy_replaces_and_removes_files_of_lightning(two: Ranks, tmp_path: Path) -> None:
    for name in ("last.ckpt", "file.ckpt"):
        torch.save({}, tmp_path / name)
    (tmp_path / "sharded.ckpt").mkdir()  # by stock's ModelParallelStrategy
    for name in ("meta.pt", ".metadata", "__0_0.distcp"):
        (tmp_path / "sharded.ckpt" / name).touch()
    found = two.run(sharded_replaces, tmp_path, timeout=LONG_SECS)
    assert found[0] == [["file.ckpt", "last.ckpt", "sharded.ckpt"], []]
    assert found[1][1] == []


def sharded_finds(rank: int, count: int, folder: Path, path: Path) -> str:
    try:
        sharded_trains(rank, count, folder, True, EPOCHS, path)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_changed_meta_file_is_found_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    two.run(sharded_trains, tmp_path, True, 1, None, timeout=LONG_SECS)
    meta = tmp_path / "last.ckpt" / "meta.pt"
    meta.write_bytes(meta.read_bytes()[:-1] + b"x")
    found = two.run(sharded_finds, tmp_path / "more", tmp_path / "last.ckpt", timeout=LONG_SECS)
    assert ["meta.pt is not what was saved" in text for text in found] == [True, True]


@pytest.mark.slow
def test_a_sharded_checkpoint_is_read_without_ranks(two: Ranks, tmp_path: Path) -> None:
    two.run(sharded_trains, tmp_path, True, 1, None, timeout=LONG_SECS)
    module = load_from_checkpoint(Small, tmp_path / "last.ckpt")
    assert torch.equal(module.net[0].weight, aio_ckpt.read(tmp_path / "last.ckpt")["state_dict"]["net.0.weight"])


# -- GPUs ---------------------------------------------------------------------------------------------

ON_GPUS = """
    import sys, warnings
    from pathlib import Path
    import lightning_runs
    warnings.simplefilter("ignore")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from aio_ckpt.integrations.lightning import AioCheckpointIO, AioModelParallelStrategy

    folder, count, devices = Path(sys.argv[1]), int(sys.argv[2]), set()

    class Strategy(AioModelParallelStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            states = [checkpoint["state_dict"], *checkpoint["optimizer_states"][0]["state"].values()]
            devices.update(value.device.type for state in states for name, value in state.items() if name != "step")
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def train(name, kind, epochs, resume=None):
        size = {"data_parallel_size": count, "tensor_parallel_size": 1}
        strategy = "ddp" if kind == "ddp" else (Strategy if kind == "ours" else ModelParallelStrategy)(**size)
        module = (lightning_runs.Small if kind == "ddp" else lightning_runs.Sharded)()
        done = lightning_runs.trainer(
            folder / name, epochs, *([AioCheckpointIO()] if kind == "ddp" else []), accelerator="gpu", devices=count,
            strategy=strategy, callbacks=[ModelCheckpoint(folder / name, save_last=True)],
        )
        done.fit(module, lightning_runs.batches(), ckpt_path=resume)
        return module.losses

    for kinds in (("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("ddp", "ddp")):
        whole = train(f"{kinds} whole", kinds[0], 4)
        half = train(f"{kinds} half", kinds[0], 2)
        rest = train(f"{kinds} rest", kinds[1], 4, folder / f"{kinds} half" / "last.ckpt")
        assert {**half, **rest} == whole, kinds
        assert min(rest) == len(half), kinds
    assert devices == {"cuda"}, devices
    print("resumed with equal losses", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_on_gpus_shards_are_captured_on_the_devices_and_resumed_with_equal_losses(tmp_path: Path, count: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ON_GPUS))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path), str(count)],
        env=child_environment(),
        capture_output=True,
        timeout=LONG_SECS,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("resumed with equal losses") == count
