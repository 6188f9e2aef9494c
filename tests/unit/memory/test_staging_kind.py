"""Which kind of memory a save is staged in."""

from __future__ import annotations

import pytest
import torch

from aio_ckpt.config import Staging
from aio_ckpt.errors import EngineClosedError
from aio_ckpt.memory import arena as arenas
from aio_ckpt.memory import staging_kind as staging
from aio_ckpt.memory.arena import ArenaKind
from aio_ckpt.memory.staging_kind import StagingChoice, can_page_lock

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
"""Never touched."""

# -- the kind -------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses that are registered, in place of a driver."""
    found: set[int] = set()
    monkeypatch.setattr(arenas.device, "register_host_memory", lambda address, nbytes: found.add(address))
    monkeypatch.setattr(arenas.device, "unregister_host_memory", found.remove)
    return found


def test_the_driver_is_tried_with_one_page_and_nothing_stays(registered: set[int]) -> None:
    assert can_page_lock(CPU)
    assert registered == set()


def test_a_driver_that_refuses_to_register_leaves_pageable_memory_and_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    monkeypatch.setattr(arenas.device, "register_host_memory", refuse)
    assert StagingChoice("auto").kind(CPU) == "pageable"
    assert "pinned memory cannot be used" in caplog.text


def test_auto_takes_pageable_memory_from_when_the_driver_refuses_to_lock_that_much(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on locked memory may allow one page and not the arena of a state."""
    monkeypatch.setattr(staging, "can_page_lock", lambda source: True)
    taken = list[ArenaKind]()

    def take(kind: ArenaKind) -> ArenaKind:
        taken.append(kind)
        if kind == "pinned":
            raise RuntimeError("CUDA error: out of memory")
        return kind

    choice = StagingChoice("auto")
    assert [choice.take(CPU, take) for _ in range(2)] == ["pageable"] * 2
    assert taken == ["pinned", "pageable", "pageable"]
    assert "pageable memory is taken from now on" in caplog.text


@pytest.mark.parametrize("setting", ["pinned", "auto"])
def test_a_setting_of_the_users_and_errors_of_our_own_are_not_worked_around(
    monkeypatch: pytest.MonkeyPatch, setting: Staging
) -> None:
    monkeypatch.setattr(staging, "can_page_lock", lambda source: True)

    taken = list[ArenaKind]()

    def take(kind: ArenaKind) -> None:
        taken.append(kind)
        raise EngineClosedError("closed") if setting == "auto" else RuntimeError("refused")

    with pytest.raises(RuntimeError):
        StagingChoice(setting).take(CPU, take)
    assert taken == ["pinned"]


def test_the_driver_is_asked_once_and_not_for_a_state_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def counted(source: torch.device) -> bool:
        calls.append(source)
        return True

    monkeypatch.setattr(staging, "can_page_lock", counted)
    choice = StagingChoice("auto")
    assert choice.kind(None) == "pageable"
    assert calls == []
    assert [choice.kind(GPU), choice.kind(GPU)] == ["pinned", "pinned"]
    assert calls == [GPU]
    assert [StagingChoice("shm").kind(source) for source in (None, GPU)] == ["shm", "shm"]
    assert [StagingChoice("auto", is_named=True).kind(source) for source in (None, GPU)] == ["shm", "shm"]
    assert calls == [GPU]


def test_without_memory_for_the_page_auto_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save itself then tells that there is no memory."""

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(staging, "map_arena", refuse)
    assert StagingChoice("auto").kind(GPU) == "pinned"
