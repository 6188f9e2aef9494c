"""Memory near a device: which CPUs share its NUMA node, by sysfs. A page lies on the node that touched it first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TypeVar

import torch

from aio_ckpt.memory.cuda import pci_address

__all__ = ["choose_cpus", "cpus_near", "node_cpus", "node_of", "run_on"]

T = TypeVar("T")
_SYSFS = Path("/sys")
_NODE = re.compile(r"node(\d+)")
_log = logging.getLogger("aio_ckpt")


def choose_cpus(
    nodes: Mapping[int, Set[int]], node: int | None, allowed: Set[int]
) -> tuple[frozenset[int] | None, str | None]:
    """CPUs that are to touch memory for a device on ``node``, and why there are none where that matters.

    Args:
        nodes: CPUs of each node of the host.
        node: the device's own; None or -1: it is not told.
        allowed: CPUs that this process may use.
    """
    if len(nodes) < 2:
        return None, None
    if node is None or node not in nodes:
        return None, "its NUMA node is not told"
    near = frozenset(nodes[node] & allowed)
    return (near, None) if near else (None, f"this process may use no CPU of its NUMA node {node}")


def cpus_near(device: torch.device, *, sysfs: Path = _SYSFS) -> frozenset[int] | None:
    """CPUs near ``device``; None on a host of one node and, with a note in the log, where they cannot be had."""
    nodes = node_cpus(sysfs)
    if len(nodes) < 2:
        return None
    address = pci_address(device)
    node = None if address is None else node_of(address, sysfs)
    cpus, problem = choose_cpus(nodes, node, os.sched_getaffinity(0))
    if problem is not None:
        _log.info("staging memory is not placed near %s: %s", device, problem)
    return cpus


def run_on(cpus: Set[int] | None, fn: Callable[[], T]) -> T:
    """``fn()``, this thread and those that it starts meanwhile kept to ``cpus`` (None: where they were)."""
    if not cpus:
        return fn()
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # gone offline, or taken away: only farther from the device
            os.sched_setaffinity(0, cpus)
        return fn()
    finally:
        os.sched_setaffinity(0, before)


def node_cpus(sysfs: Path) -> dict[int, frozenset[int]]:
    """CPUs of every node that has any; empty where sysfs does not tell."""
    found = {}
    for path in (sysfs / "devices/system/node").glob("node*"):
        match = _NODE.fullmatch(path.name)
        text = _first_line(path / "cpulist")
        if match and text:  # a node without CPUs holds device memory
            found[int(match[1])] = _parse_list(text)
    return found


def node_of(pci: str, sysfs: Path) -> int | None:
    """NUMA node of the device at a PCI address (``0000:3b:00.0``); -1 where the firmware does not tell."""
    try:
        return int(_first_line(sysfs / "bus/pci/devices" / pci.lower() / "numa_node"))
    except ValueError:
        return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse_list(text: str) -> frozenset[int]:
    """``0-3,8`` as sysfs writes it."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
