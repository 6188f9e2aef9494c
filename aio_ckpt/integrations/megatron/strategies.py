"""Save and load strategies for ``megatron.core.dist_checkpointing``."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt.argument_checks import check_kind
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.reader import Reader
from aio_ckpt.dcp.writer import Writer
from aio_ckpt.errors import ConfigError
from aio_ckpt.integrations.async_calls import CommitWait, SaverResources
from aio_ckpt.integrations.megatron.names import TRIED_CORE, core
from aio_ckpt.integrations.patch_points import missing, replaced

_SaveBase: Any = core.save_strategy.value or object
_LoadBase: Any = core.load_strategy.value or object
_Planner: Any = core.save_planner.value or object

Path = str | os.PathLike[str]


class SaveStrategy(_SaveBase):  # type: ignore[misc]
    """Strategy for ``dist_checkpointing.save`` that writes by :class:`aio_ckpt.dcp.Writer`.

    ``async_save`` copies the tensors to host memory, and a thread of this process saves them. The request that it
    returns has no ``async_fn``. Its first finalize function waits for the commit. With :class:`AsyncCallsQueue`, the
    poll that finalizes does not wait; with a queue of Megatron or NVRx, it does.

    Args:
        backend, version: as in Megatron.
        config: settings of the writer and the stager.
        shared: resources to share with other strategies and a queue.
        options: arguments of ``TorchDistSaveShardedStrategy``. Only ``keep_only_main_replica`` has an effect.

    Raises:
        ConfigError: this Megatron lacks a name that the strategy needs.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *args: Any,
        config: EngineConfig | None = None,
        shared: SaverResources | None = None,
        **options: Any,
    ) -> None:
        _check_core()
        check_kind("config", config, EngineConfig)
        super().__init__(backend, version, *args, **options)
        self._shared = shared or SaverResources(config or EngineConfig())

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Save, and return once the checkpoint is committed.

        Raises:
            CheckpointException: any rank failed; the same on all ranks.
        """
        if not Writer.validate_checkpoint_id(checkpoint_dir):
            super().save(sharded_state_dict, checkpoint_dir)
            return
        self._save(_torch_state(self._by_key(sharded_state_dict)), checkpoint_dir, None)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, *strategy: Any, **named: Any) -> Any:
        """Copy the state and begin to save. Return the request to be scheduled.

        If ``budget_bytes`` cannot hold a copy, this returns once the checkpoint is committed, and logs a warning.
        """
        if not Writer.validate_checkpoint_id(checkpoint_dir):
            return super().async_save(sharded_state_dict, checkpoint_dir, *strategy, **named)
        shared = self._shared
        save = functools.partial(self._save, checkpoint_dir=checkpoint_dir, group=shared.group())
        by_key = self._by_key(sharded_state_dict)
        tensors = [each for values in by_key.values() for each in values if isinstance(each, core.tensor.value)]
        copies = shared.copies([each.data for each in tensors])
        if copies is not None:
            for each, data in zip(tensors, copies, strict=True):
                each.data = data
            saved = shared.submit(functools.partial(save, _torch_state(by_key)))
        else:
            saved = shared.saved_now(functools.partial(save, _torch_state(by_key)), checkpoint_dir)
        return core.request.value(None, (), [CommitWait(saved)])

    def _by_key(self, state: Any) -> dict[str, list[Any]]:
        """Return what this rank saves, by key. The values are copies, so that their ``data`` may be set."""
        found = core.by_key.value(state, self.keep_only_main_replica)[0]
        return {key: [copy.copy(value) for value in values] for key, values in found.items()}

    def _save(self, state: dict[str, Any], checkpoint_dir: Path, group: Any) -> None:
        planner = _SavePlanner(
            state,
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        writer = Writer(checkpoint_dir, config=self._shared.config).share(self._shared.resources)
        dcp_save({}, storage_writer=writer, planner=planner, process_group=group)


class LoadStrategy(_LoadBase):  # type: ignore[misc]
    """Strategy for ``dist_checkpointing.load`` that reads by :class:`aio_ckpt.dcp.Reader`, which verifies.

    ``dist_checkpointing.load`` reads the common state without the strategy; ``install()`` reaches that too.

    Args:
        config: settings of the reader.
        shared: resources to share.
        options: arguments of ``TorchDistLoadShardedStrategy``.

    Raises:
        ConfigError: this Megatron lacks a name that the strategy needs.
    """

    def __init__(
        self, *args: Any, config: EngineConfig | None = None, shared: SaverResources | None = None, **options: Any
    ) -> None:
        _check_core()
        check_kind("config", config, EngineConfig)
        super().__init__(*args, **options)
        self._shared = shared or SaverResources(config or EngineConfig())

    def load(self, *args: Any, **options: Any) -> Any:
        """Load as Megatron does, verified.

        Raises:
            CorruptCheckpointError: bytes are damaged; names file and tensor.
        """
        with self._reading():
            return super().load(*args, **options)

    def load_tensors_metadata(self, *args: Any, **options: Any) -> Any:
        """Read the metadata as Megatron does, by our reader."""
        with self._reading():
            return super().load_tensors_metadata(*args, **options)

    def load_sharded_metadata(self, *args: Any, **options: Any) -> Any:
        """Read the metadata as Megatron does, by our reader."""
        with self._reading():
            return super().load_sharded_metadata(*args, **options)

    def _reading(self) -> AbstractContextManager[None]:
        return replaced(core.reader, functools.partial(our_reader, self._shared, core.reader.value))


def our_reader(
    shared: SaverResources, stock: Callable[..., Any], checkpoint_dir: Path, *args: Any, **options: Any
) -> Any:
    """Return a reader of ours for Megatron's ``_get_filesystem_reader``; what ``stock`` makes for a URL."""
    if not Reader.validate_checkpoint_id(checkpoint_dir):
        return stock(checkpoint_dir, *args, **options)
    return Reader(checkpoint_dir, config=shared.config).share(shared.resources)


class _SavePlanner(_Planner):  # type: ignore[misc]
    """Planner of ``state``, that hides from ``.metadata`` that a tensor was staged in pinned memory.

    DCP gets an empty state: it logs two events for each value of a state, and training waits for the GIL meanwhile.
    """

    def __init__(self, state: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._given = state

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Plan what the strategy has given, in place of the state of DCP."""
        super().set_up_planner(self._given, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.pin_memory = False
        return plan


def _torch_state(by_key: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the state for DCP. Sharded objects are encoded now."""
    state: dict[str, Any] = core.to_torch.value(by_key, False)
    return state


def _check_core() -> None:
    if lacking := missing(core):
        raise ConfigError(
            f"this megatron.core has no {', '.join(map(str, lacking))}: use one of the versions that were tried, "
            f"{', '.join(TRIED_CORE)}, or a newer aio_ckpt"
        )
