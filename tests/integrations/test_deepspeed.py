"""``aio_ckpt.integrations.deepspeed`` with the real package, on gloo ranks; skipped without it.

``pip install -e '.[dev,integrations]'`` installs it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from child_python import child_environment
from log_lines import kept_lines
from rank_processes import Ranks, ranks

from aio_ckpt import EngineConfig
from aio_ckpt.errors import (
    BudgetExceededError,
    ConfigError,
    CorruptCheckpointError,
    PeerFailedError,
    RootError,
    WriteError,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="could not import 'deepspeed'"),
]
LONG_SECS = 100.0
FULL = WriteError(28, "No space left on device", "/disk")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as running:
        yield running


def run(of: Ranks, fn: Any, *args: object) -> list[Any]:
    return of.run(fn, *args, timeout=LONG_SECS)


def made(rank: int, count: int, folder: Path, **options: Any) -> Any:
    from deepspeed_runs import Run

    return Run(rank, count, folder, **options)


def disk() -> Any:
    from deepspeed_runs import gated_disk

    return gated_disk()


# -- what is written ------------------------------------------------------------------------------------


def exchanged(rank: int, count: int, folder: Path, stage: int) -> None:
    stock = made(rank, count, folder / "stock", stage=stage, is_ours=False)
    ours = made(rank, count, folder / "ours", stage=stage)
    assert stock.losses(2) == ours.losses(2)
    stock.save()
    ours.save()
    wanted = stock.losses(2)
    assert ours.losses(2) == wanted  # what is captured is not what is trained on
    ours.wait()
    assert ours.latest == "global_step2"
    for reader, written in ((made(rank, count, folder, stage=stage, is_ours=False), "ours"), (ours, "stock")):
        assert reader.load(folder / written) == "global_step2"
        assert reader.losses(2) == wanted
    names = sorted(os.listdir(folder / "stock/global_step2"))
    assert sorted(os.listdir(folder / "ours/global_step2")) == names
    assert sorted(os.listdir(folder / "ours")) == sorted(os.listdir(folder / "stock"))
    for name in names:
        got, kept = (
            torch.load(folder / place / "global_step2" / name, weights_only=False) for place in ("ours", "stock")
        )
        torch.testing.assert_close(got.get("module"), kept.get("module"), rtol=0, atol=0)
        assert got.keys() == kept.keys()
    ours.engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stock_resumes_from_ours_and_ours_from_stock(tmp_path: Path, two: Ranks, stage: int) -> None:
    run(two, exchanged, tmp_path, stage)


def initialised_anew(rank: int, count: int, folder: Path) -> tuple[str, int]:
    before = made(rank, count, folder)
    for _ in range(2):
        before.losses(2)
        before.save()
    after = made(rank, count, folder)
    found = after.load()
    before.engine.destroy()
    after.engine.destroy()
    return found, after.engine.global_steps


def test_a_new_engine_loads_what_the_one_before_has_just_saved(tmp_path: Path, two: Ranks) -> None:
    """DeepSpeed asks to be initialised anew before a load of ZeRO-3."""
    assert run(two, initialised_anew, tmp_path) == [("global_step4", 4)] * 2


def loads_a_damaged_file(rank: int, count: int, folder: Path) -> str:
    ours = made(rank, count, folder)
    ours.losses(2)
    ours.save()
    ours.wait()
    path = folder / "global_step2/mp_rank_00_model_states.pt"
    if rank == 0:
        data = bytearray(path.read_bytes())
        tensor = next(iter(ours.engine.module.state_dict().values()))
        data[data.index(tensor.contiguous().view(torch.uint8).numpy().tobytes()) + 3] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match=re.escape(f"{path} is damaged: the CRC32 of")) as caught:
        ours.load(folder)
    ours.engine.destroy()
    return str(caught.value)


def test_a_changed_byte_is_found_when_it_is_loaded(tmp_path: Path, two: Ranks) -> None:
    run(two, loads_a_damaged_file, tmp_path)


def written_for_others(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder)
    ours.losses(2)
    ours.save()
    wanted = {name: tensor.clone() for name, tensor in ours.engine.module.state_dict().items()}
    ours.engine.destroy()  # finishes the checkpoint
    assert ours.latest == "global_step2"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    got = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name].bfloat16(), tensor), name


def test_zero_to_fp32_reads_ours(tmp_path: Path, two: Ranks) -> None:
    run(two, written_for_others, tmp_path)


def written_for_universal(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder, stage=3)
    ours.losses(2)
    ours.save("tag")
    ours.engine.destroy()


def test_universal_checkpoint_is_made_of_ours(tmp_path: Path, two: Ranks) -> None:
    run(two, written_for_universal, tmp_path)
    places = [f"--input_folder={tmp_path}/tag", f"--output_folder={tmp_path}/universal"]
    workers = ["--num_extract_workers=1", "--num_merge_workers=1"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *places, *workers]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=LONG_SECS)
    assert done.returncode == 0, done.stderr
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wanted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "tag")
    assert wanted
    for name, tensor in wanted.items():
        got = torch.load(tmp_path / "universal/zero" / name / "fp32.pt", weights_only=False)
        torch.testing.assert_close(got.reshape(tensor.shape), tensor, rtol=0, atol=0)


def of_experts(rank: int, count: int, folder: Path) -> None:
    ours, stock = (made(rank, count, folder, is_ours=is_ours, has_experts=True) for is_ours in (True, False))
    ours.losses(2)
    ours.save()
    wanted = ours.losses(2)
    ours.wait()
    assert stock.load() == "global_step2"
    assert stock.losses(2) == wanted
    assert len([*folder.glob("global_step2/layer_0_expert_*")]) == 4
    ours.engine.destroy()


def test_experts_are_files_of_one_checkpoint(tmp_path: Path, two: Ranks) -> None:
    run(two, of_experts, tmp_path)


def without_frozen(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder, stage=2, is_frozen=True)
    ours.losses(1)
    ours.save(exclude_frozen_parameters=True)
    ours.wait()
    if rank == 0:
        (model,) = Path(folder, "global_step1").glob("*model_states.pt")
        assert {*torch.load(model, weights_only=False)["module"]} == {"2.weight", "2.bias"}
    wanted = ours.losses(1)
    again = made(rank, count, folder, stage=2, is_frozen=True)
    assert again.load(load_module_strict=False) == "global_step1"
    assert again.losses(1) == wanted
    ours.engine.destroy()


def test_frozen_parameters_are_left_out(tmp_path: Path, two: Ranks) -> None:
    run(two, without_frozen, tmp_path)


def saved_in_16_bits(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder)
    ours.losses(1)
    assert ours.engine.save_16bit_model(str(folder), "model.bin")
    got = torch.load(folder / "model.bin", weights_only=True)  # durable when the call returns
    torch.testing.assert_close(got, dict(ours.engine.module.state_dict()), rtol=0, atol=0)
    ours.wait()
    assert ours.latest == ""
    ours.engine.destroy()


def test_a_model_in_16_bits_is_durable_when_the_call_returns(tmp_path: Path, two: Ranks) -> None:
    run(two, saved_in_16_bits, tmp_path)


def pipelined(rank: int, count: int, folder: Path) -> None:
    from deepspeed_runs import quiet_deepspeed, settings

    made(rank, count, folder)  # sets up DeepSpeed
    deepspeed: Any = quiet_deepspeed()
    from deepspeed.pipe import PipelineModule

    from aio_ckpt.integrations import deepspeed as adapter

    def trainer() -> Any:
        torch.manual_seed(5)
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        net = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        return deepspeed.initialize(model=net, optimizer=optimizer, config=settings(0))[0]

    def loss_of(engine: Any) -> float:
        torch.manual_seed(100 * engine.global_steps + rank)
        return float(engine.train_batch(iter([(torch.randn(4, 8), torch.randn(4, 8))])))

    engine = trainer()
    adapter.install(engine)
    loss_of(engine)
    engine.save_checkpoint(str(folder))
    wanted = loss_of(engine)
    engine.checkpoint_engine.wait()
    assert len([*Path(folder, "global_step1").glob("layer_*")]) == 4
    again = trainer()
    again.load_checkpoint(str(folder))
    assert loss_of(again) == wanted
    engine.save_checkpoint(str(folder), client_state={"no pickle": lambda: 0})
    with pytest.raises(PeerFailedError, match="global_step2 was not saved"):
        for _ in range(10_000):
            loss_of(engine)
    engine.destroy()


def test_the_layers_of_a_pipeline_are_files_of_one_checkpoint(tmp_path: Path, two: Ranks) -> None:
    run(two, pipelined, tmp_path)


# -- when it is visible ---------------------------------------------------------------------------------


def held(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        ours.save()
        ours.wait()
        assert ours.latest == "global_step1"
        gate = storage.hold("replace", "*.pt" if rank == 1 else "no file")
        ours.losses(1)
        ours.save()
        ours.losses(2)  # no step waits for the disk
        if rank == 1:
            gate.wait_reached()
        assert ours.latest == "global_step1"
        assert not any(Path(folder, "global_step2").iterdir())
        gate.open()
        ours.wait()
        assert ours.latest == "global_step2"
        ours.save()
        assert ours.load() == "global_step4"  # the checkpoint that was pending
        ours.engine.destroy()


def test_latest_follows_the_slowest_rank_and_no_step_waits(tmp_path: Path, two: Ranks) -> None:
    run(two, held, tmp_path)


_OPEN: list[Any] = []


def trained_until_held(rank: int, count: int, folder: Path, call: str, where: str, tag: str) -> list[float]:
    from deepspeed_runs import gated_disk

    block = gated_disk()
    _OPEN.append(block)  # until the kill
    storage = block.__enter__()
    ours = made(rank, count, folder)
    ours.losses(2)
    ours.save("first")
    wanted = ours.losses(3)
    ours.wait()
    if rank == 0:
        (folder / tag).mkdir(exist_ok=True)
        (folder / tag / "mine").write_text("mine")
    gate = storage.hold(call, where)
    ours.save(tag)
    ours.losses(1)
    if rank == 0:
        gate.wait_reached()
    dist.barrier()
    return wanted


def resumed(rank: int, count: int, folder: Path, tag: str) -> list[float]:
    again = made(rank, count, folder)
    assert again.load() == "first"
    assert (folder / tag / "mine").read_text() == "mine"
    losses = again.losses(3)
    again.save("third")
    again.wait()
    assert again.latest == "third"
    tags = sorted({"first", tag, "third"})
    assert sorted(os.listdir(folder)) == sorted([*tags, "latest", "zero_to_fp32.py", "zero_to_torch.py"])
    assert len(os.listdir(folder / "third")) == 3
    again.engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("call", "where", "tag"),
    [
        ("replace", "*model_states.pt", "second"),
        ("replace", "tag/bf16_zero_pp_rank_1*", "second"),  # half of the files are beside the user's
        ("replace", "latest", "second"),
        ("exchange", "tag", "first"),
    ],
)
def test_a_killed_run_goes_on_with_equal_losses(tmp_path: Path, call: str, where: str, tag: str) -> None:
    with ranks(2) as killed:
        wanted = run(killed, trained_until_held, tmp_path, call, where, tag)
        for rank in range(2):
            killed.kill(rank)
    with ranks(2) as fresh:
        assert run(fresh, resumed, tmp_path, tag) == wanted


def replaced_until_held(rank: int, count: int, folder: Path) -> list[float]:
    from deepspeed_runs import gated_disk

    block = gated_disk()
    _OPEN.append(block)  # until the kill
    storage = block.__enter__()
    ours = made(rank, count, folder)
    ours.losses(2)
    ours.save("first")
    ours.wait()
    if rank == 0:
        (folder / "first/mine").write_text("mine")
    ours.losses(1)
    gate = storage.hold("sync_dir", folder.name)  # after the exchange
    ours.save("first")
    wanted = ours.losses(3)
    if rank == 0:
        gate.wait_reached()
    dist.barrier()
    return wanted


def test_a_kill_after_the_exchange_loses_no_file_of_the_user(tmp_path: Path) -> None:
    with ranks(2) as killed:
        wanted = run(killed, replaced_until_held, tmp_path)
        for rank in range(2):
            killed.kill(rank)
    with ranks(2) as fresh:
        assert run(fresh, resumed, tmp_path, "first") == wanted


def written_beside(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        gate = storage.hold("replace", "tag")
        ours.save("new")
        if rank == 0:
            gate.wait_reached()
            (folder / "new/hf").mkdir()
            before = os.stat(folder / "new/hf").st_ino
        gate.open()
        ours.wait()
        if rank == 0:
            assert os.stat(folder / "new/hf").st_ino == before  # never moved, so that its writer goes on
            assert len(os.listdir(folder / "new")) == 4
        assert ours.latest == "new"
        ours.engine.destroy()


def test_a_writer_into_the_directory_of_a_new_tag_is_not_disturbed(tmp_path: Path, two: Ranks) -> None:
    run(two, written_beside, tmp_path)


def beside_another(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        gate = storage.hold("replace", "*.pt" if rank == 1 else "no file")
        ours.save("a")
        if rank == 1:
            gate.wait_reached()
        dist.barrier()
        other = made(rank, count, folder)  # as another job in the directory: nothing tells it of the first
        other.losses(1)
        storage.release(gate)
        other.save("b")
        other.wait()
        assert ours.latest == "b"
        gate.open()
        ours.wait()
        assert ours.latest == "a"
        assert len(os.listdir(folder / "a")) == len(os.listdir(folder / "b")) == 3
        ours.engine.destroy()
        other.engine.destroy()


def test_two_runs_in_one_directory_do_not_remove_files_of_each_other(tmp_path: Path, two: Ranks) -> None:
    run(two, beside_another, tmp_path)


def torn_by_others(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        ours.save("whole")
        ours.wait()
        gate = storage.hold("replace", "*.pt" if rank == 1 else "no file")
        ours.save("torn")
        if rank == 0:
            for work in ours.engine.checkpoint_engine._pending.works:
                work.exception()
            next(folder.glob(".aio_ckpt-draft-*/tag/*model_states.pt")).unlink()
        dist.barrier()
        gate.open()
        with pytest.raises(PeerFailedError, match=r"model_states\.pt is missing"):
            ours.wait()
        assert ours.latest == "whole"
        assert sorted(os.listdir(folder)) == ["latest", "whole", "zero_to_fp32.py", "zero_to_torch.py"]
        ours.engine.destroy()


def test_a_checkpoint_that_another_program_has_torn_is_not_named(tmp_path: Path, two: Ranks) -> None:
    run(two, torn_by_others, tmp_path)


def overwritten(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        ours.save("last")
        ours.wait()
        at_first = ours.losses(1)
        if rank == 0:
            (folder / "last/tokenizer").mkdir()
            (folder / "last/tokenizer/words").write_text("mine")
            (folder / "last/zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text("of a larger world")
        gate = storage.hold("exchange")
        ours.save("last")
        if rank == 0:
            gate.wait_reached()
        dist.barrier()
        before = made(rank, count, folder, is_ours=False)
        assert before.load() == "last"  # the old one, whole
        assert before.losses(1) == at_first
        wanted = ours.losses(1)
        gate.open()
        ours.wait()
        assert before.load() == "last"
        assert before.losses(1) == wanted
        assert (folder / "last/tokenizer/words").read_text() == "mine"
        assert len(os.listdir(folder / "last")) == 4
        ours.engine.destroy()


def test_a_tag_that_is_saved_again_changes_in_one_step_and_keeps_files_of_others(tmp_path: Path, two: Ranks) -> None:
    run(two, overwritten, tmp_path)


def overwritten_without(rank: int, count: int, folder: Path) -> None:
    """On file systems that lack the exchange, and hard links."""
    with disk() as storage, pytest.MonkeyPatch.context() as patch:
        ours = made(rank, count, folder)
        ours.losses(1)
        ours.save("last")
        ours.wait()
        if rank == 0:
            (folder / "last/mine").write_text("mine")
            storage.fail("exchange", "tag", RootError(95, "cannot exchange", "/nfs"))
        ours.losses(1)
        ours.save("last")
        ours.losses(1)
        ours.wait()
        assert sorted(os.listdir(folder)) == ["last", "latest", "zero_to_fp32.py", "zero_to_torch.py"]

        def link(*_: object, **__: object) -> None:
            raise OSError(1, "Operation not permitted")

        patch.setattr(os, "link", link)
        ours.save("last")
        wanted = ours.losses(1)
        ours.wait()
        assert (folder / "last/mine").read_text() == "mine"
        assert len(os.listdir(folder / "last")) == 4
        ours.load()
        assert ours.losses(1) == wanted
        ours.engine.destroy()


def test_files_of_the_user_stay_without_an_exchange_and_without_hard_links(tmp_path: Path, two: Ranks) -> None:
    run(two, overwritten_without, tmp_path)


def left_by_the_dead(rank: int, count: int, folder: Path) -> None:
    from aio_ckpt.commit.owner import Owner

    here = Owner.of_this_process("abc")
    names = {
        "dead": f".aio_ckpt-draft-abc-{here.tag.rpartition('-')[0]}-1-1",
        "alive": f".aio_ckpt-draft-abc-{here.tag}-1",
        "elsewhere": f".aio_ckpt-draft-abc-{here.tag.replace(here.tag[:8], '0' * 8)}-1",
        "replaced": f".aio_ckpt-draft-abc-{here.tag.rpartition('-')[0]}-1-2",
    }
    if rank == 0:
        for name in names.values():
            (folder / name / "tag").mkdir(parents=True)
        (folder / names["replaced"] / "replaced").mkdir()
    ours = made(rank, count, folder)
    with kept_lines(logging.WARNING) as lines:
        ours.save("first")
        ours.wait()
    if rank == 0:  # the names are those of its process
        stay = {names[each] for each in ("alive", "elsewhere", "replaced")}
        assert {each.name for each in folder.glob(".aio*")} == stay
        said = "\n".join(lines.messages)
        assert f"{names['elsewhere']} stays: its process was not on this machine" in said
        assert f"{names['replaced']} stays: it holds what was in the place" in said
    ours.engine.destroy()


def test_only_drafts_of_processes_that_are_proven_dead_are_removed(tmp_path: Path, two: Ranks) -> None:
    run(two, left_by_the_dead, tmp_path)


# -- failures -------------------------------------------------------------------------------------------


def steps_until_raised(ours: Any) -> tuple[int, str]:
    for step in range(10_000):
        try:
            ours.losses(1)
        except PeerFailedError as error:
            return step, str(error)
    raise AssertionError("no step raised")


def failing(rank: int, count: int, folder: Path, call: str, where: str, at: int) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        ours.save()
        ours.losses(1)
        ours.wait()
        if rank == at:
            storage.fail(call, where, FULL)
        ours.save()
        found = [None] * count
        dist.all_gather_object(found, steps_until_raised(ours))
        assert found == [found[0]] * count
        assert f"rank {at} failed: WriteError" in found[0][1]
        assert "latest is unchanged" in found[0][1]
        assert ours.latest == "global_step1"
        ours.save("next")
        ours.wait()
        assert ours.latest == "next"
        assert not [*folder.glob(".aio_ckpt-draft*")]
        ours.engine.destroy()


@pytest.mark.parametrize(
    ("call", "where", "at"),
    [("create_data_file", "*.pt", 1), ("sync_dir", "tag", 0), ("replace", "tag", 0), ("replace", "latest", 0)],
)
def test_a_failure_is_raised_at_the_same_step_on_all_ranks(
    tmp_path: Path, two: Ranks, call: str, where: str, at: int
) -> None:
    run(two, failing, tmp_path, call, where, at)


def next_after_two_failed(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        if rank == 0:  # it has two files
            storage.fail("create_data_file", "*.pt", FULL)
            storage.fail("create_data_file", "*.pt", FULL)
        ours.save()
        with pytest.raises(PeerFailedError, match="rank 0 failed: WriteError"):
            ours.wait()
        assert not storage.failures
        assert sorted(os.listdir(folder)) == ["zero_to_fp32.py", "zero_to_torch.py"]  # no empty directory of the tag
        dist.barrier()
        ours.save("next")
        ours.wait()
        assert ours.latest == "next"
        ours.engine.destroy()


def test_the_save_after_a_failed_one_is_not_told_of_its_other_files(tmp_path: Path, two: Ranks) -> None:
    run(two, next_after_two_failed, tmp_path)


def places_of_ranks(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder)
    ours.losses(1)
    if rank == 0:
        (folder / "link").symlink_to(folder)
    node = folder / f"node {rank}"
    node.mkdir()
    dist.barrier()
    home = os.getcwd()
    os.chdir(node)
    try:
        for place, tag, wanted in (
            (str(folder), f"tag {rank}", f"saves {folder}/tag 1, and rank 0 saves {folder}/tag 0: give all ranks"),
            (str(node), "tag", f"saves {folder}/node 1/tag, and rank 0 saves {folder}/node 0/tag: give all ranks"),
            ("/proc/self/cwd/runs", "tag", "is not on this rank: save to a directory that all ranks share"),
        ):
            ours.folder = place
            ours.save(tag)
            with pytest.raises(PeerFailedError, match=f"rank 1 failed: ConfigError: .*{re.escape(wanted)}"):
                ours.wait()
            dist.barrier()
            assert not [*folder.rglob(".aio_ckpt-draft*"), *folder.rglob("*_states.pt"), *folder.rglob("latest")]
            dist.barrier()
        assert ours.engine.save_16bit_model("/proc/self/cwd/weights")  # rank 0 alone gives a file
        assert [*folder.rglob("*.bin")] == [folder / "node 0/weights/pytorch_model.bin"]
    finally:
        os.chdir(home)
    ours.folder = str(folder / "link" if rank else folder)
    ours.save("whole")
    wanted_losses = ours.losses(2)
    assert ours.load() == "whole"
    assert ours.losses(2) == wanted_losses
    ours.engine.destroy()


def test_ranks_that_do_not_save_one_checkpoint_are_told_so_and_none_waits(tmp_path: Path, two: Ranks) -> None:
    run(two, places_of_ranks, tmp_path)


def stepped_although_raised(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder)
        ours.losses(1)
        if rank == 1:
            storage.fail("create_data_file", "*.pt", FULL)
        ours.save()
        raised, _ = steps_until_raised(ours)
        assert ours.engine.global_steps == 1 + raised + 1  # the step that raised has stepped
        ours.engine.destroy()


def test_a_step_that_raises_the_failure_of_a_save_has_stepped(tmp_path: Path, two: Ranks) -> None:
    run(two, stepped_although_raised, tmp_path)


def two_files_at_once(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        config = EngineConfig(max_in_flight=1, stall_timeout_secs=50.0)
        ours = made(rank, count, folder, config=config)
        ours.losses(1)
        gate = storage.hold("create_data_file", "*.pt")
        ours.save()  # no file of the rank waits for the one before
        ours.losses(1)
        assert not any(work.done() for work in ours.engine.checkpoint_engine._pending.works)
        gate.open()
        ours.engine.destroy()
        assert ours.latest == "global_step1"


def test_files_of_a_rank_do_not_wait_for_each_other(tmp_path: Path, two: Ranks) -> None:
    run(two, two_files_at_once, tmp_path)


def test_a_script_that_ends_without_a_call_logs_the_failure_of_its_last_save(tmp_path: Path) -> None:
    script = (
        "import logging\nfrom pathlib import Path\nlogging.basicConfig(level=logging.ERROR)\n"
        "from deepspeed_runs import Run\nours = Run(0, 1, Path('runs'))\nours.losses(1)\n"
        "ours.save()\nours.wait()\n"
    )
    lost = "ours.save('lost', client_state={'no pickle': lambda: 0})\n"
    for end, code in (("", 0), ("ours.engine.destroy()\n", 1)):
        done = alone(script + lost + end, tmp_path)
        assert done.returncode == code, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR:aio_ckpt:the checkpoint")]
        assert "runs/lost was not saved: rank 0 failed: " in line
        assert line.endswith("latest is unchanged: it names 'global_step1'")


def alone(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as the only rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(**place),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONG_SECS,
    )


def failing_at_the_call(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder)
    ours.losses(1)
    ours.save(client_state={"late": Unpicklable()} if rank == 0 else {})
    with pytest.raises(PeerFailedError, match="rank 0 failed: RuntimeError: no pickle"):
        ours.wait()
    assert ours.latest == ""
    try:
        ours.save("half", client_state={"parallel_dims": 1, "ds_parallel_dims": 1, **reserved()})
    except KeyError:
        pass
    else:
        raise AssertionError("DeepSpeed took a reserved name")
    ours.losses(2)
    ours.wait()
    assert ours.latest == ""  # the half that DeepSpeed gave is no checkpoint
    ours.save("whole")
    ours.engine.destroy()
    assert ours.latest == "whole"


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


def reserved() -> dict[str, int]:
    from deepspeed.checkpoint.constants import CHECKPOINT_PARALLEL_DIMS

    return {CHECKPOINT_PARALLEL_DIMS: 1}


def test_a_checkpoint_of_which_only_a_part_was_given_is_none(tmp_path: Path, two: Ranks) -> None:
    run(two, failing_at_the_call, tmp_path)


def logged_only(rank: int, count: int, folder: Path) -> None:
    with disk() as storage:
        ours = made(rank, count, folder, config=EngineConfig(max_in_flight=4, on_failure="log"))
        storage.fail("create_data_file", "*.pt", FULL)
        ours.losses(1)
        ours.save()
        ours.wait()
        ours.losses(2)
        assert ours.latest == ""
        storage.failures.clear()
        ours.engine.destroy()


def test_failures_are_only_logged_if_the_user_says_so(tmp_path: Path, two: Ranks) -> None:
    run(two, logged_only, tmp_path)


def saved_by_stock(rank: int, count: int, folder: Path) -> None:
    ours = made(rank, count, folder)
    ours.losses(1)
    ours.save("opens the engine")
    engine = ours.engine.checkpoint_engine._engine

    def save_file(*_: object) -> None:
        raise BudgetExceededError("no memory")

    engine.save_file = save_file
    ours.save("by stock")
    wanted = ours.losses(1)
    ours.wait()
    assert made(rank, count, folder, is_ours=False).load() == ours.latest == "by stock"
    ours.load()
    assert ours.losses(1) == wanted
    ours.engine.destroy()


def test_deepspeed_writes_what_the_engine_cannot(tmp_path: Path, two: Ranks) -> None:
    run(two, saved_by_stock, tmp_path)


# -- DeepSpeed itself -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter() -> Any:
    from deepspeed_runs import quiet_deepspeed

    quiet_deepspeed()
    from aio_ckpt.integrations import deepspeed as found

    return found


def engine_with(stock: Any, *, nvme: bool = False, local: bool = False) -> Any:
    return SimpleNamespace(
        checkpoint_engine=stock,
        save_checkpoint=print,
        load_checkpoint=print,
        zero_nvme_offload_optimizer=lambda: nvme,
        use_node_local_storage=lambda: local,
    )


def test_every_private_name_is_where_it_was(adapter: Any) -> None:
    assert adapter.moved_names() == [], f"{adapter.KNOWN_TO_WORK} is known to work"


@pytest.mark.parametrize(
    "moves",
    [
        lambda adapter, patch: patch.setitem(adapter.PRIVATE_NAMES, f"{adapter._INTERFACE}.save", ("state", "path")),
        lambda adapter, patch: patch.setitem(adapter.PRIVATE_NAMES, f"{adapter._ENGINE}.step", frozenset({"poll"})),
        lambda adapter, patch: patch.setitem(adapter.PRIVATE_NAMES, f"{adapter._ENGINE}.save_all", frozenset()),
        lambda adapter, patch: patch.setattr(adapter._Base, "__abstractmethods__", frozenset({"seal"})),
    ],
)
def test_deepspeed_saves_by_itself_if_a_release_moves_a_name(
    adapter: Any, moves: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moves(adapter, monkeypatch)
    engine = engine_with(stock := SimpleNamespace())
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        assert adapter.install(engine) is stock
    assert engine.checkpoint_engine is stock
    assert engine.save_checkpoint is print
    assert "deepspeed 0.19.8 is known to work" in caplog.text
    engine.checkpoint_engine.wait()  # as scripts do after a save


@pytest.mark.parametrize(("options", "why"), [({"nvme": True}, "NVMe"), ({"local": True}, "node_local")])
def test_deepspeed_saves_by_itself_what_is_no_common_directory(
    adapter: Any, options: dict[str, bool], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(stock := SimpleNamespace(), **options)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        assert adapter.install(engine) is stock
    assert why in caplog.text


def test_an_engine_is_installed_once_and_beside_no_other(adapter: Any) -> None:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = engine_with(TorchCheckpointEngine())
    ours = adapter.install(engine)
    assert adapter.install(engine) is ours
    with pytest.raises(ConfigError, match="install it once"):
        adapter.install(engine, EngineConfig(workers=9))
    with pytest.raises(ConfigError, match=r"without checkpoint\.writer"):
        adapter.install(engine_with(None))


# -- the page -------------------------------------------------------------------------------------------


def test_the_page_saves_and_resumes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/coming-from/deepspeed.md").read_text()
    before, after = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    given = (
        "from deepspeed_runs import quiet_deepspeed, settings, small\nquiet_deepspeed()\nimport torch\n"
        "model, config = small(), settings(1)\noptimizer = torch.optim.AdamW(model.parameters(), lr=0.05)\n"
        "batches = torch.randn(6, 4, 16).bfloat16()\n"
        "loss_of = lambda engine, batch: engine(batch).float().square().mean()\n"
    )
    for name, block, runs in (("before", before, 1), ("after", after, 2)):
        for last in ("global_step6", "global_step12")[:runs]:
            done = alone(given + block, tmp_path)
            assert done.returncode == 0, done.stderr
            assert (tmp_path / "runs" / name / "latest").read_text() == last
        assert os.listdir(tmp_path / "runs" / name / last)
