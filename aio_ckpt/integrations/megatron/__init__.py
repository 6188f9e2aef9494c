"""Checkpoints of Megatron-LM: strategies and a queue for ``megatron.core``, and ``install()`` for ``pretrain``.

from aio_ckpt.integrations import megatron

megatron.install()
pretrain(...)
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.install_handle import same_handle
from aio_ckpt.errors import ConfigError

try:
    _version = importlib.import_module("megatron.core").__version__
except ImportError as no_library:
    raise ImportError(
        "aio_ckpt.integrations.megatron needs megatron-core and triton: pip install megatron-core triton"
    ) from no_library

from aio_ckpt.integrations.async_calls import AsyncCallsQueue, QueueInstalled, SaverResources
from aio_ckpt.integrations.megatron.names import (
    TRIED_TRAINING,
    core,
    training,
)
from aio_ckpt.integrations.megatron.strategies import LoadStrategy, SaveStrategy, our_reader
from aio_ckpt.integrations.nvrx.replacements import replacements
from aio_ckpt.integrations.patch_points import missing

__all__ = ["AsyncCallsQueue", "Installation", "LoadStrategy", "SaveStrategy", "install"]

_log = logging.getLogger("aio_ckpt")


def install(config: EngineConfig | None = None) -> Installation:
    """Let Megatron-LM save and load its ``torch_dist`` checkpoints by this package. Call it before ``pretrain``.

    Saves use :class:`SaveStrategy`, loads :class:`aio_ckpt.dcp.Reader`, and ``--async-save`` uses
    :class:`AsyncCallsQueue`. ``--async-save`` needs ``--use-persistent-ckpt-worker``, without which Megatron switches
    it off; no worker is started. Asynchronous saves of ``torch_dcp`` and ``fsdp_dtensor`` use the same queue, and
    :class:`aio_ckpt.dcp.Writer`; NVRx is not needed. Their synchronous saves and their loads stay with DCP.

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
        return same_handle(standing, config, module=__name__)
    queue = training.queue.value
    if queue is not None and queue.get_num_unfinalized_calls():
        raise ConfigError("async saves of Megatron are pending: call install() before pretrain()")
    return Installation(config or EngineConfig())


class Installation(QueueInstalled):
    """Handle of :func:`install`. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        of_core = missing(core)
        self.missing = [*of_core, *missing(training)]
        """Names that this Megatron lacks. If there is one, nothing is installed."""
        self._queue = AsyncCallsQueue(shared=self._shared)
        if self.missing:
            _log.warning(
                "Megatron saves by itself: megatron.core %s has no %s; install() was tried with %s, and a newer "
                "aio_ckpt may know this version%s",
                _version,
                ", ".join(map(str, self.missing)),
                ", ".join(TRIED_TRAINING),
                ""
                if of_core
                else "; without it, give dist_checkpointing.save() and load() a SaveStrategy and a LoadStrategy",
            )
            return
        put = self._put
        strategies: Any = functools.partial(SaveStrategy, shared=self._shared)
        strategies.owner = self
        put(training.save_strategy, strategies)
        put(training.queue, self._queue)
        for place in (training.start_worker, training.start_worker_at_first):
            put(place, _start_no_worker)
        for place in (training.reset_worker, training.reset_worker_at_restart):
            put(place, self._reset)
        for place in (core.reader, core.common_reader):
            if place.is_there:
                put(place, functools.partial(our_reader, self._shared, place.value))
        by_names = (training.strategy_of_saves, training.strategy_of_calls, training.can_save)
        moved = [place for place in by_names if not place.is_there]
        if moved:
            _log.warning(
                "megatron.core %s has no %s: Megatron itself saves torch_dcp and fsdp_dtensor",
                _version,
                ", ".join(map(str, moved)),
            )
            return
        strategy = _AsyncStrategy(self._shared, training.strategy_of_saves.value)
        for place, ours in zip(by_names, (strategy, strategy, lambda: True), strict=True):
            put(place, ours)

    def _queues(self) -> Iterable[AsyncCallsQueue]:
        return [self._queue]

    def _reset(self, *args: object, **options: object) -> None:
        """Forget the pending calls, for an in-process restart. The queue goes on in the next process group."""
        self._queue.close(abort=True)


def _start_no_worker(rank: int, *args: object, **options: object) -> None:
    """Start no process: threads of the trainer save."""


class _AsyncStrategy:
    """Function in the place of Megatron's ``get_async_strategy``: whatever the strategy, ours save."""

    def __init__(self, shared: SaverResources, stock: Callable[..., tuple[str, Any]]) -> None:
        self._stock = stock
        self._names = replacements(shared, lambda name: stock("nvrx", name)[1]) | {"AsyncRequest": core.request.value}

    def __call__(self, async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
        if module is None:
            return async_strategy, self._names
        return (async_strategy, self._names[module]) if module in self._names else self._stock(async_strategy, module)
