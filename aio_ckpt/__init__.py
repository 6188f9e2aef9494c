"""Async-first checkpoint engine for PyTorch.

See README.md for use and guarantees; the module table of the README says where to find what.
"""

from aio_ckpt._version import __version__
from aio_ckpt.config import EngineConfig, KeepBest
from aio_ckpt.coordinator import SoloCoordinator, StoreCoordinator
from aio_ckpt.engine import CheckpointEngine
from aio_ckpt.items import LoadReport, PerRank, SaveReport
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import SaveTicket

__all__ = [
    "CheckpointEngine",
    "EngineConfig",
    "KeepBest",
    "LoadReport",
    "PerRank",
    "SaveReport",
    "SaveTicket",
    "SoloCoordinator",
    "StoreCoordinator",
    "SyncCheckpointEngine",
    "__version__",
]
