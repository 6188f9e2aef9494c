"""Which memory a save is staged in: chosen by measurement, near the device."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aio_ckpt.config import Staging
from aio_ckpt.errors import EngineClosedError
from aio_ckpt.memory import arena as arenas
from aio_ckpt.memory import kind as staging
from aio_ckpt.memory import lifetime, numa
from aio_ckpt.memory.arena import ArenaKind
from aio_ckpt.memory.kind import StagingChoice, fastest, measure
from aio_ckpt.memory.lifetime import ArenaSpec

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
"""Never touched."""

# -- the kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        ({"pinned": 50e9, "pageable": 10e9}, "pinned"),
        ({"pinned": 10e9, "pageable": 10e9}, "pinned"),
        ({"pinned": 10e9, "pageable": 11e9}, "pageable"),
        ({"pageable": 1e9}, "pageable"),
        ({}, "pageable"),
    ],
    ids=["registered is faster", "a tie", "registered is slower", "the driver refuses", "nothing could be measured"],
)
def test_auto_takes_registered_memory_unless_pageable_is_faster(measured: dict[ArenaKind, float], kind: str) -> None:
    assert fastest(measured) == kind


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that are registered, in place of a driver."""
    found: set[int] = set()
    monkeypatch.setattr(arenas.device, "register_host_memory", lambda address, nbytes: found.add(address))
    monkeypatch.setattr(arenas.device, "unregister_host_memory", found.remove)
    return found


def test_copies_to_both_kinds_are_timed_and_nothing_stays(registered: set[int]) -> None:
    found = measure(CPU)
    assert set(found) == {"pinned", "pageable"}
    assert all(rate > 0 for rate in found.values())
    assert registered == set()


def test_a_driver_that_refuses_to_register_leaves_pageable_memory_and_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(arenas.device, "register_host_memory", refuse)
    assert StagingChoice("auto", is_named=False).kind(CPU) == "pageable"
    assert "pinned memory cannot be used" in caplog.text


def test_auto_takes_pageable_memory_from_when_the_driver_refuses_to_lock_that_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on locked memory may let the probe pass and not the arena of a state."""
    monkeypatch.setattr(staging, "measure", lambda source: {"pinned": 2.0, "pageable": 1.0})
    taken = list[ArenaKind]()

    def take(kind: ArenaKind) -> ArenaKind:
        taken.append(kind)
        if kind == "pinned":
            raise RuntimeError("CUDA error: out of memory")
        return kind

    choice = StagingChoice("auto", is_named=False)
    assert [choice.take(CPU, take) for _ in range(2)] == ["pageable"] * 2
    assert taken == ["pinned", "pageable", "pageable"]
    assert "pageable memory is taken from now on" in caplog.text


@pytest.mark.parametrize("setting", ["pinned", "auto"])
def test_a_setting_of_the_users_and_errors_of_our_own_are_not_worked_around(
    monkeypatch: pytest.MonkeyPatch, setting: Staging
) -> None:
    monkeypatch.setattr(staging, "measure", lambda source: {"pinned": 2.0, "pageable": 1.0})

    taken = list[ArenaKind]()

    def take(kind: ArenaKind) -> None:
        taken.append(kind)
        raise EngineClosedError("closed") if setting == "auto" else RuntimeError("refused")

    with pytest.raises(RuntimeError):
        StagingChoice(setting, is_named=False).take(CPU, take)
    assert taken == ["pinned"]


def test_auto_is_measured_once_and_not_for_a_state_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def counted(source: torch.device) -> dict[ArenaKind, float]:
        calls.append(source)
        return {"pinned": 2.0, "pageable": 1.0}

    monkeypatch.setattr(staging, "measure", counted)
    choice = StagingChoice("auto", is_named=False)
    assert choice.kind(None) == "pageable"
    assert calls == []
    assert [choice.kind(GPU), choice.kind(GPU)] == ["pinned", "pinned"]
    assert calls == [GPU]
    assert [StagingChoice("shm", is_named=False).kind(source) for source in (None, GPU)] == ["shm", "shm"]
    assert [StagingChoice("auto", is_named=True).kind(source) for source in (None, GPU)] == ["shm", "shm"]
    assert calls == [GPU]


def test_what_cannot_be_measured_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is full has no room for the probe; the save itself needs none."""

    def full(source: torch.device) -> dict[ArenaKind, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(staging, "measure", full)
    assert StagingChoice("auto", is_named=False).kind(GPU) == "pinned"


# -- the node -------------------------------------------------------------------------------------


def host(root: Path, cpus: dict[int, str], devices: dict[str, str]) -> Path:
    """A sysfs of a host with nodes and PCI devices."""
    for node, text in cpus.items():
        path = root / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(f"{text}\n")
    for address, node in devices.items():
        path = root / "bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return root


def test_nodes_and_their_cpus_are_read_from_sysfs(tmp_path: Path) -> None:
    sysfs = host(tmp_path, {0: "0-3,8", 1: "4-7", 2: ""}, {"0000:3b:00.0": "1", "0000:86:00.0": "-1"})
    (sysfs / "devices/system/node/possible").write_text("0-2\n")
    assert numa.node_cpus(sysfs) == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7})}
    assert numa.node_of("0000:3B:00.0", sysfs) == 1
    assert numa.node_of("0000:86:00.0", sysfs) == -1
    assert numa.node_of("0000:ff:00.0", sysfs) is None
    assert numa.node_cpus(tmp_path / "none") == {}
    assert isinstance(numa.node_cpus(Path("/sys")), dict)


TWO = {0: {0, 1}, 1: {2, 3}}


@pytest.mark.parametrize(
    ("nodes", "node", "allowed", "cpus", "problem"),
    [
        (TWO, 1, {0, 1, 2, 3}, {2, 3}, None),
        (TWO, 1, {1, 2}, {2}, None),
        (TWO, 1, {0, 1}, None, "this process may use no CPU of its NUMA node 1"),
        (TWO, -1, {0, 1}, None, "its NUMA node is not told"),
        (TWO, None, {0, 1}, None, "its NUMA node is not told"),
        (TWO, 7, {0, 1}, None, "its NUMA node is not told"),
        ({0: {0, 1}}, 0, {0, 1}, None, None),
        ({}, None, {0, 1}, None, None),
    ],
)
def test_the_cpus_of_the_devices_own_node_are_taken_where_there_are_several(
    nodes: dict[int, set[int]], node: int | None, allowed: set[int], cpus: set[int] | None, problem: str | None
) -> None:
    assert numa.choose_cpus(nodes, node, allowed) == (cpus, problem)


def test_where_it_is_not_possible_there_is_a_note_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aio_ckpt")
    sysfs = host(tmp_path, {0: "0", 1: "100000"}, {"0000:3b:00.0": "1"})
    assert numa.cpus_near(GPU, sysfs=sysfs) is None, "no driver here, or another address"
    assert "not placed near cuda:0: its NUMA node is not told" in caplog.text
    monkeypatch.setattr(numa, "pci_address", lambda _: "0000:3b:00.0")
    assert numa.cpus_near(GPU, sysfs=sysfs) is None
    assert "no CPU of its NUMA node 1" in caplog.text


def test_pages_are_touched_by_threads_on_those_cpus_and_the_trainers_own_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU: nothing to keep threads away from")
    near = frozenset({max(before)})
    seen: list[set[int]] = []
    real = arenas._populate

    def populate(address: int, capacity: int) -> None:
        seen.append(os.sched_getaffinity(0))
        with ThreadPoolExecutor(1) as threads:
            seen.append(threads.submit(os.sched_getaffinity, 0).result())
        real(address, capacity)

    monkeypatch.setattr(arenas, "_populate", populate)
    monkeypatch.setattr(lifetime, "cpus_near", lambda source: near if source == GPU else None)
    lifetime._make_arena(ArenaSpec(nbytes=1 << 20, kind="pageable", source=GPU), None).release()
    assert seen == [near, near]
    assert os.sched_getaffinity(0) == before
    lifetime._make_arena(ArenaSpec(nbytes=1 << 20, kind="pageable", source=None), None).release()
    assert seen[2] == before


def test_an_error_while_mapping_gives_the_thread_its_cpus_back() -> None:
    before = os.sched_getaffinity(0)

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        numa.run_on({min(before)}, fail)
    assert os.sched_getaffinity(0) == before
    assert numa.run_on({100_000}, lambda: 7) == 7, "a CPU that is not there keeps nothing back"
    assert os.sched_getaffinity(0) == before
