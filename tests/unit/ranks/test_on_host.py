"""How many ranks are on this host, as each launcher tells it."""

from __future__ import annotations

import pytest

from aio_ckpt.ranks.on_host import ranks_on_host

SLURM = {
    "SLURM_PROCID": "50",
    "SLURM_STEP_NUM_TASKS": "64",
    "SLURM_STEP_TASKS_PER_NODE": "8(x7),5,3",
    "SLURM_NODEID": "6",
}
TORCHRUN = {"LOCAL_WORLD_SIZE": "8"}
ONE_TORCHRUN_A_HOST = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "1(x8)",
    "SLURM_NODEID": "3",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, 8),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "64"}, 8),
        ({"LOCAL_SIZE": "8", "WORLD_SIZE": "64", "RANK": "50"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "64", "OMPI_COMM_WORLD_RANK": "50"}, 4),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "64", "PMI_RANK": "50"}, 2),
        (SLURM, 8),
        ({**SLURM, "SLURM_NODEID": "7"}, 5),
        ({**SLURM, "SLURM_NODEID": "8"}, 3),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "64"} | {"SLURM_NODEID": "0"}, 64),
        (ONE_TORCHRUN_A_HOST | TORCHRUN, 8),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "128"}, 64),
    ],
)
def test_each_launcher_tells_the_ranks_of_this_host(environment: dict[str, str], expected: int) -> None:
    assert ranks_on_host(64, 50, environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "eight"},
        {"LOCAL_SIZE": "8"},
        ONE_TORCHRUN_A_HOST,
        {**SLURM, "SLURM_NODEID": "9"},
        {**SLURM, "SLURM_PROCID": "7"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "128"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": ""},
    ],
)
def test_all_ranks_count_where_no_launcher_has_started_them_and_tells_it(environment: dict[str, str]) -> None:
    """What ``srun`` starts may start ranks itself: of a job of its own, or eight of one job on each host."""
    assert ranks_on_host(64, 50, environment) == 64
