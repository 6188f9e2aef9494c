"""``install`` and ``default``: calls of ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` that pass no writer use ours.

DCP makes what its caller has not passed through globals of its modules. ``install`` puts an object in the place of each
(:func:`aio_ckpt._torch.dcp_globals`). All replacements that these objects make share their resources. If one cannot
serve a call, stock's own class serves it, and a warning is logged.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from aio_ckpt._torch import DcpGlobal, DcpRole, dcp_globals, writer_transforms
from aio_ckpt.argument_checks import check_flag, check_kind, local_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import CallResources, SharedResources
from aio_ckpt.dcp.install_handle import Installed, same_handle
from aio_ckpt.dcp.item_sources import Sources
from aio_ckpt.dcp.reader import Reader
from aio_ckpt.dcp.replacement import Replacement
from aio_ckpt.dcp.stager import AsyncStager, stage_copy
from aio_ckpt.dcp.writer import Writer
from aio_ckpt.errors import ConfigError, PlanChangedError, RootError
from aio_ckpt.message_texts import shown
from aio_ckpt.remote_path import RemotePath, find_bucket
from aio_ckpt.storage.object_client import has_obstore

_log = logging.getLogger("aio_ckpt")


def install(config: EngineConfig | None = None, *, package: bool = False) -> Installation:
    """Let ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` use this package if the caller passes no writer or reader.

    The calls then run on :class:`Writer`, :class:`Reader` and :class:`AsyncStager`, with one set of threads and one
    staging memory for the process. URLs of object stores are served if obstore is installed; others stay with stock.
    So does a save that these classes cannot serve, with a warning in the log.

    Args:
        config: settings of the writer, the reader and the stager. Each describes which ones it uses.
        package: whether ``FileSystemWriter`` and ``FileSystemReader`` of ``torch.distributed.checkpoint`` are replaced
            too, for callers that make these themselves. A class that is derived from them later derives from stock's.

    Returns:
        The handle, whose ``uninstall()`` restores stock. A second call that asks for nothing else returns the same
        handle.

    Raises:
        ConfigError: an argument has the wrong type; another library has put a class of its own in stock's place; or an
            installation stands that has another ``config`` or lacks ``package``.
    """
    check_kind("config", config, EngineConfig)
    check_flag("package", package)
    places = dcp_globals(package=package)
    standing = _standing_in(places)
    if standing is not None:
        lacks = "" if package <= standing.package else "without package=True, "
        return same_handle(standing, config, module="aio_ckpt.dcp", lacks=lacks)
    for place in places:
        if place.value is not None and not place.is_of_torch:
            raise ConfigError(
                f"{place} is {shown(place.value)}, which is not torch's own and stays: pass "
                "storage_writer=Writer(path) and storage_reader=Reader(path) to the calls instead"
            )
    return Installation(config or EngineConfig(), package, places)


@contextmanager
def default(config: EngineConfig | None = None, *, package: bool = False) -> Iterator[Installation]:
    """Do :func:`install` for the block of a ``with``. If :func:`install` returns an older handle, it stays."""
    outer = _standing_in(dcp_globals(package=package))
    handle = install(config, package=package)
    try:
        yield handle
    finally:
        if handle is not outer:
            handle.uninstall()


class Installation(Installed):
    """Handle of :func:`install`. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig, package: bool, places: Sequence[DcpGlobal]) -> None:
        super().__init__(config)
        self.package = package
        self._resources = SharedResources(config)
        missing = [str(place) for place in places if place.value is None]
        if missing:
            _log.warning(
                "this torch has no %s: calls of DCP that go through there stay with stock; a newer aio_ckpt may know "
                "this torch",
                ", ".join(missing),
            )
        self._writers: list[_StandIn] = []
        for place in places:
            if place.value is not None:
                self._put(place, self._stand_in(place))

    def uninstall(self) -> None:
        """Put stock's classes back. Pending saves go on, and the threads end behind them. Idempotent."""
        super().uninstall()
        self._resources.close()

    # -- what the stand-ins make ------------------------------------------------------------------

    def _stand_in(self, place: DcpGlobal) -> _StandIn:
        made: dict[DcpRole, tuple[type, Callable[..., object]]] = {
            "writer": (Writer, self._writer),
            "reader": (Reader, self._reader),
            "stager": (AsyncStager, self._stager),
            "executor": (_Executor, self._executor),
        }
        ours, make = made[place.role]
        stand_in = _StandIn(self, place.value, ours, functools.partial(make, place.value))
        if place.role == "writer":
            self._writers.append(stand_in)
        return stand_in

    def _writer(self, stock: Callable[..., Any], *args: Any, **given: Any) -> Any:
        make_stock = functools.partial(stock, *args, **given)
        return self._made(functools.partial(_Writer, make_stock), stock, *args, **given)

    def _reader(self, stock: Callable[..., Any], *args: Any, **given: Any) -> Any:
        return self._made(Reader, stock, *args, **given)

    def _made(self, ours: Callable[..., Replacement], stock: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Return ours; stock's if the path is in a place that ours does not reach, or ours refuses an argument."""
        path = args[0] if args else given.get("path")
        if isinstance(path, (str, os.PathLike)) and not _is_ours(path):
            return stock(*args, **given)
        try:
            return ours(*args, config=self.config, **given).share(self._resources)
        except (ConfigError, RootError, TypeError) as error:
            _log.warning("stock's %s serves this call, without checksums: %s", stock.__qualname__, error)
        return stock(*args, **given)

    def _stager(self, stock: Callable[..., Any], *args: Any, **given: Any) -> staging.AsyncStager:
        return _Stager(functools.partial(stock, *args, **given), self.config).share(self._resources)

    def _executor(self, stock: Callable[..., Any]) -> _Executor:
        return _Executor(stock(), self._writers[0] if self._writers else None)


def _is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is on a local file system, or in an object store that can be reached from here.

    So is a path that begins with ``~``: ours refuses it, and a warning tells that stock makes a directory of that name.
    """
    try:
        is_local = local_path(path) is not None or os.fspath(path).startswith("~")
        return is_local or (find_bucket("checkpoint_id", path) is not None and has_obstore())
    except ConfigError:
        return False


def _standing_in(places: Sequence[DcpGlobal]) -> Installation | None:
    """Return the installation that stands in one of ``places``."""
    return next((place.value.owner for place in places if isinstance(place.value, _StandIn)), None)


class _StandIn:
    """Object in the place of a class of stock. A call makes one of ours. In every other way it is the class."""

    def __init__(self, owner: Installation, stock: Any, ours: type, make: Callable[..., object]) -> None:
        self.owner = owner
        self.stock = stock
        self._ours = ours
        self._make = make

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._make(*args, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["stock"], name)

    def validate_checkpoint_id(self, checkpoint_id: Any) -> bool:
        """Return whether ours or stock's takes this place."""
        is_path = isinstance(checkpoint_id, (str, os.PathLike))
        return (is_path and _is_ours(checkpoint_id)) or bool(self.stock.validate_checkpoint_id(checkpoint_id))

    def __repr__(self) -> str:
        return f"<{self.stock.__qualname__} by aio_ckpt.dcp.install()>"

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any, ...]:
        """Return stock's class as the base: a derived class relies on its methods."""
        return (self.stock,)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, (self.stock, self._ours))

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self.stock)

    def __or__(self, other: Any) -> Any:
        return self.stock | other

    def __ror__(self, other: Any) -> Any:
        return other | self.stock


_DONE_BY_STOCK = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
"""Methods of stock's writer that take the place of ours in a save without a leader."""


class _Writer(Writer):
    """Writer that serves every call that stock's serves.

    A save without a leader (``use_collectives=False``) is left to stock's writer, unless it goes to an object store. If
    a planner gives other tensors than it has planned, all items are encoded as stock does, in memory.
    """

    def __init__(self, make_stock: Callable[[], Any], *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._make_stock = make_stock

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        for name in _DONE_BY_STOCK:
            vars(self).pop(name, None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives", True) or isinstance(self.path, RemotePath):
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)
            return
        _log.warning("%s: use_collectives=False: stock's FileSystemWriter saves, without checksums", self.path)
        stock = self._make_stock()
        stock.reset(self.path)
        stock.set_up_storage_writer(is_coordinator, *args, **kwargs)
        vars(self).update((name, getattr(stock, name)) for name in _DONE_BY_STOCK)

    def _sources(self, resources: CallResources, plan: SavePlan, planner: SavePlanner, transforms: Any) -> Sources:
        try:
            return super()._sources(resources, plan, planner, transforms)
        except PlanChangedError as error:
            _log.warning("%s: encoded in memory, as stock's FileSystemWriter does: %s", self.path, error)
        return super()._sources(resources, plan, planner, transforms or writer_transforms(()))


class _Stager(AsyncStager):
    """Stager on shared memory. If that cannot hold a copy of the state, stock's stager copies it."""

    def __init__(self, make_stock: Callable[[], Any], config: EngineConfig) -> None:
        super().__init__(config)
        self._make_stock = make_stock
        self._instead: Any = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._running() as resources:
                return stage_copy(resources, state_dict)
        except Exception as error:  # noqa: BLE001 - nothing was written yet, so stock can begin anew
            _log.warning("stock's stager copies the state, beyond budget_bytes: %s", error)
        self._instead = self._instead or self._make_stock()
        copied: dict[str, Any] = self._instead.stage(state_dict)
        return copied

    def close(self) -> None:
        super().close()
        if self._instead is not None:
            self._instead.close()


class _Executor:
    """Executor of ``dcp.async_save`` that passes a writer on.

    The writer is made in the caller's thread, so that an ``uninstall()`` before the save begins does not change which
    class saves. It reaches the process of ``AsyncCheckpointerType.PROCESS``, which imports torch anew.
    """

    def __init__(self, stock: Any, make_writer: Callable[..., Any] | None) -> None:
        self._stock = stock
        self._make_writer = make_writer

    def execute_save(self, *args: Any, **given: Any) -> Any:
        """Do stock's ``execute_save``, with a writer if the caller gave none but a path. A failure is logged."""
        path, make = given.get("checkpoint_id"), self._make_writer
        if make is None or given.get("storage_writer", self) is not None or not path or not _is_ours(path):
            return self._stock.execute_save(*args, **given)
        given["storage_writer"] = writer = make(path)
        given["checkpoint_id"] = writer.path  # the working directory may change before the save begins
        save = self._stock.execute_save(*args, **given)
        save.add_done_callback(functools.partial(_log_failure, writer.path))
        return save


def _log_failure(path: Path, save: Future[Any]) -> None:
    """Log why a save of ``dcp.async_save`` failed: nobody may ask its future."""
    error = None if save.cancelled() else save.exception()
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    if error is not None:
        _log.error("the save into %s failed: %s: %s", path, type(error).__name__, error)
