"""A mirror in an object store, with a real S3 server: killed in an upload, lost disks, faults, several ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks
from warm_python import WarmPython

import aio_ckpt
from aio_ckpt import EngineConfig, Mirror, PerRank, SyncCheckpointEngine
from aio_ckpt.cli.commands import run
from aio_ckpt.errors import ConfigError
from tests.remote.fault_proxy import Choose, Fault
from tests.remote.test_object_store import get, keys
from tests.remote.test_root_in_store import TIMEOUT, names_of, state, value_of

TRAINER = """
import os, sys, torch, aio_ckpt
from aio_ckpt import EngineConfig, Mirror

root, url, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}
config = EngineConfig(keep_last=1, mirror=Mirror(url, keep_last=2))
with aio_ckpt.SyncCheckpointEngine(root, config) as engine:
    begun = 0
    try:
        begun = engine.load(state).step
    except aio_ckpt.CheckpointNotFoundError:
        pass
    for step in range(begun + 1, last + 1):
        torch.manual_seed(step)
        loss = model(torch.randn(32, 50)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.save(state, step=step).mirrored.result(60)
print(begun, loss.item().hex())
"""


@contextlib.contextmanager
def training(root: Path, url: str, last: int) -> Iterator[subprocess.Popen[str]]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPython(TRAINER, str(root), url, str(last), options=(), **streams) as child:
        try:
            yield child
        finally:
            child.kill()


def trained(root: Path, url: str, last: int) -> list[str]:
    with training(root, url, last) as child:
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return out.split()


@pytest.mark.slow
def test_a_run_that_is_killed_in_an_upload_goes_on_and_survives_the_loss_of_its_disk(
    bucket: str, root: Path, tmp_path: Path, faulty: Callable[[Choose], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tmp_path / "whole", f"{bucket}/whole", 6)[1]
    endpoint, uploading, gate = os.environ["AWS_ENDPOINT_URL"], threading.Event(), threading.Event()

    def hold_the_third(method: str, path: str, number: int) -> Fault:
        del number
        if method == "GET" and "step_000000003" in path and path.endswith(".distcp"):  # its data is put, and read back
            uploading.set()
            gate.wait(TIMEOUT)
        return ""

    faulty(hold_the_third)
    with training(root, f"{bucket}/run", 6) as child:
        assert uploading.wait(TIMEOUT)
        child.send_signal(signal.SIGKILL)
    gate.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert names_of(f"{bucket}/run") >= {"step_000000002"}
    with SyncCheckpointEngine(f"{bucket}/run") as there:
        assert there.steps() == [1, 2]
    shutil.rmtree(root)  # so that step 3 is another save
    assert trained(root, f"{bucket}/run", 4)[0] == "2"
    assert len([key for key in keys(f"{bucket}/run/step_000000003") if key.endswith(".distcp")]) == 1
    with SyncCheckpointEngine(f"{bucket}/run") as there:
        assert there.steps() == [3, 4]
    shutil.rmtree(root)
    assert trained(root, f"{bucket}/run", 6) == ["4", whole]
    assert names_of(f"{bucket}/run") == {".aio_ckpt", "step_000000005", "step_000000006"}
    assert keys(f"{bucket}/run/.aio_ckpt") == {"lock"}
    assert run(["verify", f"{bucket}/run"]) == 0


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_delays_a_copy_and_no_save(
    bucket: str, root: Path, faulty: Callable[[Choose], None]
) -> None:
    faulty(lambda method, path, number: "busy" if number == 1 else "lost" if method == "PUT" and number == 2 else "")
    with SyncCheckpointEngine(root, EngineConfig(mirror=Mirror(f"{bucket}/run"))) as engine:
        tickets = [engine.save(state(step), step) for step in (1, 2)]
        assert [ticket.result(TIMEOUT) is None for ticket in tickets] == [False, False]
        assert str(tickets[1].mirrored.result(TIMEOUT)) == f"{bucket}/run/step_000000002"
    shutil.rmtree(root)
    with SyncCheckpointEngine(root, EngineConfig(mirror=Mirror(f"{bucket}/run"))) as engine:
        template = state(0.0)
        assert engine.load(template).step == value_of(template) == 2


def test_a_copy_stays_until_the_one_that_replaces_it_was_read_back(
    bucket: str, root: Path, faulty: Callable[[Choose], None]
) -> None:
    url, reading, gate, is_held = f"{bucket}/run", threading.Event(), threading.Event(), threading.Event()

    def hold(method: str, path: str, number: int) -> Fault:
        if is_held.is_set() and method == "GET" and path.endswith(".distcp"):
            reading.set()
            gate.wait(TIMEOUT)
        return ""

    faulty(hold)
    with SyncCheckpointEngine(root, EngineConfig(mirror=Mirror(url))) as engine:
        engine.save(state(1), 1, files={"config.json": b"1"}).mirrored.result(TIMEOUT)
        is_held.set()
        ticket = engine.save(state(2), 1, overwrite=True, files={"config.json": b"2"})
        assert reading.wait(TIMEOUT)
        is_held.clear()
        assert value_of(aio_ckpt.read(f"{url}/step_000000001")) == 1
        assert get(f"{url}/step_000000001/config.json") == b"1"
        gate.set()
        ticket.mirrored.result(TIMEOUT)
        assert value_of(aio_ckpt.read(f"{url}/step_000000001")) == 2
        assert get(f"{url}/step_000000001/config.json") == b"2"
        engine.save(state(3), 3).mirrored.result(TIMEOUT)
        assert engine.rollback(1) == [3]
    with SyncCheckpointEngine(url) as there:
        assert there.steps() == [1]
    assert keys(f"{url}/step_000000001") == {path.name for path in (root / "step_000000001").iterdir()}
    assert run(["verify", url]) == 0


def mirror_on_ranks(rank: int, count: int, root: Path, url: str, environment: dict[str, str]) -> list[Any]:
    os.environ.update(environment)
    config, found = EngineConfig(mirror=Mirror(url), stall_timeout_secs=TIMEOUT), []
    with SyncCheckpointEngine(root, config) as engine:
        for step in (1, 2):
            saved = {"w": state(step)["w"], "mine": PerRank(torch.full((1000,), float(rank)))}
            found.append(engine.save(saved, step=step).mirrored.result(TIMEOUT))
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(root)
        torch.distributed.barrier()
        template = {"w": torch.zeros(70_000), "mine": PerRank(torch.zeros(1000))}
        report = engine.load(template)
        return [*found, report.path, float(template["w"][0]), float(template["mine"].value[0])]


def test_ranks_load_the_copy_that_rank_0_made(two: Ranks, bucket: str, root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = two.run(mirror_on_ranks, root, f"{bucket}/run", environment)
    for rank, (first, second, path, value, mine) in enumerate(found):
        assert [first and str(first), second and str(second)] == (
            [None, None] if rank else [f"{bucket}/run/step_00000000{step}" for step in (1, 2)]
        )
        assert (str(path), value, mine) == (f"{bucket}/run/step_000000002", 2.0, rank)


def open_with_a_mirror_of_its_own(rank: int, count: int, root: Path, url: str, environment: dict[str, str]) -> str:
    os.environ.update(environment)
    config = EngineConfig(mirror=Mirror(f"{url}/{rank}"), stall_timeout_secs=TIMEOUT)
    with SyncCheckpointEngine(root, config) as engine:
        try:
            engine.save(state(1), step=1).result(TIMEOUT)
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_with_different_mirrors_are_told_so(two: Ranks, bucket: str, root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for text in two.run(open_with_a_mirror_of_its_own, root, f"{bucket}/run", environment):
        assert f"the settings of the ranks differ: mirror is {bucket}/run/" in text


def test_a_mirror_of_a_store_is_on_a_disk(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a mirror on a disk"):
        SyncCheckpointEngine(f"{bucket}/run", EngineConfig(mirror=Mirror(f"{bucket}/mirror")))
    with SyncCheckpointEngine(f"{bucket}/run", EngineConfig(mirror=Mirror(tmp_path / "mirror"))) as engine:
        assert engine.save(state(1.0), 1).mirrored.result(TIMEOUT) == tmp_path / "mirror" / "step_000000001"
    with SyncCheckpointEngine(tmp_path / "mirror") as there:
        assert value_of(there.read()) == 1.0


def test_a_whole_bucket_is_no_mirror(root: Path) -> None:
    with pytest.raises(ConfigError, match="a whole bucket"):
        SyncCheckpointEngine(root, EngineConfig(mirror=Mirror("s3://bucket")))
