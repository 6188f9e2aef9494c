"""Number of ranks that share this host's memory and disk, as the launcher tells it. Pure.

Sources: the environment that torchrun, Open MPI and ``srun`` document for the processes they start; DeepSpeed's
``launcher/launch.py``; ``accelerate.utils.environment`` for MPICH and Intel MPI.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_LAUNCHERS = (
    ("LOCAL_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
"""By launcher (DeepSpeed, Open MPI, MPICH and Intel MPI): what counts the processes on this host, and all of them."""


def ranks_on_host(world_size: int, environment: Mapping[str, str]) -> int:
    """Return how many of ``world_size`` ranks are on this host.

    ``LOCAL_WORLD_SIZE`` of torchrun and Accelerate counts first. Other launchers are believed if they started at least
    ``world_size`` processes: those of ``srun`` may be one launcher a host. If none tells it, all ranks count as ranks
    of this host, so that they never take more memory than there is.
    """
    told = _number(environment, "LOCAL_WORLD_SIZE") or next(
        (here for here, started in _processes(environment) if here and started >= world_size), world_size
    )
    return min(told, world_size)


def _processes(environment: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Yield by launcher how many processes it started on this host, 0 if it does not say so, and how many in all."""
    for here, started in _LAUNCHERS:
        yield _number(environment, here), _number(environment, started)
    node = _number(environment, "SLURM_NODEID")
    on_nodes = _tasks_on_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    yield next(itertools.islice(on_nodes, node, None), 0), _number(environment, "SLURM_STEP_NUM_TASKS")


def _tasks_on_nodes(text: str) -> Iterator[int]:
    """Yield the tasks on each node of ``8(x3),4``."""
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text, re.ASCII):
        yield from itertools.repeat(int(tasks), int(nodes or 1))


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the number that a variable holds; 0 if there is none."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
