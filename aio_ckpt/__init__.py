"""Async-first checkpoint engine for PyTorch.

See README.md for use and guarantees. Each package's docstring says what goes in, what comes out and what it may import.
"""

from aio_ckpt import progress
from aio_ckpt._version import __version__
from aio_ckpt.config import EngineConfig, KeepBest
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.engine.every import Every
from aio_ckpt.errors import (
    AioCkptError,
    BudgetExceededError,
    BusyError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DuplicateNameError,
    EmptyStateError,
    EngineClosedError,
    EngineForkedError,
    FormatVersionError,
    MismatchError,
    MissingNameError,
    PeerFailedError,
    PlanChangedError,
    ProtectedStepError,
    ReadError,
    RootError,
    SaveCancelledError,
    SourceChangedError,
    StallError,
    StepOrderError,
    TemplateMismatchError,
    ThreadDiedError,
    UnexpectedNameError,
    UnsafeObjectError,
    UnsupportedLeafError,
    WriteError,
    WrongThreadError,
)
from aio_ckpt.leaves.values import PerRank, Shard, UntrustedObject
from aio_ckpt.ranks.store_coordinator import SoloCoordinator, StoreCoordinator
from aio_ckpt.reports import EngineStats, LoadReport, Progress, ReadReport, SaveReport
from aio_ckpt.standalone import load, read
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import SaveTicket

__all__ = [
    "AioCkptError",
    "BudgetExceededError",
    "BusyError",
    "CheckpointEngine",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "DuplicateNameError",
    "EmptyStateError",
    "EngineClosedError",
    "EngineConfig",
    "EngineForkedError",
    "EngineStats",
    "Every",
    "FormatVersionError",
    "KeepBest",
    "LoadReport",
    "MismatchError",
    "MissingNameError",
    "PeerFailedError",
    "PerRank",
    "PlanChangedError",
    "Progress",
    "ProtectedStepError",
    "ReadError",
    "ReadReport",
    "RootError",
    "SaveCancelledError",
    "SaveReport",
    "SaveTicket",
    "Shard",
    "SoloCoordinator",
    "SourceChangedError",
    "StallError",
    "StepOrderError",
    "StoreCoordinator",
    "SyncCheckpointEngine",
    "TemplateMismatchError",
    "ThreadDiedError",
    "UnexpectedNameError",
    "UnsafeObjectError",
    "UnsupportedLeafError",
    "UntrustedObject",
    "WriteError",
    "WrongThreadError",
    "__version__",
    "load",
    "progress",
    "read",
]


def __dir__() -> list[str]:
    return __all__
