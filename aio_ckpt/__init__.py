"""Async-first checkpoint engine for PyTorch."""

from aio_ckpt.config import EngineConfig
from aio_ckpt.items import LoadReport, PerRank, SaveReport

__all__ = ["EngineConfig", "LoadReport", "PerRank", "SaveReport"]
