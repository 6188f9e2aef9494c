"""The memory that is available: what the limits of cgroups leave, by the figures that the kernel shows."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from aio_ckpt.memory import available
from aio_ckpt.memory.available import available_bytes, headroom_bytes

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


def kernel(cgroup: str, files: Mapping[str, object]) -> Callable[[Path], str]:
    """Files of the kernel: ``/proc/self/cgroup``, and others by their names below ``/sys/fs/cgroup``."""
    texts = {"/proc/self/cgroup": cgroup, **{f"/sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}}

    def read(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return texts[str(path)]

    return read


def group(name: str, *, limit: object, used: int, stat: str = "") -> dict[str, object]:
    """Files of a group of v2."""
    return {f"{name}memory.max": limit, f"{name}memory.current": used, f"{name}memory.stat": stat}


def group_v1(name: str, *, limit: int, used: int, stat: str = "") -> dict[str, object]:
    """Files of a group of v1."""
    prefix = f"memory/{name}memory."
    return {f"{prefix}limit_in_bytes": limit, f"{prefix}usage_in_bytes": used, f"{prefix}stat": stat}


def test_page_cache_that_fills_a_container_counts_as_available() -> None:
    stat = f"anon {100 * MIB}\ninactive_file {390 * MIB}\nactive_file {10 * MIB}\n"
    container = group("", limit=512 * MIB, used=511 * MIB, stat=stat)
    assert headroom_bytes(kernel("0::/\n", container)) == (512 - 511 + 390) * MIB


def test_the_limit_of_an_ancestor_counts() -> None:
    """Slurm limits the job, and neither its step nor its task; systemd limits slices."""
    job = {
        **group("job_7/step_0/task_0/", limit="max", used=900 * MIB),
        **group("job_7/step_0/", limit="max", used=900 * MIB),
        **group("job_7/", limit=1024 * MIB, used=900 * MIB),
    }
    assert headroom_bytes(kernel("0::/job_7/step_0/task_0\n", job)) == 124 * MIB


def test_the_least_of_several_limits_counts() -> None:
    groups = {**group("pod/box/", limit=500 * MIB, used=100 * MIB), **group("pod/", limit=450 * MIB, used=300 * MIB)}
    assert headroom_bytes(kernel("0::/pod/box\n", groups)) == 150 * MIB


def test_the_limit_from_which_the_kernel_slows_a_process_down_counts() -> None:
    slowed = {**group("", limit="max", used=100 * MIB), "memory.high": 300 * MIB}
    assert headroom_bytes(kernel("0::/\n", slowed)) == 200 * MIB


@pytest.mark.parametrize("line", ["4:memory:/job/task", "11:cpu,memory:/job/task"])
def test_limits_of_cgroup_v1_count_with_its_page_cache(line: str) -> None:
    stat = f"inactive_file 0\ntotal_inactive_file {40 * MIB}\n"
    groups = {
        **group_v1("job/task/", limit=NO_LIMIT_V1, used=50 * MIB),
        **group_v1("job/", limit=560 * MIB, used=460 * MIB, stat=stat),
    }
    assert headroom_bytes(kernel(f"9:name=systemd:/\n{line}\n0::/unified\n", groups)) == 140 * MIB


def test_an_ancestor_of_cgroup_v1_that_a_container_does_not_see_counts() -> None:
    stat = f"hierarchical_memory_limit {300 * MIB}\ntotal_inactive_file 0\n"
    hidden = group_v1("", limit=NO_LIMIT_V1, used=100 * MIB, stat=stat)
    assert headroom_bytes(kernel("4:memory:/docker/abc\n", hidden)) == 200 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../../abc", "/kubepods/pod:1/abc"])
def test_a_path_outside_of_the_mount_of_a_container_means_the_mount_itself(path: str) -> None:
    assert headroom_bytes(kernel(f"0::{path}\n", group("", limit=300 * MIB, used=100 * MIB))) == 200 * MIB


def test_more_than_the_limit_leaves_nothing() -> None:
    assert headroom_bytes(kernel("0::/\n", group("", limit=MIB, used=2 * MIB))) == 0


@pytest.mark.parametrize(
    "files", [{}, group("", limit="max", used=MIB), {"memory.max": MIB}], ids=["no files", "no limit", "no usage"]
)
def test_without_a_limit_the_memory_of_the_machine_counts(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, object]
) -> None:
    assert headroom_bytes(kernel("0::/\n", files)) is None
    assert headroom_bytes(kernel("", files)) is None
    monkeypatch.setattr(available, "headroom_bytes", lambda _: None)
    monkeypatch.setattr(available.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=7 * MIB))
    assert available_bytes() == 7 * MIB


@pytest.mark.parametrize("headroom", [2 * MIB, 9 * MIB])
def test_the_lesser_of_machine_and_limit_is_available(monkeypatch: pytest.MonkeyPatch, headroom: int) -> None:
    monkeypatch.setattr(available, "headroom_bytes", lambda _: headroom)
    monkeypatch.setattr(available.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=7 * MIB))
    assert available_bytes() == min(headroom, 7 * MIB)
