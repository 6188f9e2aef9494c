"""Base of the classes that replace those of DCP: their settings, their path, and the resources of a call."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from torch.distributed.checkpoint.filesystem import FileSystem

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import CallResources, SharedResources
from aio_ckpt.errors import ConfigError, RootError
from aio_ckpt.remote_path import RemotePath, find_bucket
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.paths import checked_path


class Replacement:
    """Base of the replacements for classes of DCP. Each has its own :class:`SharedResources`, or that of :meth:`share`.

    Inside ``with``, the resources stay open, so that all calls share threads and staging memory. Outside, they close
    behind the last call that runs. A replacement can be pickled and survives a fork.
    """

    def __init__(self, config: EngineConfig | None, storage: Storage | None) -> None:
        """Raise ConfigError if ``config`` or ``storage`` has the wrong type."""
        check_kind("config", config, EngineConfig)
        check_kind("storage", storage, Storage)
        self._config = config or EngineConfig()
        self._shared = SharedResources(self._config, storage, is_kept=False)
        self._user = object()
        """This object, as the user that keeps the resources open."""

    def share(self, resources: SharedResources) -> Self:
        """Use ``resources``, and return this object."""
        self._shared = resources
        return self

    def __enter__(self) -> Self:
        self._keep()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the resources close behind their last call. Idempotent. Later calls open them again."""
        self._shared.end_use(self._user)

    def _keep(self) -> CallResources:
        """return the resources, which stay open until :meth:`close`."""
        resources = self._shared.begin_use(self._user)
        resources.portal.check_thread(type(self).__name__)
        return resources

    def _running(self) -> AbstractContextManager[CallResources]:
        """Return the resources for a block of ``with``."""
        return self._shared.running(type(self).__name__)


class DirectoryReplacement(Replacement):
    """Base of the replacements that write or read one directory."""

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig | None, storage: Storage | None) -> None:
        """Raise RootError if ``path`` is no path, and ConfigError if it is a URL that names no place in a bucket."""
        super().__init__(config, storage)
        self.path = checkpoint_path_of(path)

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint, as ``.metadata`` stores it: absolute, as the working directory may change."""
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a place in an object store, or stock DCP accepts it as a path."""
        try:
            path = checkpoint_path_of(checkpoint_id)
            return isinstance(path, RemotePath) or bool(FileSystem.validate_checkpoint_id(path))
        except (RootError, ConfigError):
            return False


def checkpoint_path_of(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint, or its place in an object store.

    Raises:
        RootError: it is no path.
        ConfigError: it is a URL that names no place in a bucket.
    """
    return find_bucket("checkpoint_id", path) or checked_path(path).absolute()
