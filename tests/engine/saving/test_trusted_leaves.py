"""``frozen="trusted"``: frozen leaves whose storage and version are those of the last save are not captured again."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import flip
from gated_storage import TIMEOUT, Gate, gated_engine

import aio_ckpt
import aio_ckpt.dcp
from aio_ckpt import EngineConfig, SaveReport, SyncCheckpointEngine
from aio_ckpt.cli.commands import run
from aio_ckpt.engine import trusted_leaves
from aio_ckpt.errors import ConfigError, CorruptCheckpointError, ReadError
from aio_ckpt.snapshot import sample
from aio_ckpt.storage import clone

MIB = 1 << 20
NEVER_CLONED = 1000


class Lora(torch.nn.Module):
    """A frozen base of 5 MiB in two tensors, and an adapter."""

    def __init__(self, numel: int = MIB) -> None:
        super().__init__()
        self.halves = torch.arange(float(numel)).repeat(2)
        self.halves[-1] = 3.0
        self.base = torch.nn.Parameter(self.halves[:numel], requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(MIB // 4), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.zeros(100))


@pytest.fixture(autouse=True)
def hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no reflinks: steps share inodes, by which these tests tell them apart."""
    monkeypatch.setattr(clone, "_reflink", lambda *_: False)


@pytest.fixture
def model() -> Lora:
    return Lora()


@pytest.fixture
def engine(root: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(root, EngineConfig(frozen="trusted", relink_limit=4)) as engine:
        yield engine


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample looks at the first block of the frozen file alone."""
    monkeypatch.setattr(sample.random.SystemRandom, "sample", lambda self, population, count: [0])


def step(root: Path, number: int) -> Path:
    return root / f"step_{number:09d}"


def frozen_file(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("__*_0_1.distcp")
    return path


def inode(root: Path, number: int) -> int:
    return frozen_file(step(root, number)).stat().st_ino


def save(engine: SyncCheckpointEngine, model: Lora, *numbers: int) -> list[SaveReport]:
    """Save these steps, in each of which the adapter holds its number."""
    reports = []
    for number in numbers:
        with torch.no_grad():
            model.adapter.fill_(number)
        reports.append(engine.save({"model": model}, step=number).result())
    return reports


def assert_holds(root: Path, number: int, model: Lora) -> None:
    found = aio_ckpt.read(step(root, number))["model"]
    for name in ("base", "scale"):
        assert torch.equal(found[name], model.get_parameter(name)), name
    assert torch.equal(found["adapter"], torch.full((100,), float(number)))
    assert run(["verify", str(step(root, number))]) == 0


def poke(tensor: torch.Tensor, index: int, value: float) -> None:
    """Change an element behind the back of ``_version``, as a kernel of the user's own does."""
    version = tensor._version
    tensor.detach().numpy()[index] = value
    assert tensor._version == version


# -- what is not captured ----------------------------------------------------------------------------


@pytest.mark.usefixtures("one_block")
def test_what_is_trusted_is_not_read(engine: SyncCheckpointEngine, model: Lora, root: Path) -> None:
    save(engine, model, 1)
    poke(model.base, -1, 7.0)
    (report,) = save(engine, model, 2)
    assert report.cloned_bytes > 5 * MIB
    assert inode(root, 2) == inode(root, 1)
    assert aio_ckpt.read(step(root, 2))["model"]["base"][-1] == MIB - 1  # what the docs say that it trusts


def test_only_the_others_are_staged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged is the main file, and room for the sample."""
    asked: list[int] = []
    lease = trusted_leaves.CaptureResources.lease

    def noted(self: Any, planned: Any, *given: Any, **named: Any) -> Any:
        image = lease(self, planned, *given, **named)
        asked.append(image.nbytes)
        return image

    monkeypatch.setattr(trusted_leaves.CaptureResources, "lease", noted)
    model = Lora()
    with SyncCheckpointEngine(root, EngineConfig(frozen="trusted")) as engine:
        save(engine, model, 1, 2, 3)
    assert asked[0] > 5 * MIB
    assert max(asked[1:]) < 20_000


def test_each_step_is_whole(engine: SyncCheckpointEngine, model: Lora, root: Path) -> None:
    reports = save(engine, model, *range(1, 8))
    assert [report.plan_hit for report in reports] == [False] + [True] * 6
    whole = {sum(file.stat().st_size for file in step(root, n).glob("*.distcp")) for n in range(1, 8)}
    assert whole == {report.image_bytes for report in reports}
    for number in range(1, 8):
        assert_holds(root, number, model)


def test_every_nth_step_has_a_verified_copy_of_its_own(engine: SyncCheckpointEngine, model: Lora, root: Path) -> None:
    reports = save(engine, model, *range(1, 10))
    inodes = [inode(root, number) for number in range(1, 10)]
    assert [len({*inodes[at : at + 4]}) for at in (0, 4)] == [1, 1]
    assert len({*inodes}) == 3
    assert [report.cloned_bytes > 0 for report in reports] == [False, True, True, True, False, True, True, True, False]
    assert_holds(root, 5, model)
    assert_holds(root, 9, model)


def test_where_nothing_can_be_cloned_the_file_is_copied_and_verified(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is larger than the room behind the image, and copied in waves."""
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "no links")))
    monkeypatch.setattr(trusted_leaves, "SAMPLE_BYTES", 4 * MIB)
    monkeypatch.setattr(sample, "_BLOCKS", 4)
    model = Lora(5 * MIB)
    with SyncCheckpointEngine(root, EngineConfig(frozen="trusted")) as engine:
        reports = save(engine, model, 1, 2, 3)
    assert [report.cloned_bytes for report in reports] == [0, 0, 0]
    for number in (1, 2, 3):
        assert_holds(root, number, model)
    assert len({inode(root, number) for number in (1, 2, 3)}) == 3


# -- what is captured all the same ---------------------------------------------------------------------

CHANGED = torch.arange(float(MIB))
CHANGED[-1] = 3.0

CHANGES: dict[str, Callable[[Lora], object]] = {
    "in place": lambda model: model.base.detach()[-1].fill_(3.0),
    "by load_state_dict": lambda model: model.load_state_dict({**model.state_dict(), "base": CHANGED}),
    "other memory": lambda model: setattr(model.base, "data", CHANGED.clone()),
    "other tensor": lambda model: setattr(model, "base", torch.nn.Parameter(CHANGED.clone(), requires_grad=False)),
    "other part of one memory": lambda model: setattr(model.base, "data", model.halves[MIB:]),
}
"""Changes of the last element of the base, which the sample does not look at."""


@pytest.mark.sampled
@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_torch_counts_is_written(
    engine: SyncCheckpointEngine, model: Lora, root: Path, change: str
) -> None:
    save(engine, model, 1, 2)
    CHANGES[change](model)
    save(engine, model, 3, 4, 5)
    for number in (3, 4, 5):
        assert_holds(root, number, model)
    assert inode(root, 3) != inode(root, 2)


LOADERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "engine": lambda state, path: aio_ckpt.load(path, state),
    "stock": lambda state, path: dcp.load(state, checkpoint_id=path, no_dist=True),
    "our reader under stock": lambda state, path: dcp.load(
        state, storage_reader=aio_ckpt.dcp.Reader(path), no_dist=True
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("loader", LOADERS)
def test_what_a_load_fills_is_written(
    engine: SyncCheckpointEngine, model: Lora, root: Path, tmp_path: Path, loader: str
) -> None:
    with SyncCheckpointEngine(tmp_path / "other") as other:
        path = other.save({"base": CHANGED, "scale": model.scale, "adapter": model.adapter}).result().path
    save(engine, model, 1, 2)
    LOADERS[loader](model.state_dict(), path)
    assert torch.equal(model.base, CHANGED)
    save(engine, model, 3)
    assert_holds(root, 3, model)


@pytest.mark.usefixtures("one_block")
def test_a_layer_that_is_unfrozen_is_written_whatever_its_optimizer_counts(
    engine: SyncCheckpointEngine, model: Lora, root: Path
) -> None:
    """Fused optimizers do not raise ``_version``."""
    save(engine, model, 1, 2)
    model.base.requires_grad_(True)
    optimizer = torch.optim.AdamW([model.base], lr=1.0, weight_decay=0.0, fused=True)
    version = model.base._version
    for number in (3, 4, 5):
        model.base.grad = torch.zeros_like(model.base)
        model.base.grad[-1] = 1.0
        before = model.base[-1].item()
        optimizer.step()
        assert model.base[-1].item() != before
        save(engine, model, number)
        assert_holds(root, number, model)
    assert model.base._version == version


@pytest.mark.usefixtures("one_block")
def test_tensors_that_are_no_parameters_are_compared(engine: SyncCheckpointEngine, model: Lora, root: Path) -> None:
    """Those of a ``state_dict()`` tell neither whether they need a gradient nor what changes them."""
    for number in range(1, 8):
        if number == 6:
            poke(model.base, -1, 3.0)
        report = engine.save({**model.state_dict(), "step": number}, step=number).result()
        assert (report.cloned_bytes > 0) is (number == 5), number
        assert torch.equal(aio_ckpt.read(step(root, number))["base"], model.base), number


@pytest.mark.usefixtures("one_block")
def test_another_parameter_with_the_memory_and_the_version_of_the_old_one_is_not_trusted(
    engine: SyncCheckpointEngine, model: Lora, root: Path
) -> None:
    with torch.no_grad():
        model.base[0] = 0.0
    save(engine, model, 1, 2)
    version = model.base._version
    model.base = torch.nn.Parameter(model.base.data, requires_grad=False)
    while model.base._version < version:
        model.base[-1] = 3.0
    assert model.base._version == version
    save(engine, model, 3)
    assert_holds(root, 3, model)


def test_what_changes_beside_a_frozen_module_or_comes_between_two_saves_costs_no_trust(
    engine: SyncCheckpointEngine, model: Lora, root: Path, tmp_path: Path
) -> None:
    """A tensor that stays equal without being a parameter, a log that grows, and adapters that are saved alone."""
    found = []
    for number in range(1, 8):
        with one_lease() as leased:
            state = {"model": model, "table": torch.ones(MIB), "log": [{"loss": torch.ones(1)}] * number}
            engine.save(state, step=number).result()
        found.append(leased[0].trusted_file is not None)
        engine.save({"adapter": model.adapter}, path=tmp_path / "adapter", overwrite=True).result()
    assert found == [False, True, True, True, True, True, True]
    found_step = aio_ckpt.read(step(root, 7))
    assert torch.equal(found_step["model"]["base"], model.base)
    assert run(["verify", str(root)]) == 0


def test_a_tensor_that_stays_equal_beside_a_frozen_module_costs_no_trust(
    engine: SyncCheckpointEngine, model: Lora
) -> None:
    found = []
    for number in range(1, 9):
        with one_lease() as leased:
            engine.save({"model": model, "table": torch.ones(MIB)}, step=number).result()
        found.append(leased[0].trusted_file is not None)
    assert found == [False] + [True] * 7


def test_what_another_state_has_found_costs_no_trust_when_a_parameter_changes(
    engine: SyncCheckpointEngine, model: Lora
) -> None:
    for number in range(1, 5):
        engine.save({"table": torch.ones(MIB), "step": number}, step=number).result()
    found = []
    for number in range(5, 11):
        if number == 7:
            model.scale.detach().fill_(2.0)
        with one_lease() as leased:
            engine.save({"model": model, "table": torch.ones(MIB)}, step=number).result()
        found.append(leased[0].trusted_file is not None)
    assert found == [False, True, False, False, True, True]


@contextlib.contextmanager
def one_lease() -> Iterator[list[trusted_leaves.Leased]]:
    """What the saves of the block lease."""
    leased: list[trusted_leaves.Leased] = []
    lease = trusted_leaves.TrustedLeaves.lease

    def noted(self: Any, *given: Any, **named: Any) -> trusted_leaves.Leased:
        leased.append(lease(self, *given, **named))
        return leased[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trusted_leaves.TrustedLeaves, "lease", noted)
        yield leased


@pytest.mark.usefixtures("one_block")
def test_a_new_tensor_at_an_old_address_is_not_trusted(engine: SyncCheckpointEngine, root: Path) -> None:
    """It has the address, the length and the version of the old one, as where memory was freed and allocated again."""
    memory, seen = bytearray(4 * MIB), []
    for number in (1, 2):
        frozen = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32), requires_grad=False)
        frozen.detach().numpy()[-1] = number
        seen.append((frozen.data_ptr(), frozen._version))
        engine.save({"frozen": frozen}, step=number).result()
        assert aio_ckpt.read(step(root, number))["frozen"][-1] == number
    assert seen[0] == seen[1]


def test_the_same_memory_in_another_shape_is_written(engine: SyncCheckpointEngine, model: Lora, root: Path) -> None:
    save(engine, model, 1, 2)
    model.base.data = model.base.data.view(1024, 1024)
    save(engine, model, 3)
    assert_holds(root, 3, model)


@pytest.mark.usefixtures("one_block")
def test_a_tied_tensor_with_a_version_of_its_own_is_looked_at_too(
    engine: SyncCheckpointEngine, model: Lora, root: Path
) -> None:
    alias = model.base.data
    for number in (1, 2):
        engine.save({"model": model, "alias": alias}, step=number).result()
    version = model.base._version
    alias[-1].add_(1)
    assert model.base._version == version
    engine.save({"model": model, "alias": alias}, step=3).result()
    assert torch.equal(aio_ckpt.read(step(root, 3))["alias"], alias)


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("kind", ["inference", "strided"])
def test_a_tensor_without_a_version_or_of_another_form_is_compared(
    engine: SyncCheckpointEngine, root: Path, kind: str
) -> None:
    with torch.inference_mode(kind == "inference"):
        tensor = torch.zeros(MIB) if kind == "inference" else torch.zeros(2 * MIB)[::2]
        frozen = torch.nn.Parameter(tensor, requires_grad=False)
    for number in (1, 2):
        engine.save({"frozen": frozen, "step": number}, step=number).result()
    tensor.detach().numpy()[-1] = 1.0
    engine.save({"frozen": frozen, "step": 3}, step=3).result()
    assert torch.equal(aio_ckpt.read(step(root, 3))["frozen"], tensor)


@pytest.mark.usefixtures("one_block")
def test_a_state_that_the_budget_does_not_hold_beside_the_sample_is_compared(root: Path, model: Lora) -> None:
    with SyncCheckpointEngine(root, EngineConfig(frozen="trusted", budget_bytes=32 * MIB)) as engine:
        save(engine, model, 1)
        poke(model.base, -1, 7.0)
        save(engine, model, 2)
    assert_holds(root, 2, model)


@pytest.mark.usefixtures("one_block")
def test_the_first_save_of_an_engine_trusts_nothing(root: Path, model: Lora) -> None:
    for number in (1, 2):
        poke(model.base, -1, float(number))
        with SyncCheckpointEngine(root, EngineConfig(frozen="trusted")) as engine:
            save(engine, model, number)
        assert_holds(root, number, model)


# -- what breaks the trust -----------------------------------------------------------------------------


def test_a_block_of_the_sample_that_changed_is_an_error_and_the_tensor_is_written(
    engine: SyncCheckpointEngine, model: Lora, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(engine, model, 1, 2)
    poke(model.base, -1, 7.0)
    with caplog.at_level(logging.ERROR, "aio_ckpt"):
        save(engine, model, 3, 4)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text == (
        "step 3: 'model.base' was changed by something that torch does not count in its _version, so that "
        "frozen='trusted' did not see it: this save writes it, but earlier ones, up to step_000000002, may hold older "
        "values of it. Set frozen='compared'"
    )
    for number in (3, 4):
        assert_holds(root, number, model)


def edit(root: Path, engine: SyncCheckpointEngine) -> None:
    with frozen_file(step(root, 3)).open("r+b") as file:
        file.write(b"edited")


HARMS: dict[str, Callable[[Path, SyncCheckpointEngine], object]] = {
    "edited": edit,
    "deleted by somebody": lambda root, engine: shutil.rmtree(step(root, 3)),
    "deleted": lambda root, engine: engine.delete(3, allow_newest=True),
    "rolled back": lambda root, engine: engine.rollback(2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("harm", HARMS)
def test_if_the_file_of_the_last_step_is_gone_or_edited_the_next_save_captures_all(
    engine: SyncCheckpointEngine, model: Lora, root: Path, harm: str
) -> None:
    save(engine, model, 1, 2, 3)
    HARMS[harm](root, engine)
    reports = save(engine, model, 4, 5)
    assert [report.cloned_bytes > 0 for report in reports] == [False, True]
    for number in (4, 5):
        assert_holds(root, number, model)


def test_a_file_that_was_damaged_fails_one_save_and_the_next_one_writes_it(
    engine: SyncCheckpointEngine, model: Lora, root: Path
) -> None:
    """As on a bad sector, of which no mark of the file tells. The copy of each fourth step finds it."""
    save(engine, model, 1, 2, 3, 4)
    file = frozen_file(step(root, 4))
    found = file.stat()
    flip(file, 4 * MIB)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CorruptCheckpointError) as caught:
        engine.save({"model": model}, step=5).result()
    assert str(caught.value).startswith(
        f"{file}: its bytes are not those that were written, and the tensors that it holds were not captured "
        "(frozen='trusted'): saves from now on write them; look at older steps, which share the file, by "
        "`aio-ckpt verify ROOT`"
    )
    assert not step(root, 5).exists()
    save(engine, model, 6)
    assert_holds(root, 6, model)


def test_a_file_that_is_deleted_within_the_save_fails_it_and_the_next_one_writes_it(root: Path, model: Lora) -> None:
    with gated_engine(root, frozen="trusted") as (engine, storage):
        engine.save({"model": model}, step=1).result(TIMEOUT)
        cloning = storage.hold("clone")
        ticket = engine.save({"model": model}, step=2)
        cloning.wait_reached()
        shutil.rmtree(step(root, 1))
        cloning.open()
        with pytest.raises(ReadError, match=r"No such file .* not captured \(frozen='trusted'\): saves from now on"):
            ticket.result(TIMEOUT)
        assert engine.save({"model": model}, step=3).result(TIMEOUT).step == 3
    assert torch.equal(aio_ckpt.read(step(root, 3))["model"]["base"], model.base)


def test_a_storage_that_does_not_answer_is_not_waited_for(
    root: Path, model: Lora, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_leaves, "_STAMP_SECS", 0.05)
    with gated_engine(root, frozen="trusted") as (engine, storage):
        engine.save({"model": model}, step=1).result(TIMEOUT)
        asked, stamp = Gate(), storage.stamp

        async def held(path: Path) -> Any:
            await asked.wait()
            return await stamp(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "stamp", held)
            with one_lease() as leased:
                ticket = engine.save({"model": model}, step=2)
            asked.open()
        assert leased[0].trusted_file is None
        assert ticket.result(TIMEOUT).cloned_bytes > 0  # all was captured, compared and found equal


def test_a_save_whose_step_is_deleted_meanwhile_clones_the_newer_one(root: Path, model: Lora) -> None:
    with gated_engine(root, frozen="trusted", max_in_flight=2, keep_last=1) as (engine, storage):
        engine.save({"model": model}, step=1).result(TIMEOUT)
        writing = storage.hold("write", "*.distcp")
        second = engine.save({"model": model}, step=2)
        writing.wait_reached()
        cloning = storage.hold("clone")
        third = engine.save({"model": model}, step=3)
        cloning.wait_reached()
        writing.open()
        second.result(TIMEOUT)
        storage.wait_for("remove_tree", "*step_000000001*")
        cloning.open()
        report = third.result(TIMEOUT)
    assert report.cloned_bytes > 5 * MIB
    assert inode(root, 3)
    found = aio_ckpt.read(step(root, 3))["model"]
    assert torch.equal(found["base"], model.base)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="frozen='always': allowed are 'compared', 'trusted'"):
        EngineConfig(frozen="always")  # type: ignore[arg-type]
