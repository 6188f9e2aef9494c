"""Checkpoints of Megatron-LM: strategies and a queue for ``megatron.core``, and ``install()`` for ``pretrain``.

from aio_ckpt.integrations import megatron

megatron.install()
pretrain(...)
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import TracebackType
from typing import Any, Self

from aio_ckpt.checks import check_kind, shown
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import ConfigError

try:
    _version = importlib.import_module("megatron.core").__version__
except ImportError as missing:
    raise ImportError(
        "aio_ckpt.integrations.megatron needs megatron-core and triton: pip install megatron-core triton"
    ) from missing

from aio_ckpt.integrations.megatron.calls import AsyncCallsQueue
from aio_ckpt.integrations.megatron.names import (
    TRIED_TRAINING,
    Place,
    core,
    missing_in_core,
    missing_in_training,
    training,
)
from aio_ckpt.integrations.megatron.shared import Shared
from aio_ckpt.integrations.megatron.strategies import LoadStrategy, SaveStrategy, our_reader

__all__ = ["AsyncCallsQueue", "Installation", "LoadStrategy", "SaveStrategy", "install"]

_log = logging.getLogger("aio_ckpt")


def install(config: EngineConfig | None = None) -> Installation:
    """Let Megatron-LM save and load its ``torch_dist`` checkpoints by this package. Call it before ``pretrain``.

    Saves use :class:`SaveStrategy`, loads :class:`aio_ckpt.dcp.Reader`, and ``--async-save`` uses
    :class:`AsyncCallsQueue`. ``--async-save`` needs ``--use-persistent-ckpt-worker``, without which Megatron switches
    it off; no worker is started.

    If this Megatron lacks a name that is needed, a warning is logged, and Megatron's own saving stays.

    Args:
        config: settings of the writer, the reader and the stager.

    Returns:
        The handle, whose ``uninstall()`` restores Megatron's own. A second call with the same ``config`` returns the
        same handle.

    Raises:
        ConfigError: ``config`` has the wrong type or differs from that of an earlier call; or async saves of Megatron
            are pending.
    """
    check_kind("config", config, EngineConfig)
    standing = getattr(training.save_strategy.value, "owner", None)
    if isinstance(standing, Installation):
        if config in (None, standing.config):
            return standing
        raise ConfigError(
            f"aio_ckpt is installed in Megatron already, with {shown(standing.config)}: call uninstall() of its handle "
            "first"
        )
    queue = training.queue.value
    if queue is not None and queue.get_num_unfinalized_calls():
        raise ConfigError("async saves of Megatron are pending: call install() before pretrain()")
    return Installation(config or EngineConfig())


class Installation:
    """Handle of :func:`install`. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.missing = [*missing_in_core(), *missing_in_training()]
        """Names that this Megatron lacks. If there is one, nothing is installed."""
        self._shared = Shared(config)
        self._queue = AsyncCallsQueue(shared=self._shared)
        self._placed: list[tuple[Place, object, object]] = []
        if self.missing:
            _log.warning(
                "Megatron saves by itself: megatron.core %s has no %s; install() was tried with %s, and a newer "
                "aio_ckpt may know this version",
                _version,
                ", ".join(map(str, self.missing)),
                ", ".join(TRIED_TRAINING),
            )
            return
        self._put(training.save_strategy, _Strategies(self, self._shared))
        self._put(training.queue, self._queue)
        for place in (training.start_worker, training.start_worker_at_first):
            self._put(place, _start_no_worker)
        for place in (training.reset_worker, training.reset_worker_at_restart):
            self._put(place, self._reset)
        for place in (core.reader, core.common_reader):
            if place.is_there:
                self._put(place, functools.partial(our_reader, self._shared, place.value))

    def uninstall(self) -> None:
        """Finalize what is pending, and put Megatron's own back. Idempotent. Call it on all ranks."""
        try:
            self._queue.close()
        finally:
            placed, self._placed = self._placed, []
            for place, ours, stock in reversed(placed):
                if place.value is ours:
                    place.put(stock)
                else:
                    _log.warning("%s is %s by now, which stays", place, shown(place.value))
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()

    def _put(self, place: Place, ours: object) -> None:
        self._placed.append((place, ours, place.value))
        place.put(ours)

    def _reset(self, *args: object, **options: object) -> None:
        """Forget the pending calls, for an in-process restart. The queue goes on in the next process group."""
        self._queue.close(abort=True)


class _Strategies:
    """Object in the place of Megatron's class of save strategies. A call makes one of ours."""

    def __init__(self, owner: Installation, shared: Shared) -> None:
        self.owner = owner
        self._shared = shared

    def __call__(self, *args: Any, **options: Any) -> SaveStrategy:
        return SaveStrategy(*args, shared=self._shared, **options)


def _start_no_worker(rank: int, *args: object, **options: object) -> None:
    """Start no process: threads of the trainer save."""
