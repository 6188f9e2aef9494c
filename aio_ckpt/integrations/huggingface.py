"""Checkpoints of transformers' Trainer, written in the background, and visible once they are durable.

    from aio_ckpt.integrations.huggingface import AioTrainerMixin

    class MyTrainer(AioTrainerMixin, Trainer): ...

``checkpoint-N`` has the files that it had before, so stock Trainer and ``from_pretrained`` read it. The model and the
optimizer are captured and written by the engine. The other files are small, and stock writes them. All of them stand
in a draft, ``_aio_ckpt-draft/checkpoint-N``, which one rename makes visible. That happens in the training thread,
between two steps, once the engine has written its files.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.shutdown import log_if_second_to
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, ReadError
from aio_ckpt.integrations import checkpoint_folder
from aio_ckpt.integrations.patch_points import Expected, PatchPoint, moved_names, replaced
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import SaveTicket

KNOWN_TO_WORK = "transformers 5.17.0, 5.23.0 and 5.24.0 with accelerate 1.15.0"

try:
    from accelerate.utils import broadcast_object_list
    from transformers import TrainerCallback, trainer_utils
except ImportError as missing:
    raise ImportError(
        f"aio_ckpt.integrations.huggingface needs transformers and accelerate ({KNOWN_TO_WORK} are known to work): "
        "pip install 'transformers[torch]'"
    ) from missing

__all__ = ["AioTrainerMixin"]

_log = logging.getLogger("aio_ckpt")

# -- private names of transformers ------------------------------------------------------------------

PRIVATE_NAMES: Mapping[str, Expected] = {
    "transformers:Trainer._save_checkpoint": ("model", "trial"),
    "transformers:Trainer._get_output_dir": ("trial",),
    "transformers:Trainer._push_from_checkpoint": ("checkpoint_folder",),
    "transformers:Trainer._finalize_training": ("trial", "num_train_samples", "start_time"),
    "transformers:modeling_utils.safe_save_file": None,  # writes the weights
    "transformers:trainer_utils.rotate_checkpoints": None,  # deletes checkpoints beyond ``save_total_limit``
}
_STATE = "trainer_state.json"
"""File that each checkpoint has."""
_OPTIMIZER = "optimizer.pt"
_WEIGHTS = ("model.safetensors*", "model-*-of-*.safetensors", "pytorch_model*")
_FILES = (*_WEIGHTS, "optimizer.pt", "optimizer.bin", "optimizer_[0-9]", "scheduler.pt", "scaler.pt", "rng_state*.pth")
"""Names of files that transformers writes before :data:`_STATE`, so that a killed save leaves them."""
_PREFIX = trainer_utils.PREFIX_CHECKPOINT_DIR
_SENTINEL = "checkpoint-is-incomplete.txt"
"""File that ``enable_jit_checkpoint`` puts into ``checkpoint-N`` before it saves."""


# -- one checkpoint -----------------------------------------------------------------------------------

_DRAFTS = "_aio_ckpt-draft"
"""Directory of the draft, beside the checkpoints. transformers does not push names with ``_`` to the hub."""


@dataclass(kw_only=True, eq=False)
class _Draft:
    """Checkpoint that is not visible yet."""

    step: int
    run_dir: str
    """Directory of the checkpoints."""
    drafts_dir: str
    """Directory that stands for it while the checkpoint is written."""
    tickets: dict[Path, SaveTicket] = field(default_factory=dict)
    """Files that the engine writes."""
    is_pushed: bool = False
    """Whether the hub gets it."""
    state: Any = None
    """``TrainerState`` at the save; None if the callbacks' ``on_save`` is not due."""
    best: str | None = None
    """Best checkpoint at the save, which rotation keeps."""

    @property
    def folder(self) -> str:
        return os.path.join(self.drafts_dir, f"{_PREFIX}-{self.step}")

    @property
    def final(self) -> str:
        return os.path.join(self.run_dir, f"{_PREFIX}-{self.step}")

    @property
    def is_written(self) -> bool:
        """Whether the engine has written its files, or failed to."""
        return all(ticket.done() for ticket in self.tickets.values())

    def take(self, obj: Any, path: Any, engine: Callable[[], SyncCheckpointEngine], **options: Any) -> bool:
        """Let the engine save ``obj`` at ``path``. False if it belongs to no draft, or if the engine cannot."""
        if not isinstance(path, (str, os.PathLike)) or not Path(path).is_relative_to(self.folder):
            return False
        try:
            self.tickets[Path(path)] = engine().save_file(obj, path, **options)
        except AioCkptError as error:
            _log.warning("the engine cannot save %s, so transformers writes it now: %s", path, error)
            return False
        return True

    def discard(self) -> None:
        """End the save and delete the draft."""
        for ticket in self.tickets.values():
            ticket.cancel()
            ticket.exception()
        _clear_drafts(self.run_dir)


class _BetweenSteps(TrainerCallback):  # type: ignore[misc]
    """Callback that does something before each step, also in a Trainer with a ``training_step`` of its own."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._act()


class AioTrainerMixin:
    """Mixin that lets the engine write the checkpoints of a Trainer. It stands first among the bases.

    One checkpoint is pending at most. The next save waits for its commit, and so does the end of ``train()``. A failed
    save raises its error at the next step.

    If a release of transformers moves what this relies on, a WARNING says so, and transformers saves.
    """

    # Of the Trainer.
    args: Any
    state: Any
    control: Any
    accelerator: Any
    callback_handler: Any
    add_callback: Any
    remove_callback: Any

    aio_config: EngineConfig | None = None
    """Settings of the engine. Set it in the class, or before ``train()``."""
    _aio_engine: SyncCheckpointEngine | None = None
    _aio_draft: _Draft | None = None
    """The checkpoint that is being captured."""
    _aio_pending: _Draft | None = None
    """The checkpoint that is captured and not visible."""
    _aio_is_stock: bool | None = None
    """Whether transformers saves; None: not known yet."""
    _aio_warnings: frozenset[str] = frozenset()
    """What was logged of callbacks and methods that make each save wait."""

    def wait_for_checkpoint(self) -> None:
        """Wait until the pending checkpoint is durable and visible.

        Raises:
            Exception: the save failed. No ``checkpoint-N`` was made, and no older one was deleted.
        """
        pending = self._aio_pending
        if pending is None:
            return
        self.callback_handler.__dict__.pop("on_save", None)
        try:
            sums: dict[Path, int] = {}
            for path, ticket in pending.tickets.items():
                report = ticket.result()
                sums |= {path.with_name(name): crc32 for name, crc32 in (report.crc32s if report else {}).items()}
            # Only now: beside the writes of the engine, each fsync of a small file would take long.
            checkpoint_folder.sync_files(Path(pending.folder), but=frozenset(sums))
            checkpoint_folder.write_checksums(Path(pending.folder), sums)
        except KeyboardInterrupt:
            raise  # it stays pending, and the end of train() waits for it
        except BaseException:
            self._aio_pending = None
            pending.discard()
            raise
        self._aio_pending = None
        self._aio_publish(pending)

    def _aio_publish(self, pending: _Draft) -> None:
        """Make a durable checkpoint visible, delete expired ones, and call ``on_save``."""
        try:
            checkpoint_folder.publish(Path(pending.folder), Path(pending.final), _STATE, _FILES)
        except BaseException:
            pending.discard()
            raise
        with contextlib.suppress(OSError):
            os.rmdir(pending.drafts_dir)
        _log.info("%s is durable", pending.final)
        if pending.is_pushed:
            now, self.state = self.state, pending.state or self.state  # its step is in the commit message
            try:
                self._push_from_checkpoint(pending.final)
            finally:
                self.state = now
        if not _is_announced(Path(pending.final).with_name(f"{_PREFIX}-{self.state.global_step}")):
            trainer_utils.rotate_checkpoints(
                output_dir=pending.run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=pending.best,
                use_mtime=True,
            )
        if pending.state is not None:
            is_due = self.control.should_save  # by now, the next checkpoint may be due, and on_save() resets this
            self.control = self.callback_handler.on_save(self.args, pending.state, self.control)
            self.control.should_save |= is_due

    # -- training -------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as before. If ``resume_from_checkpoint`` is True, go on from the newest checkpoint that verifies.

        Raises:
            CorruptCheckpointError: the checkpoint that was named, or each one, is damaged.
            ValueError: True, and there is no checkpoint.
            Exception: as Trainer; or a save failed.
        """
        if resume_from_checkpoint:
            resume_from_checkpoint = self._aio_verified(resume_from_checkpoint)
        between_steps = _BetweenSteps(self._aio_publish_written)
        self.add_callback(between_steps)
        try:
            result = trainer_of(self).train(resume_from_checkpoint, *args, **kwargs)
            self.wait_for_checkpoint()
        except BaseException as error:
            with log_if_second_to(error):
                self.wait_for_checkpoint()
            raise
        finally:
            self.remove_callback(between_steps)
            self.callback_handler.__dict__.pop("on_save", None)
            pending, self._aio_pending = self._aio_pending, None
            engine, self._aio_engine = self._aio_engine, None
            try:
                if pending is not None:  # Ctrl-C came once more
                    pending.discard()
            finally:
                if engine is not None:
                    engine.close()
        return result

    def _aio_publish_written(self) -> None:
        """Make the pending checkpoint visible if it is durable by now."""
        if self._aio_pending is not None and self._aio_pending.is_written:
            self.wait_for_checkpoint()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Load the best model, and delete checkpoints, once the last one is visible on all ranks."""
        self.wait_for_checkpoint()
        self.accelerator.wait_for_everyone()
        return trainer_of(self)._finalize_training(*args, **kwargs)

    def _aio_verified(self, wanted: str | bool) -> str | bool:
        """Return the checkpoint to go on from. Rank 0 reads it, and all ranks take or refuse it alike."""
        answer: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                if wanted is True:
                    folder = Path(self.args.output_dir)
                    checkpoint_folder.restore_replaced(folder / _DRAFTS, folder)
                    newest = checkpoint_folder.newest_verified(folder, _PREFIX, _STATE)
                    answer[0] = True if newest is None else str(newest)
                else:
                    if os.path.isfile(os.path.join(str(wanted), checkpoint_folder.SUMS_FILE)):
                        checkpoint_folder.check(Path(str(wanted)), _STATE)
                    answer[0] = wanted
            except OSError as error:  # it tells nothing of the checkpoint
                answer[1] = (error.errno, error.strerror, error.filename)
            except AioCkptError as error:
                answer[1] = f"{error}; resume_from_checkpoint=True takes the newest one that verifies"
        broadcast_object_list(answer)
        if isinstance(answer[1], tuple):
            raise ReadError(*answer[1])
        if answer[1] is not None:
            raise CorruptCheckpointError(answer[1])
        return answer[0]  # type: ignore[no-any-return]

    # -- saving ---------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Capture a checkpoint. It becomes visible, and older ones are deleted, once it is durable."""
        if self._aio_saves_by_stock():
            trainer_of(self)._save_checkpoint(model, trial)
            return
        self.wait_for_checkpoint()
        run_dir = self._get_output_dir(trial)
        draft = _Draft(step=self.state.global_step, run_dir=run_dir, drafts_dir=os.path.join(run_dir, _DRAFTS))
        saves = self.args.should_save
        ends_soon = False
        if saves:
            _clear_drafts(run_dir)  # of a run that was killed
            ends_soon = _take_sentinel(Path(draft.final))
        best_step = self.state.best_global_step
        best = os.path.join(run_dir, f"{_PREFIX}-{best_step}")
        if best_step and os.path.exists(best):  # transformers will look for it in the draft alone
            self.state.best_model_checkpoint = best
        self.accelerator.wait_for_everyone()
        self._aio_draft = draft
        try:
            with self._aio_writes(draft):
                trainer_of(self)._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == draft.folder:
                self.state.best_model_checkpoint = draft.final
                if saves:
                    self.state.save_to_json(os.path.join(draft.folder, _STATE))
            self.accelerator.wait_for_everyone()  # now all ranks have written their files
            if self.args.process_index != 0 and self.args.local_process_index == 0:
                checkpoint_folder.sync_files(Path(draft.folder))  # those of this host
            self.accelerator.wait_for_everyone()
        except BaseException:
            if saves:
                draft.discard()
            raise
        finally:
            self._aio_draft = None
        if not saves:
            return
        draft.best = self.state.best_model_checkpoint
        self._aio_pending = draft
        if ends_soon or self._aio_is_overridden("_save_checkpoint") or self._aio_users_on_save():
            self.wait_for_checkpoint()
        else:
            self._aio_defer_on_save(draft)

    def _get_output_dir(self, trial: Any) -> Any:
        """Return the directory of the checkpoints; while one is captured, that of the draft."""
        return trainer_of(self)._get_output_dir(trial) if self._aio_draft is None else self._aio_draft.drafts_dir

    def _push_from_checkpoint(self, checkpoint_folder: Any) -> None:
        """Push a checkpoint to the hub; if it is captured now, once it is visible."""
        if self._aio_draft is None:
            trainer_of(self)._push_from_checkpoint(checkpoint_folder)
        else:
            self._aio_draft.is_pushed = True

    def _aio_saves_by_stock(self) -> bool:
        if self._aio_is_stock is None:
            moved = moved_names(PRIVATE_NAMES)
            self._aio_is_stock = bool(moved)
            if moved:
                _log.warning(
                    "this transformers lacks %s, which AioTrainerMixin relies on (%s are known to work): transformers "
                    "itself saves, without the engine",
                    ", ".join(moved),
                    KNOWN_TO_WORK,
                )
        return self._aio_is_stock

    def _aio_open(self) -> SyncCheckpointEngine:
        if self._aio_engine is None:
            # One checkpoint is pending at most, so that its files need no limit of their own.
            config = self.aio_config or EngineConfig(max_in_flight=1000)
            self._aio_engine = SyncCheckpointEngine(self.args.output_dir, config, coordinator=SoloCoordinator())
        return self._aio_engine

    @contextlib.contextmanager
    def _aio_writes(self, draft: _Draft) -> Iterator[None]:
        """Hand the weights and the optimizer to the engine while transformers writes a checkpoint."""
        stock_weights, stock_save = safetensors.torch.save_file, torch.save
        is_read = self._aio_is_overridden("save_model") or self._aio_is_overridden("_save")

        def save_weights(tensors: Any, filename: Any, metadata: Any = None) -> None:
            # safetensors refuses what shares memory, and transformers could not resume from it.
            storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()]
            # An empty file is a placeholder, which transformers removes. Users' methods may read the file.
            is_taken = bool(tensors) and len(set(storages)) == len(storages) and not is_read
            if not (is_taken and draft.take(tensors, filename, self._aio_open, metadata=metadata)):
                stock_weights(tensors, filename, metadata=metadata)

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            is_ours = not args and not kwargs and os.path.basename(str(f)) == _OPTIMIZER
            if not (is_ours and draft.take(obj, f, self._aio_open)):
                stock_save(obj, f, *args, **kwargs)

        with (
            replaced(PatchPoint(module="transformers.modeling_utils", name="safe_save_file"), save_weights),
            replaced(PatchPoint(module="safetensors.torch", name="save_file"), save_weights),
            replaced(PatchPoint(module="torch", name="save"), save),
        ):
            yield

    def _aio_users_on_save(self) -> bool:
        """Return whether a user's callback has ``on_save``, which may save the model of this very step."""
        for callback in self.callback_handler.callbacks:
            kind = type(callback)
            if kind.on_save is not TrainerCallback.on_save and not kind.__module__.startswith("transformers."):
                self._aio_warn_once(
                    f"{kind.__name__}.on_save may use the model, so that training waits until each checkpoint is "
                    "durable: act in another method of the callback if it needs the files alone"
                )
                return True
        return False

    def _aio_is_overridden(self, name: str) -> bool:
        """Return whether a class above the mixin has a method of this name, which may use the files behind the call."""
        kinds = type(self).__mro__
        is_users = any(name in vars(kind) for kind in kinds[: kinds.index(AioTrainerMixin)])
        if is_users:
            self._aio_warn_once(
                f"{type(self).__name__}.{name} may use the files that it saves, so that training waits for them: move "
                "it to a base below AioTrainerMixin if it does not"
            )
        return is_users

    def _aio_warn_once(self, text: str) -> None:
        if text not in self._aio_warnings:
            self._aio_warnings |= {text}
            _log.warning("%s", text)

    def _aio_defer_on_save(self, draft: _Draft) -> None:
        """Let the callbacks' ``on_save``, which Trainer calls next, wait until the checkpoint is there."""

        def on_save(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.callback_handler.__dict__.pop("on_save", None)
            draft.state = copy.copy(state)
            control.should_save = False
            return control

        self.callback_handler.on_save = on_save


def trainer_of(mixin: AioTrainerMixin) -> Any:
    """Return the methods of the Trainer below the mixin."""
    return super(AioTrainerMixin, mixin)


def _clear_drafts(run_dir: str) -> None:
    """Delete the drafts of a run, once what they may hold of a replaced checkpoint is back in its place."""
    drafts = Path(run_dir, _DRAFTS)
    checkpoint_folder.restore_replaced(drafts, Path(run_dir))
    shutil.rmtree(drafts, ignore_errors=True)


def _is_announced(folder: Path) -> bool:
    """Return whether a checkpoint is not there yet, but its folder is, as a user's file was put into it.

    Rotation would count it as a checkpoint, and delete a whole one for it.
    """
    return folder.is_dir() and not (folder / _STATE).is_file()


def _take_sentinel(final: Path) -> bool:
    """Remove a checkpoint that ``enable_jit_checkpoint`` has only announced. Returns whether there was one.

    The process ends soon then, and a checkpoint that holds nothing must not stay.
    """
    if not (final / _SENTINEL).is_file():
        return False
    (final / _SENTINEL).unlink()
    with contextlib.suppress(OSError):
        final.rmdir()  # an older checkpoint of the same step is not empty, and stays
    return True
