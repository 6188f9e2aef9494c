"""Number of ranks that share this host's memory and disk, as the launcher tells it. Pure.

Sources: the environment that torchrun, Open MPI and ``srun`` document for the processes they start; DeepSpeed's
``launcher/launch.py``; ``accelerate.utils.environment`` for MPICH and Intel MPI.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_LAUNCHERS = (
    ("LOCAL_SIZE", "WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK"),
)
"""By launcher (DeepSpeed, Open MPI, MPICH and Intel MPI): processes on this host, all of them, and this one's rank."""


def ranks_on_host(world_size: int, rank: int, environment: Mapping[str, str]) -> int:
    """Return how many of ``world_size`` ranks are on the host of this ``rank``.

    ``LOCAL_WORLD_SIZE`` of torchrun and Accelerate counts first. Another launcher is believed if it has started these
    very ranks: those of ``srun`` may be launchers themselves. If none tells it, all ranks count as ranks of this host,
    and each takes a smaller share of its memory than there is.
    """
    told = _number(environment, "LOCAL_WORLD_SIZE")
    if not told:
        counts = (here for here, *started in _processes(environment) if here and started == [world_size, rank])
        told = next(counts, world_size)
    return min(told, world_size)


def _processes(environment: Mapping[str, str]) -> Iterator[tuple[int, int, int]]:
    """Yield by launcher how many processes it started on this host, 0 if it does not say so, and in all; and a rank."""
    for here, started, rank in _LAUNCHERS:
        yield _number(environment, here), _number(environment, started), _number(environment, rank)
    node = _number(environment, "SLURM_NODEID")
    on_nodes = _tasks_on_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = next(itertools.islice(on_nodes, node, None), 0)
    yield tasks, _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_PROCID")


def _tasks_on_nodes(text: str) -> Iterator[int]:
    """Yield the tasks on each node of ``8(x3),4``."""
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text, re.ASCII):
        yield from itertools.repeat(int(tasks), int(nodes or 1))


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the number that a variable holds; 0 if there is none."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
