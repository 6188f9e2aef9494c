"""NVIDIA's Resiliency Extension (NVRx): ``install()`` lets scripts that use its asynchronous saves save by ours.

from aio_ckpt.integrations import nvrx

nvrx.install()  # before the imports from nvidia_resiliency_ext
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.install_handle import same_handle
from aio_ckpt.errors import ConfigError
from aio_ckpt.integrations.async_calls import AsyncCallsQueue, QueueInstalled
from aio_ckpt.integrations.nvrx.names import TRIED, changed, holders, replaced
from aio_ckpt.integrations.nvrx.replacements import lend_members, replacements
from aio_ckpt.integrations.patch_points import PatchPoint, missing

__all__ = ["Installation", "install"]

_log = logging.getLogger("aio_ckpt")


def install(config: EngineConfig | None = None) -> Installation:
    """Put ours in the place of NVRx's queue, writer, reader and planning. Call it before NVRx's names are imported.

    ``AsyncCallsQueue``, ``FileSystemWriterAsync``, ``CachedMetadataFileSystemReader``, ``save_state_dict_async_plan``
    and ``save_state_dict_async_finalize`` are replaced. All other names stay NVRx's. Of these,
    ``TorchAsyncCheckpoint`` and local checkpoints work as before.

    If this NVRx lacks one of these names, or one takes a new argument, a warning is logged, and NVRx's own stay.

    Args:
        config: settings of the writer, the reader and the memory for copies.

    Returns:
        The handle, whose ``uninstall()`` restores NVRx's own. A second call with the same ``config`` returns the same
        handle.

    Raises:
        ImportError: NVRx is not installed.
        ConfigError: ``config`` has the wrong type or differs from that of an earlier call; or a module has imported
            one of the names already.
    """
    check_kind("config", config, EngineConfig)
    if not replaced.AsyncCallsQueue.is_there:
        raise ImportError(
            "aio_ckpt.integrations.nvrx replaces names of nvidia-resiliency-ext, which is not installed; for Megatron, "
            "aio_ckpt.integrations.megatron.install() works without it"
        )
    standing = getattr(replaced.AsyncCallsQueue.value, "owner", None)
    if isinstance(standing, Installation):
        return same_handle(standing, config, module=__name__)
    return Installation(config or EngineConfig())


class Installation(QueueInstalled):
    """Handle of :func:`install`. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        originals = {name: place.value for name, place in vars(replaced).items() if isinstance(place, PatchPoint)}
        ours = replacements(self._shared, originals.__getitem__)
        self._queue: Any = ours["AsyncCallsQueue"]
        self._queue.owner = self
        self.changed = [*map(str, missing(replaced))] or changed(ours)
        """What this NVRx lacks, or has in addition. If there is anything, nothing is installed."""
        if self.changed:
            _log.warning(
                "NVRx saves by itself: its names have changed (%s); install() knows NVRx %s, and a newer aio_ckpt may "
                "know this version",
                ", ".join(self.changed),
                ", ".join(TRIED),
            )
            return
        held = holders(ours)
        if held:
            raise ConfigError(
                f"NVRx's own names were imported before install(): {', '.join(held[:3])}: call install() before the "
                "imports from nvidia_resiliency_ext; with Megatron, only aio_ckpt.integrations.megatron.install()"
            )
        for name, replacement in ours.items():
            lend_members(originals[name], replacement)
            self._put(getattr(replaced, name), replacement)

    def _queues(self) -> Iterable[AsyncCallsQueue]:
        queues: list[AsyncCallsQueue] = self._queue.get_instances()
        return queues
