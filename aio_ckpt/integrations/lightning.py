"""Checkpoints of Lightning by this engine: a ``CheckpointIO``, and a strategy for FSDP2.

    from aio_ckpt.integrations.lightning import AioCheckpointIO

    trainer = Trainer(plugins=[AioCheckpointIO()])

A checkpoint is a directory at the path that Lightning gives. One commit makes it visible as a whole. That of the
strategy has Lightning's own layout of sharded checkpoints, so that stock Lightning reads it. For that of the plugin,
``torch.save(AioCheckpointIO().load_checkpoint(path), file)`` makes a file of stock Lightning.

If both ``lightning`` and ``pytorch_lightning`` are installed, import the one that trains before this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aio_ckpt.argument_checks import local_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp import default
from aio_ckpt.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import save_of_root_manifest
from aio_ckpt.integrations.lightning_layout import META, OPTIMIZER, as_bytes, join, moved, split
from aio_ckpt.integrations.patch_points import Expected, moved_names
from aio_ckpt.integrations.path_saves import PathSaves, has_pending_save, wait_for_saves
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.ranks.store_coordinator import default_coordinator
from aio_ckpt.remote_path import RemotePath, find_bucket
from aio_ckpt.standalone import read
from aio_ckpt.storage.object_client import has_obstore
from aio_ckpt.storage.object_store import is_object


def _import_lightning() -> tuple[Any, ...]:
    """Return modules of Fabric and of the Trainer: those that are imported already, if there are two of each."""
    names = [("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")]
    names.sort(key=lambda pair: pair[1] not in sys.modules)
    for fabric, trainer in names:
        try:
            modules = f"{fabric}.plugins", f"{trainer}.strategies", f"{trainer}.callbacks"
            return tuple(map(importlib.import_module, modules))
        except ModuleNotFoundError as missing:
            if missing.name not in (fabric.partition(".")[0], trainer.partition(".")[0]):
                raise
    raise ImportError("aio_ckpt.integrations.lightning needs Lightning: pip install lightning")


_plugins, _strategies, _callbacks = _import_lightning()
_CheckpointIO: Any = _plugins.CheckpointIO
_ModelParallelStrategy: Any = _strategies.ModelParallelStrategy

__all__ = ["AioCheckpointIO", "AioModelParallelStrategy", "load_from_checkpoint"]

# -- private names of Lightning -----------------------------------------------------------------------

KNOWN_VERSIONS = "2.4.0, 2.5.5 and 2.6.6"
"""Versions of Lightning that this module was tested with."""
META_FILE = "meta.pt"
"""Name that ``_METADATA_FILENAME`` of ``lightning.fabric.utilities.load`` has in these versions."""
_IS_SHARDED = "_save_distributed_checkpoint"
"""Attribute of ModelParallelStrategy: whether each rank saves its shards."""
PRIVATE_NAMES: Mapping[str, Expected] = {
    f"{_plugins.__name__.removesuffix('.plugins')}.utilities.load:_METADATA_FILENAME": META_FILE,
    f"{_strategies.__name__}:ModelParallelStrategy.__init__": frozenset({_IS_SHARDED}),
}


# -- what is Lightning's way ----------------------------------------------------------------------------

_ENDS_THE_PROCESS = ("hpc_ckpt_", ".temp.ckpt")
"""Beginnings of file names after whose save Lightning ends the process: SLURM's requeue, and a spawned worker."""

_TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(_CheckpointIO.load_checkpoint).parameters
_WEIGHTS_ONLY = None if _TAKES_WEIGHTS_ONLY else False
"""Lightning's own default. Before 2.6 it ran the code of a checkpoint, and its Trainer could not be told otherwise."""

_log = logging.getLogger("aio_ckpt")


def _place_of(path: str | os.PathLike[str]) -> Path | None:
    """Return the place of a checkpoint on a disk or in an object store; None for one that Lightning alone reaches."""
    return (find_bucket("path", path) if has_obstore() else None) or local_path(path)


def _read(
    path: Path, map_location: Any, weights_only: bool | None, config: EngineConfig | None = None
) -> dict[str, Any]:
    """Return the checkpoint in a directory, verified: of this module, of Lightning's sharded ones, or any other."""
    is_on_disk = not isinstance(path, RemotePath)
    if is_on_disk and path.is_symlink() and not path.exists():
        raise CheckpointNotFoundError(
            f"{path} is a link to {path.readlink()}, which is missing: give another checkpoint"
        )
    entries = read(path, config=config)
    meta = entries.pop(META, None)
    if meta is None and is_on_disk and (path / META_FILE).is_file():
        meta = (path / META_FILE).read_bytes()
    where = "cpu" if map_location is None else map_location
    weights_only = _WEIGHTS_ONLY if weights_only is None else weights_only
    rest = {} if meta is None else torch.load(io.BytesIO(meta), map_location=where, weights_only=weights_only)
    return join(moved(entries, where), rest)


def _remedy(path: str | os.PathLike[str]) -> str:
    return ": pip install 'aio-ckpt[remote]'" if not has_obstore() and find_bucket("path", path) else ""


def _is_file(place: Path) -> bool:
    """Return whether stock Lightning has saved a file or an object there."""
    return is_object(place) if isinstance(place, RemotePath) else place.is_file()


def _waits(checkpoint: Mapping[str, Any], path: Path) -> bool:
    """Return whether a save has to be durable when it returns.

    It has to before Lightning ends the process. It has to if ModelCheckpoint keeps a link to the newest checkpoint:
    a link to a pending one would lead nowhere, and a run that is killed would begin anew.
    """
    callbacks = checkpoint.get("callbacks", {})
    links = [state.get("last_model_path") for state in callbacks.values() if isinstance(state, Mapping)]
    return path.name.startswith(_ENDS_THE_PROCESS) or any(link and os.path.islink(link) for link in links)


@contextlib.contextmanager
def _room_at(path: Path | None) -> Iterator[bool]:
    """Move a file or a link at ``path`` aside, as no directory replaces it. Yields whether one was there.

    ``last.ckpt`` becomes ``last-before.ckpt``, so that ``ckpt_path="last"`` finds it until the commit. It is deleted at
    the end of the block, or comes back if the block fails.
    """
    if path is None or isinstance(path, RemotePath) or not (path.is_symlink() or path.is_file()):
        yield False
        return
    aside = path.rename(path.with_name(f"{path.stem}-before{path.suffix}"))
    try:
        yield True
    except BaseException as error:
        if not path.exists():
            aside.rename(path)
        elif getattr(error, "ticket", None) is not None:  # an earlier save failed, and this one is visible
            aside.unlink()
        raise
    aside.unlink()


def _count_pending_saves(model_checkpoint: Any) -> None:
    """Let ModelCheckpoint, which gives a checkpoint a name that is free, take that of a pending save for taken."""
    stock = model_checkpoint.file_exists

    @functools.wraps(stock)
    def file_exists(self: Any, filepath: str | os.PathLike[str], trainer: Any) -> bool:
        place = _place_of(filepath)
        is_pending = trainer.is_global_zero and place is not None and has_pending_save(place)  # or it is there by now
        return bool(trainer.strategy.broadcast(is_pending)) or bool(stock(self, filepath, trainer))

    model_checkpoint.file_exists = file_exists


_count_pending_saves(_callbacks.ModelCheckpoint)


class _Training:
    """Whether training goes on, as far as saves tell. The error of a save outside of it would come too late."""

    def __init__(self) -> None:
        self._is_over, self._step = False, -1

    def end(self) -> None:
        """Take note of the end of ``fit``."""
        self._is_over, self._step = True, -1

    def is_over(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether ``checkpoint`` is saved behind the end of ``fit``, or is the first one of another ``fit``."""
        step = checkpoint.get("global_step", 0)
        if self._step not in (-1, step):  # steps were made between two saves
            self._is_over = False
        self._step = step
        return self._is_over


class AioCheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """Plugin of Trainer and Fabric that saves in the background and deletes behind the commits.

    ``save_checkpoint`` returns once the checkpoint is captured. The checkpoint is a directory. A failure is raised by
    the next save, or at the end of ``fit``. A save behind it returns once it is durable.

    Args:
        config: settings of the engine. By default two saves may be pending, each with an image in host memory.
        root: directory for pending saves, on the file system of the checkpoints; by default, that of the first one.
    """

    def __init__(self, config: EngineConfig | None = None, *, root: str | os.PathLike[str] | None = None) -> None:
        self._saves = PathSaves(config, root, SoloCoordinator)
        self._stock = _plugins.TorchCheckpointIO()
        self._training = _Training()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Capture ``checkpoint`` and save it at ``path``, in the place of an older one.

        Raises:
            ConfigError: ``storage_options`` were given.
            Exception: as :meth:`CheckpointEngine.save`. An earlier save may have failed; this one is made all the same.
        """
        if storage_options is not None:
            raise ConfigError(
                "storage_options: AioCheckpointIO has none: give AioCheckpointIO(config=EngineConfig(...))"
            )
        place = _place_of(path)
        if place is None:
            _log.warning("%s is on no disk: Lightning itself saves it, without the engine%s", path, _remedy(path))
            self._stock.save_checkpoint(checkpoint, path)
            return
        entries, rest = split(checkpoint)
        is_over = self._training.is_over(checkpoint)
        with self._saves.closing_if(is_over), _room_at(place) as replaces_file:
            waits = is_over or replaces_file or _waits(checkpoint, place)
            self._saves.save({**entries, META: as_bytes(rest)}, place, files={}, waits=waits)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``, verified; a file of Lightning, too. Waits for a pending save of it.

        Args:
            path: directory or file.
            map_location: as for ``torch.load``, of tensors that are read into host memory; None leaves them there.
            weights_only: as for ``torch.load``, of what is no tensor.

        Raises:
            CheckpointNotFoundError, FileNotFoundError: there is none.
            CorruptCheckpointError and others: as :func:`aio_ckpt.read`.
        """
        place = _place_of(path)
        if place is not None:
            self._saves.wait(place)
        if place is not None and not _is_file(place):
            return _read(place, map_location, weights_only, self._saves.config)
        rule = {"weights_only": weights_only} if _TAKES_WEIGHTS_ONLY else {}
        return dict(self._stock.load_checkpoint(path, map_location or "cpu", **rule))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint at ``path`` once the saves that are pending now are durable.

        If one of them fails, the checkpoint stays, and a warning is logged. For a file of Lightning, this waits.
        """
        place = _place_of(path)
        is_remote = isinstance(place, RemotePath)
        if place is None:
            self._stock.remove_checkpoint(path)
        elif is_remote and (self._saves.has_saved(place) or not _is_file(place)):  # in this order: the look takes time
            self._saves.remove(place)
        elif is_remote:
            self._saves.remove_file(place, functools.partial(self._stock.remove_checkpoint, path))
        elif place.is_symlink() or place.is_file():
            self._saves.remove_file(place, place.unlink)
        elif place.exists() or self._saves.is_pending(place):
            self._saves.remove(place)

    def teardown(self) -> None:
        """Finish pending saves and deletions, and free the memory. Raises a failure that was not raised yet."""
        self._training.end()
        self._saves.close()

    def flush(self) -> None:
        """Wait until all pending saves are durable. Raises the first failure."""
        self._saves.flush()


class AioModelParallelStrategy(_ModelParallelStrategy):  # type: ignore[misc]
    """ModelParallelStrategy (FSDP2) whose sharded checkpoints are saved in the background, without a copy to the host.

    All ranks save their shards, and one commit makes the shards and ``meta.pt`` visible. Stock Lightning reads them.
    With ``save_distributed_checkpoint=False``, this is ModelParallelStrategy.

    Args:
        config: settings of the engine, as for :class:`AioCheckpointIO`.
        root: directory for pending saves, as for :class:`AioCheckpointIO`; the same on all ranks.
        options: arguments of ModelParallelStrategy.
    """

    def __init__(
        self, *args: Any, config: EngineConfig | None = None, root: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._saves = PathSaves(config, root, default_coordinator)
        self._training = _Training()
        if names := moved_names(PRIVATE_NAMES):
            _log.warning(
                "Lightning itself saves and loads, without the engine: it lacks %s. Versions known to work: %s",
                ", ".join(names),
                KNOWN_VERSIONS,
            )
        self._is_known = not names

    @property
    def _saves_shards(self) -> bool:
        return self._is_known and bool(getattr(self, _IS_SHARDED))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parameters of this rank as they are on its device."""
        if not self._saves_shards:
            return dict(super().lightning_module_state_dict())
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer of this rank as it is on its device."""
        if not self._saves_shards:
            return dict(super().optimizer_state(optimizer))
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Capture the shards of this rank and save them at the path of rank 0, in the place of an older checkpoint.

        Raises:
            TypeError: ``storage_options`` were given.
            Exception: as :meth:`CheckpointEngine.save`. An earlier save may have failed; this one is made all the same.
        """
        place = local_path(filepath)
        if storage_options is not None or not self._saves_shards or place is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        entries: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            entries[f"{OPTIMIZER}{index}"] = state
        files: dict[str, bytes] = {}
        is_first = self.global_rank == 0
        if is_first:
            files[META_FILE] = entries[META] = as_bytes(checkpoint)
        is_over = self._training.is_over(checkpoint)
        waits = is_over or _waits(checkpoint, place)
        with self._saves.closing_if(is_over), _room_at(place if is_first else None) as replaces_file:
            path, waits = self.broadcast((place, waits or replaces_file))
            self._saves.save(entries, path, files=files, waits=waits)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **options: Any) -> dict[str, Any]:
        """Fill model and optimizers from the checkpoint at the path of rank 0, verified; return the rest of it.

        Raises:
            CorruptCheckpointError: ``meta.pt`` is not what was saved.
            Exception: as ModelParallelStrategy.
        """
        path = self.broadcast(local_path(checkpoint_path))
        if path is None or not self._saves_shards:
            return dict(super().load_checkpoint(checkpoint_path, *args, **options))
        self._saves.wait(path)
        if fault := self.broadcast(_fault_of_meta(path) if self.global_rank == 0 else ""):
            raise CorruptCheckpointError(fault)
        with default():
            return dict(super().load_checkpoint(path, *args, **options))

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete the checkpoint at ``filepath`` once the saves that are pending now are durable, on all ranks."""
        path = local_path(filepath)
        if path is None or not self._saves_shards:
            super().remove_checkpoint(filepath)
            return
        by_lightning = path.is_symlink() or path.is_file() or _is_of_stock(path)
        is_there = path.exists() or self._saves.is_pending(path)
        # A save may be finished on one rank only.
        path, by_lightning, is_there = self.broadcast((path, by_lightning, is_there))
        if by_lightning:
            self._saves.remove_file(path, functools.partial(super().remove_checkpoint, path))
        elif is_there:
            self._saves.remove(path)

    def teardown(self) -> None:
        """Finish pending saves and deletions on all ranks, then do what ModelParallelStrategy does."""
        self._training.end()
        try:
            self._saves.close()
        finally:
            super().teardown()


def _is_of_stock(path: Path) -> bool:
    """Return whether a checkpoint with shards is of Lightning alone, whose own call removes it."""
    return (path / META_FILE).is_file() and not any(map(save_of_root_manifest, os.listdir(path)))


def _fault_of_meta(path: Path) -> str:
    """Return what is wrong with ``meta.pt`` of a checkpoint of this module; '' for any other checkpoint."""
    file = path / META_FILE
    if not file.is_file():
        return ""
    try:
        wanted = read(path, only=[META])[META]
    except KeyError:
        return ""  # Lightning itself saved it
    return "" if file.read_bytes() == wanted else f"{file} is not what was saved: load another checkpoint"


def load_from_checkpoint(
    cls: Any,
    checkpoint_path: str | os.PathLike[str],
    map_location: Any | None = None,
    *,
    weights_only: bool | None = None,
    **options: Any,
) -> Any:
    """Return ``cls.load_from_checkpoint(...)`` of a LightningModule or a LightningDataModule, for a directory, too.

    Waits for a save of the path that is pending in this process. Raises its failure.
    The states of optimizers are not passed to its hooks.

    Args:
        cls: class of the module.
        checkpoint_path: directory of a checkpoint, or a file of Lightning.
        map_location: as for ``torch.load``, of tensors in host memory.
        weights_only: as for ``torch.load``.
        options: other arguments of ``load_from_checkpoint``.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError and others: as :func:`aio_ckpt.read`.
    """
    place = _place_of(checkpoint_path)
    source: str | os.PathLike[str] | io.BytesIO = checkpoint_path
    if place is not None:
        wait_for_saves(place)
    if place is not None and not _is_file(place):
        checkpoint = _read(place, None, weights_only)
        checkpoint.pop("optimizer_states", None)
        source = io.BytesIO(as_bytes(checkpoint))
        del checkpoint
    if weights_only is not None:  # older releases of Lightning do not know it
        options["weights_only"] = weights_only
    return cls.load_from_checkpoint(source, map_location=map_location, **options)
