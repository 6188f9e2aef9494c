"""torchtitan's checkpoint manager, with the engine in the place of its input and output.

    from aio_ckpt.integrations.torchtitan import AioCheckpointManager

    Trainer.Config(checkpoint=AioCheckpointManager.Config(enable=True, interval=500), ...)

torchtitan decides when it saves, what, and which step it loads. The engine writes, reads and deletes.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from aio_ckpt.argument_checks import check_kind, local_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import ConfigError
from aio_ckpt.integrations.patch_points import Expected, moved_names
from aio_ckpt.ranks.store_coordinator import rank_in_default_group
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import Milestone, SaveTicket

KNOWN_TO_WORK = "torchtitan 0.3.0 and main of 2026-08-21 (b5bcd76)"

try:
    from torchtitan.components.checkpointer import CheckpointManager
except ImportError as missing:
    raise ImportError(
        f"aio_ckpt.integrations.torchtitan needs torchtitan ({KNOWN_TO_WORK} are known to work): pip install torchtitan"
    ) from missing

__all__ = ["AioCheckpointManager"]

_log = logging.getLogger("aio_ckpt")

RNG = "aio_ckpt_rng"
"""Name of the state of each rank's random numbers. Stock torchtitan ignores it."""
_MODEL = "model"
"""torchtitan's name of the model among the states."""
_TRAIN_STATE = "train_state"
"""Its name of the trainer's counters."""
_STEP_DIR = "step-{step}"
"""torchtitan's name of a checkpoint."""

# -- private names of torchtitan --------------------------------------------------------------------

_MANAGER = "torchtitan.components.checkpointer:CheckpointManager"
PRIVATE_NAMES: Mapping[str, Expected] = {
    f"{_MANAGER}.dcp_save": ("state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"),
    f"{_MANAGER}.dcp_load": ("state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    f"{_MANAGER}._load": ("step",),
    f"{_MANAGER}._find_load_step": ("folder",),
    f"{_MANAGER}._maybe_wait_for_staging": (),
    f"{_MANAGER}._wait_for_saving": (),
    f"{_MANAGER}._close": (),
    f"{_MANAGER}.__init__": frozenset({"enable", "folder", "states", "async_mode", "save_future"}),
    f"{_MANAGER}.Config.folder": None,
    f"{_MANAGER}.Config.async_mode": None,
    f"{_MANAGER}.Config.keep_latest_k": None,
}


class AioCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's ``CheckpointManager`` whose checkpoints are durable, verified, and captured without a wait.

    Its files are those of stock, so stock's manager loads them, and this one loads what stock's saved. The random
    numbers of each rank are saved too, as ``aio_ckpt_rng``, and restored if as many ranks load.
    """

    engine: SyncCheckpointEngine
    """Engine of the folder. A manager that is not enabled has none."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Settings of torchtitan, and those of the engine.

        Raises:
            ConfigError: ``engine`` sets what torchtitan decides.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """``disabled``: a save returns once it is durable. The others are the same: it returns once captured."""

        engine: EngineConfig = field(default_factory=EngineConfig)
        """Settings of the engine. ``keep_last`` and ``step_dir`` stay as they are: ``keep_latest_k`` says how many
        steps are kept, and torchtitan names them."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            check_kind("engine", self.engine, EngineConfig)
            for name in ("keep_last", "step_dir"):
                if getattr(self.engine, name) != getattr(EngineConfig(), name):
                    raise ConfigError(f"engine.{name} is torchtitan's to decide: leave it out, and set keep_latest_k")

        def build(self, **given: Any) -> Any:
            """Return the manager; stock's if the engine cannot serve, with a warning in the log."""
            reason = None
            if moved := moved_names(PRIVATE_NAMES):
                reason = f"this torchtitan has changed {', '.join(moved)}; {KNOWN_TO_WORK} are known to work"
            elif None in map(local_path, (given.get("base_folder", ""), self.folder)):
                reason = "the engine writes to local file systems only"
            if reason is None:
                return CheckpointManager.Config.build(self, **given)
            _log.warning("torchtitan's own CheckpointManager saves to %s, without checksums: %s", self.folder, reason)
            return CheckpointManager(copy.copy(self), **given)

    def __init__(self, config: Config, *, optimizers: Any, **given: Any) -> None:
        stock = copy.copy(config)
        stock.async_mode = "disabled"  # else torchtitan opens a process group
        stock.keep_latest_k = 0  # else it starts a thread that deletes; retention is the engine's
        super().__init__(stock, optimizers=optimizers, **given)
        if not self.enable:
            return
        if config.async_mode != "disabled":
            self.async_mode: Any = type(self.async_mode)("async")  # torchtitan makes a stager for the third
        self._ticket: SaveTicket | None = None
        self._asked_step: int | None = None
        """Step that a load asked for. The first save rolls back to it."""
        keep_last = config.keep_latest_k or None
        self.engine = SyncCheckpointEngine(self.folder, replace(config.engine, step_dir=_STEP_DIR, keep_last=keep_last))
        self.states[RNG] = _Rng()
        for optimizer in optimizers:  # not the container, whose own state is empty
            self.engine.guard(optimizer)

    # -- saving -------------------------------------------------------------------------------------

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: str,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | None:
        """Save by the engine. Files of Hugging Face are torchtitan's."""
        step = self._step_of(checkpoint_id)
        if to_hf or step is None:
            found: Future[None] | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return found
        if self._asked_step is not None:  # steps only go up
            self.engine.rollback(self._asked_step)
            self._asked_step = None
        self._clear_way(Path(checkpoint_id), step)
        state = _plain(state_dict)
        rank, _ = rank_in_default_group()
        if rank != 0:
            state.pop(_TRAIN_STATE, None)  # each rank counts its own tokens; of all, rank 0's count is kept
        ticket = self._ticket = self.engine.save(state, step=step, overwrite=True)
        if async_mode == "disabled":
            ticket.result()
            return None
        future: Future[None] = new_future()

        def finish(committed: Milestone[SaveReport | None]) -> None:
            error = committed.peek()
            future.set_result(None) if error is None else future.set_exception(error)

        ticket.committed.add_done_callback(finish)
        return future

    @staticmethod
    def _clear_way(path: Path, step: int) -> None:
        """Move what stock's killed save left in the place of a checkpoint, which the engine never replaces."""
        rank, _ = rank_in_default_group()
        if rank == 0 and path.is_dir() and not (path / ".metadata").exists():
            aside = path.with_name(f"aside-{step}-{time.time_ns()}")  # no name in which stock finds its pattern
            path.rename(aside)
            _log.warning("%s held no checkpoint, and stood where step %d is saved: it is %s now", path, step, aside)

    def _maybe_wait_for_staging(self) -> None:
        """Let the current stream wait for the copies. The host goes on."""
        if self._ticket is not None:
            self._ticket.fence()

    def _wait_for_saving(self) -> None:
        """Wait until the pending save is durable. Its failure is raised once."""
        self.save_future = None
        assert self._ticket is not None
        if self.engine.config.on_failure == "raise":
            self._ticket.result()
        else:
            self._ticket.exception()

    def _close(self) -> None:
        """Finish the pending save, and raise the failure that nobody was told of."""
        try:
            if "engine" in vars(self):  # __del__ closes what __init__ did not finish
                self.engine.close()
        finally:
            super()._close()

    # -- loading ------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        self._asked_step = None if step == -1 else step
        has_loaded: bool = super()._load(step)
        return has_loaded

    def _find_load_step(self, folder: str = "") -> int:
        if folder and folder != self.folder:
            found: int = super()._find_load_step(folder)
            return found
        newest = self.engine.latest_step()
        return -1 if newest is None else newest

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load by the engine: the step that was asked for, or the newest that verifies."""
        if from_hf or local_path(checkpoint_id) is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # Of a Stateful, the engine would ask for the names that this rank saved, which another world size may not have.
        template = _apart(_plain(state_dict))
        if RNG in template:
            template[RNG] = self.states[RNG].template()
        if self._step_of(checkpoint_id) is None:
            self.engine.load(template, path=checkpoint_id)
        else:
            self.engine.load(template, step=self._asked_step)
        for name, value in state_dict.items():
            if isinstance(value, Stateful):
                value.load_state_dict(template[name])
        self.states[_MODEL].load_state_dict(template)

    def _step_of(self, checkpoint_id: str) -> int | None:
        """Return the step of a checkpoint of the folder; None for any other one."""
        path = Path(checkpoint_id)
        found = re.fullmatch(r"step-(\d+)", path.name)
        return int(found[1]) if found and path.parent == Path(self.folder) else None


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``states`` with the state dicts of Stateful values."""
    return {name: each.state_dict() if isinstance(each, Stateful) else each for name, each in states.items()}


def _apart(value: Any) -> Any:
    """Return ``value`` with lists of its own. A load fills them, and a ``load_state_dict`` may empty those first."""
    if type(value) is dict:
        return {key: _apart(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, (list, deque, set)) else value


class _Rng:
    """Random numbers of this process: those of torch on the host and the device, of Python and of numpy.

    The rank stands in the name, as in torchtitan's dataloader. A rank that saved none therefore finds none, without an
    error, which PerRank would raise.
    """

    def template(self) -> dict[str, Any]:
        """Return a template that takes what this rank saved; nothing if there is nothing."""
        rank, _ = rank_in_default_group()
        return {f"rank{rank}": {}}

    def state_dict(self) -> dict[str, Any]:
        rank, world_size = rank_in_default_group()
        state = {
            "world_size": world_size,
            "cpu": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if torch.accelerator.is_available():
            state["device"] = torch.get_device_module().get_rng_state()
        return {f"rank{rank}": state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        rank, world_size = rank_in_default_group()
        state = states[f"rank{rank}"]
        if state.get("world_size") != world_size:
            _log.info("the random numbers of rank %d stay as they are: as many ranks have saved none", rank)
            return
        torch.set_rng_state(state["cpu"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "device" in state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state["device"])
