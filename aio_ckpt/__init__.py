"""Async-first checkpoint engine for PyTorch.

See README.md for use and guarantees. ``head -n 1 aio_ckpt/*/*.py`` prints what each module does.
Each package's docstring says what goes in, what comes out, what it may import, and which module decides what:

- calls of a user: ``engine`` and, with blocking calls, ``sync``; their settings: ``config``; their results: ``ticket``,
  ``reports`` and ``errors``; ``every``: when a training loop saves, before preemption too; ``progress``: bars
- without an engine: ``standalone`` loads and reads one checkpoint, ``copying`` copies one into another root
- a save: ``state`` takes the state apart, ``leaves`` stores what stands in it, ``plan`` places it, ``snapshot`` copies
  it, ``write`` writes it, and ``commit`` makes it visible and removes what expires; ``mirror`` copies it elsewhere
- a load: ``checkpoint`` opens and verifies, ``match`` compares, ``restore`` reads and applies
- below both: ``format`` (bytes), ``memory`` (buffers), ``storage`` and ``remote_path`` (files and objects), ``runtime``
  (threads and waits), ``ranks`` (agreement), ``rescue`` (snapshots of dead trainers), ``argument_checks``,
  ``message_texts``
- other entries: ``cli``, ``demo``, ``dcp`` (torch's own calls), ``integrations`` (frameworks)

Names that need torch are imported at first use (PEP 562): torch takes seconds, and ``aio-ckpt ls`` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aio_ckpt import errors
from aio_ckpt._version import __version__
from aio_ckpt.config import EngineConfig, KeepBest, Mirror
from aio_ckpt.errors import *  # noqa: F403 - every error is public
from aio_ckpt.reports import CopyReport, EngineStats, LoadReport, Progress, ReadReport, SaveReport

if TYPE_CHECKING:
    from aio_ckpt import progress
    from aio_ckpt.copying import copy
    from aio_ckpt.engine.engine import CheckpointEngine
    from aio_ckpt.every import Every
    from aio_ckpt.leaves.values import PerRank, Shard, UntrustedObject
    from aio_ckpt.ranks.coordinator import SoloCoordinator
    from aio_ckpt.ranks.store_coordinator import StoreCoordinator
    from aio_ckpt.standalone import load, read
    from aio_ckpt.sync import SyncCheckpointEngine
    from aio_ckpt.ticket import SaveTicket

_MODULES = {
    "CheckpointEngine": "aio_ckpt.engine.engine",
    "Every": "aio_ckpt.every",
    "PerRank": "aio_ckpt.leaves.values",
    "SaveTicket": "aio_ckpt.ticket",
    "Shard": "aio_ckpt.leaves.values",
    "SoloCoordinator": "aio_ckpt.ranks.coordinator",
    "StoreCoordinator": "aio_ckpt.ranks.store_coordinator",
    "SyncCheckpointEngine": "aio_ckpt.sync",
    "UntrustedObject": "aio_ckpt.leaves.values",
    "copy": "aio_ckpt.copying",
    "load": "aio_ckpt.standalone",
    "read": "aio_ckpt.standalone",
}
"""Module of each name that is imported at first use. The imports for type checkers above name the same."""

__all__ = [
    "CheckpointEngine",
    "CopyReport",
    "EngineConfig",
    "EngineStats",
    "Every",
    "KeepBest",
    "LoadReport",
    "Mirror",
    "PerRank",
    "Progress",
    "ReadReport",
    "SaveReport",
    "SaveTicket",
    "Shard",
    "SoloCoordinator",
    "StoreCoordinator",
    "SyncCheckpointEngine",
    "UntrustedObject",
    "__version__",
    "copy",
    "load",
    "progress",
    "read",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name == "progress":
        return import_module("aio_ckpt.progress")  # which sets the attribute
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value  # from now on, the attribute is found without this function
    return value


def __dir__() -> list[str]:
    return __all__
