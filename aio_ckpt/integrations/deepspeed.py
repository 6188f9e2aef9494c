"""Checkpoints of DeepSpeed, written in the background. ``latest`` names a checkpoint once all ranks have written it.

    from aio_ckpt.integrations import deepspeed as aio_deepspeed

    model_engine, optimizer, _, _ = deepspeed.initialize(...)
    aio_deepspeed.install(model_engine)

The files are those of DeepSpeed, so stock DeepSpeed, ``zero_to_fp32.py`` and Universal Checkpoint read them. Each rank
writes its files below ``.aio_ckpt-draft-…``. Once they are durable on all ranks, rank 0 gives them the place of the
tag's directory, and then replaces ``latest``. The end of ``step()`` polls.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.checkpoint.torch_file import check_torch_file, is_zip
from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.integrations import checkpoint_folder, patch_points
from aio_ckpt.integrations.deepspeed_commit import DRAFTS, Draft, clear_leftovers, remove_draft
from aio_ckpt.integrations.patch_points import Expected
from aio_ckpt.message_texts import shown
from aio_ckpt.runtime.futures import failed, outcome_of
from aio_ckpt.sync import SyncCheckpointEngine

KNOWN_TO_WORK = "deepspeed 0.19.8"

try:
    _comm: Any = importlib.import_module("deepspeed.comm")
except ImportError as missing:
    raise ImportError(
        f"aio_ckpt.integrations.deepspeed needs DeepSpeed ({KNOWN_TO_WORK} is known to work): pip install deepspeed"
    ) from missing

__all__ = ["AioCheckpointEngine", "install", "moved_names"]

_log = logging.getLogger("aio_ckpt")
_Value = TypeVar("_Value")

# -- private names of DeepSpeed ---------------------------------------------------------------------

_STOCK = "TorchCheckpointEngine"
"""DeepSpeed's checkpoint engine that saves by ``torch.save``, which it makes if its settings name no other."""
_INTERFACE = "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PRIVATE_NAMES: Mapping[str, Expected] = {
    f"{_INTERFACE}.create": ("info",),
    f"{_INTERFACE}.save": ("state_dict", "path"),
    f"{_INTERFACE}.load": ("path", "map_location"),
    f"{_INTERFACE}.commit": ("info",),
    f"{_INTERFACE}.makedirs": ("path", "exist_ok"),
    f"{_INTERFACE}.is_decoupled": (),
    f"{_INTERFACE}.get_commit_info": (),
    f"{_INTERFACE}.cleanup": (),
    f"{_INTERFACE}.preserves_storage_sharing": (),
    f"{_ENGINE}.save_checkpoint": frozenset({"create", "is_decoupled"}),
    f"{_ENGINE}._save_checkpoint": frozenset({"checkpoint_engine", "save"}),
    f"{_ENGINE}._save_zero_checkpoint": frozenset({"checkpoint_engine", "save"}),
    f"{_ENGINE}.save_16bit_model": frozenset({"create", "commit"}),
    f"{_ENGINE}.load_checkpoint": frozenset(),
    f"{_ENGINE}.step": frozenset({"is_decoupled", "_commit_decoupled_checkpoint"}),
    f"{_ENGINE}._commit_decoupled_checkpoint": frozenset({"get_commit_info"}),
    f"{_ENGINE}.destroy": frozenset({"is_decoupled", "cleanup"}),
    f"{_ENGINE}.use_node_local_storage": frozenset(),
    f"{_ENGINE}.zero_nvme_offload_optimizer": frozenset(),
}
_MAX_FILES = 1000
"""Files of a rank that may be pending."""

_Base: Any = patch_points.value_of(_INTERFACE) or object


def moved_names() -> list[str]:
    """Return the private names that this DeepSpeed lacks, or uses in another way; sorted."""
    abstract = {f"{_INTERFACE}.{name}" for name in getattr(_Base, "__abstractmethods__", ())}
    return sorted([*patch_points.moved_names(PRIVATE_NAMES), *(abstract - PRIVATE_NAMES.keys())])


# -- the engine ---------------------------------------------------------------------------------------

_WITH_PENDING: list[AioCheckpointEngine] = []
"""Engines of this process with a pending checkpoint, the same on all ranks: a load by a new engine waits for them."""


class AioCheckpointEngine(_Base):  # type: ignore[misc]
    """Checkpoint engine of DeepSpeed. :func:`install` makes it and puts it into place.

    One checkpoint is pending at most. Every method but ``save`` and ``load`` is a call of all ranks.
    """

    def __init__(self, stock: Any, config: EngineConfig | None = None) -> None:
        """``stock``: the checkpoint engine that DeepSpeed made."""
        super().__init__()
        self.name = type(self).__name__
        self.stock = stock
        self.given = config
        # One checkpoint is pending at most, so that its files need no limit of their own.
        config = config or EngineConfig()
        self.config = dataclasses.replace(config, max_in_flight=max(config.max_in_flight, _MAX_FILES))
        self._engine: SyncCheckpointEngine | None = None
        self._owner = Owner.of_this_process()
        self._run = ""
        """Name of this run in the names of its drafts, the same on all ranks."""
        self._drafts = 0
        """Number of checkpoints of the run that were begun."""
        self._stale: list[Path] = []
        """Drafts of checkpoints that were abandoned."""
        self._cleared: set[Path] = set()
        """Directories in which the drafts of dead runs were removed."""
        self._written: Draft | None = None
        """The checkpoint whose files DeepSpeed gives now."""
        self._pending: Draft | None = None
        """The checkpoint that is captured and not known to be durable."""

    def wait(self) -> None:
        """Wait until the pending checkpoint is durable on all ranks, and ``latest`` names it.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike. ``latest`` is unchanged.
        """
        self.poll(blocking=True)

    # -- what DeepSpeed calls -------------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Begin a checkpoint, once the one before it is durable."""
        self.abandon()
        self.wait()
        save_dir = Path(os.path.abspath(info.save_dir))
        if self._engine is None:
            self._engine = SyncCheckpointEngine(save_dir / DRAFTS.rstrip("-"), self.config)  # makes nothing there
            self._run = _of_first_rank(self._owner.label)
        if save_dir not in self._cleared and _comm.get_rank() == 0:
            clear_leftovers(save_dir, self._owner)
        self._cleared.add(save_dir)
        self._drafts += 1
        name = f"{DRAFTS}{self._run}-{self._drafts}"
        stale, self._stale = self._stale, []
        draft = Draft(tag=info.tag, save_dir=save_dir, name=name, is_latest=info.save_latest, stale=stale)
        error = draft.begin() if _comm.get_rank() == 0 else None
        tag, draft.what = _of_first_rank((draft.tag, str(draft.final)))
        draft.refusal = error or draft.why_not_of(tag)
        self._written = draft

    def save(self, state_dict: Any, path: str) -> None:
        """Capture a file, which is written in the background. A failure is raised on all ranks, at the commit."""
        draft, engine = self._written, self._engine
        if draft is None or engine is None:
            self.stock.save(state_dict, path)
            return
        if draft.refusal is not None:
            draft.works.append(failed(draft.refusal))
            return
        place = draft.place_of(path)
        try:
            draft.works.append(engine.save_file(state_dict, place).committed)
        except Exception as error:  # noqa: BLE001 - raised here, it would leave the other ranks behind
            if isinstance(error, OSError) or not isinstance(error, AioCkptError):
                draft.works.append(failed(error))
                return
            _log.warning("the engine cannot save %s, so DeepSpeed writes it now: %s", path, error)
            draft.works.append(outcome_of(functools.partial(self._save_by_stock, state_dict, place)))

    def _save_by_stock(self, state_dict: Any, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        self.stock.save(state_dict, str(place))
        for path in (place, place.parent, place.parent.parent):
            checkpoint_folder.sync_path(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file as DeepSpeed does, once its checksums were compared.

        Raises:
            CorruptCheckpointError: a byte of the file has changed; names the file.
            UnsupportedLeafError: another program has compressed the file.
        """
        if self.config.verify == "load" and is_zip(Path(path)):
            check_torch_file(Path(path))
        return self.stock.load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Return once the files are durable on all ranks. ``save_16bit_model`` calls this.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike.
        """
        self.agree()
        self.wait()
        return True

    def is_decoupled(self) -> bool:
        """Return True: training goes on before the commit, and DeepSpeed leaves ``latest`` to this engine."""
        return True

    def get_commit_info(self) -> None:
        """Return None, which tells DeepSpeed before each optimizer step that there is nothing to commit."""

    def cleanup(self) -> None:
        """Finish the pending checkpoint, and close the engine. The next checkpoint opens it again.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike.
        """
        self.abandon()
        try:
            self.wait()
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            if _comm.get_rank() == 0:
                for path in self._stale:
                    remove_draft(path)
            self._stale = []

    def preserves_storage_sharing(self) -> bool:
        """Return True: a file holds the whole memory behind a view, as a file of ``torch.save`` does."""
        return True

    # -- what install() adds --------------------------------------------------------------------------

    def agree(self) -> None:
        """Let the ranks agree on the checkpoint whose files were given; it becomes visible in the background."""
        draft, self._written = self._written, None
        if draft is not None and self._engine is not None:
            draft.agreed = self._engine.agree(draft.works, on_leader=draft.publish_or_remove, what=draft.what)
            self._pending = draft
            _WITH_PENDING.append(self)

    def abandon(self) -> None:
        """Forget a checkpoint of which DeepSpeed gave only some files, because its save raised an error."""
        draft, self._written = self._written, None
        if draft is None:
            return
        for work in draft.works:
            work.exception()
        self._stale += [*draft.stale, draft.drafts_dir]

    def poll(self, *, blocking: bool = False) -> None:
        """Raise the failure of the pending checkpoint, at the same call on all ranks. Waits for a disk if ``blocking``.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike. ``latest`` is unchanged.
        """
        draft = self._pending
        if draft is None or draft.agreed is None or not draft.agreed.is_done(blocking=blocking):
            return
        self._pending = None
        _WITH_PENDING.remove(self)
        try:
            draft.check()
        except AioCkptError as error:
            if self.config.on_failure == "raise":
                raise
            _log.warning("%s", error)  # rank 0 has logged it as an error


def install(model_engine: Any, config: EngineConfig | None = None) -> Any:
    """Let DeepSpeed save by this package. Call it after ``deepspeed.initialize``, on all ranks.

    ``save_checkpoint`` then returns once the state is captured. ``load_checkpoint`` waits for the pending checkpoint.

    If DeepSpeed has to save by itself, a warning says why, and nothing changes: a release has moved a name that this
    relies on, the optimizer is offloaded to NVMe, or each node has storage of its own.

    Args:
        model_engine: what ``deepspeed.initialize`` returned first.
        config: settings of the engine. ``max_in_flight`` has no effect: one checkpoint is pending at most.

    Returns:
        ``model_engine.checkpoint_engine``: an :class:`AioCheckpointEngine`, or DeepSpeed's own. Both have ``wait()``.

    Raises:
        ConfigError: an argument is wrong; or the settings of DeepSpeed name another checkpoint engine, or there is
            none; or this was called before, with another ``config``.
    """
    check_kind("config", config, EngineConfig)
    stock = getattr(model_engine, "checkpoint_engine", None)
    if isinstance(stock, AioCheckpointEngine):
        if config in (None, stock.given):
            return stock
        raise ConfigError(f"this engine has an AioCheckpointEngine with {shown(stock.given)}: install it once")
    reason = _why_not(model_engine)
    if reason:
        _log.warning("DeepSpeed saves by itself: %s", reason)
        if stock is not None and not hasattr(stock, "wait"):
            stock.wait = lambda: None  # its save returns once the checkpoint is written
        return stock
    if type(stock).__name__ != _STOCK:
        raise ConfigError(
            f"model_engine has the checkpoint engine {shown(stock)}: give what deepspeed.initialize returns, for "
            "settings without checkpoint.writer and datastates_ckpt, and with an optimizer"
        )
    ours = AioCheckpointEngine(stock, config)
    model_engine.checkpoint_engine = ours
    model_engine.save_checkpoint = _agreeing(model_engine.save_checkpoint, ours)
    model_engine.load_checkpoint = _waiting(model_engine.load_checkpoint)
    for name in ("step", "train_batch"):  # a pipeline has the latter, and refuses the former
        if hasattr(model_engine, name):
            setattr(model_engine, name, _polling(getattr(model_engine, name), ours))
    return ours


def _why_not(model_engine: Any) -> str:
    """Return why DeepSpeed has to save by itself; '' if nothing speaks for it."""
    if moved := moved_names():
        return f"it lacks {', '.join(moved)} ({KNOWN_TO_WORK} is known to work), and a newer aio_ckpt may know it"
    if model_engine.zero_nvme_offload_optimizer():
        return "its optimizer is offloaded to NVMe, whose files DeepSpeed copies"
    if model_engine.use_node_local_storage():
        return "each node has storage of its own (checkpoint.use_node_local_storage)"
    return ""


def _agreeing(stock: Callable[..., Any], ours: AioCheckpointEngine) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        try:
            saved = stock(*args, **options)
        except BaseException:
            ours.abandon()
            raise
        ours.agree()
        return saved

    return save_checkpoint


def _waiting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load_checkpoint(*args: Any, **options: Any) -> Any:
        for engine in list(_WITH_PENDING):  # that of the model before, too, if DeepSpeed was initialised anew
            engine.wait()
        return stock(*args, **options)

    return load_checkpoint


def _polling(stock: Callable[..., Any], ours: AioCheckpointEngine) -> Callable[..., Any]:
    @functools.wraps(stock)
    def step(*args: Any, **options: Any) -> Any:
        done = stock(*args, **options)
        ours.poll()  # after the step: whoever goes on after a failed save has not lost a step
        return done

    return step


def _of_first_rank(value: _Value) -> _Value:
    """Return the value of rank 0, on all ranks."""
    values = [value]
    _comm.broadcast_object_list(values, src=0)
    return values[0]
