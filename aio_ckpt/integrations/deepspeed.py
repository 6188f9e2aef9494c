"""Checkpoints of DeepSpeed, written in the background. ``latest`` names a checkpoint once all ranks have written it.

    from aio_ckpt.integrations import deepspeed as aio_deepspeed

    model_engine, optimizer, _, _ = deepspeed.initialize(...)
    aio_deepspeed.install(model_engine)

The files are those of DeepSpeed, so stock DeepSpeed, ``zero_to_fp32.py`` and Universal Checkpoint read them. Each rank
writes its files below ``.aio_ckpt-draft-…``. Once they are durable on all ranks, rank 0 gives them the place of the
tag's directory, and then replaces ``latest``. The end of ``step()`` polls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from aio_ckpt.checks import check_kind, shown
from aio_ckpt.commit.owner import Owner, owner_by_name
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import AioCkptError, ConfigError, CorruptCheckpointError, PeerFailedError, RootError, WriteError
from aio_ckpt.integrations import checkpoint_folder
from aio_ckpt.ranks.agreed_work import WORK_STAGE, AgreedWork, Failure, Work, failure_by
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage, names_in, read_small_file, sync_parents
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

# -- private names of DeepSpeed ---------------------------------------------------------------------

_PACKAGE = "deepspeed.runtime"
_INTERFACE = "CheckpointEngine"
_STOCK = "TorchCheckpointEngine"
"""DeepSpeed's checkpoint engine that saves by ``torch.save``, which it makes if its settings name no other."""
_METHODS: Mapping[str, tuple[str, ...]] = {
    "create": ("info",),
    "save": ("state_dict", "path"),
    "load": ("path", "map_location"),
    "commit": ("info",),
    "makedirs": ("path", "exist_ok"),
    "is_decoupled": (),
    "get_commit_info": (),
    "cleanup": (),
    "preserves_storage_sharing": (),
}
"""Methods of ``CheckpointEngine``, with their parameters."""
_CALLS: Mapping[str, tuple[str, ...]] = {
    "save_checkpoint": ("create", "is_decoupled"),
    "_save_checkpoint": ("checkpoint_engine", "save"),
    "_save_zero_checkpoint": ("checkpoint_engine", "save"),
    "save_16bit_model": ("create", "commit"),
    "load_checkpoint": (),
    "step": ("is_decoupled", "_commit_decoupled_checkpoint"),
    "_commit_decoupled_checkpoint": ("get_commit_info",),
    "destroy": ("is_decoupled", "cleanup"),
    "use_node_local_storage": (),
    "zero_nvme_offload_optimizer": (),
}
"""Methods of ``DeepSpeedEngine``, with names that they use."""
_MAX_FILES = 1000
"""Files of a rank that may be pending."""
_LATEST = "latest"
"""File that names the newest checkpoint."""
_FILES = "_states.pt"
"""End of the names of DeepSpeed's files in the directory of a tag."""


def _found(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name, None)
    except ImportError:
        return None


_Base: Any = _found("checkpoint_engine.checkpoint_engine", _INTERFACE) or object


def moved_names() -> list[str]:
    """Return the private names that this DeepSpeed lacks, or uses in another way; sorted."""
    moved = [f"{_INTERFACE}.{name}" for name, given in _METHODS.items() if _parameters(_Base, name) != given]
    unknown = getattr(_Base, "__abstractmethods__", frozenset[str]()) - _METHODS.keys()
    engine = _found("engine", "DeepSpeedEngine")
    for name, used in _CALLS.items():
        code = getattr(inspect.unwrap(getattr(engine, name, len)), "__code__", None)
        if code is None or not {*used} <= {*_names_in(code)}:
            moved.append(f"DeepSpeedEngine.{name}")
    return sorted([*moved, *(f"{_INTERFACE}.{name}" for name in unknown)])


def _parameters(kind: Any, name: str) -> tuple[str, ...] | None:
    method = getattr(kind, name, None)
    return None if method is None else (*inspect.signature(method).parameters,)[1:]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


# -- one checkpoint -----------------------------------------------------------------------------------

_DRAFTS = ".aio_ckpt-draft-"
"""Begin of the names of the directories beside the tags, in which checkpoints are written. Their names tell the owner.
"""
_REPLACED = "replaced"
"""Directory of a draft that holds what was in the place of the checkpoint. Such a draft is not removed."""
_IN_THE_WAY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


@dataclass(kw_only=True, eq=False)
class _Draft:
    """Checkpoint that is not visible yet."""

    tag: str
    save_dir: Path
    name: str
    """Name of the directory in which it is written, which no other checkpoint has."""
    is_latest: bool
    """Whether ``latest`` is to name it."""
    stale: list[Path]
    """Directories of earlier checkpoints that failed. No rank writes there any more once this one is settled."""
    works: list[Work] = field(default_factory=list)
    """Files of this rank."""
    agreed: AgreedWork | None = None
    """Agreement that all files are durable. None: more files may come."""

    @property
    def drafts_dir(self) -> Path:
        return self.save_dir / self.name

    @property
    def folder(self) -> Path:
        """Directory that stands for that of the tag until the commit."""
        return self.drafts_dir / "tag"

    @property
    def final(self) -> Path:
        return self.save_dir / self.tag

    def place_of(self, path: str) -> Path:
        """Return where the file ``path`` is written."""
        place = Path(os.path.abspath(path))
        return self.folder / place.relative_to(self.final) if place.is_relative_to(self.final) else place

    async def settle(self, executor: Executor, storage: Storage, failure: Failure | None) -> None:
        """On the leader: make the checkpoint visible, or remove what was written of it."""
        error: Exception | None = None
        try:
            if failure is None:
                await self._show(executor, storage)
        except (AioCkptError, OSError) as found:
            error, failure = found, failure_by(found, rank=0)
        if failure is not None:
            await self._log_failure(storage, failure)
            await run_blocking(executor, _remove_if_empty, self.final)
        for path in (*self.stale, self.drafts_dir):
            await run_blocking(executor, _remove_draft, path)
        if error is not None:
            raise error

    async def _show(self, executor: Executor, storage: Storage) -> None:
        is_file_of_tag = await run_blocking(executor, self._check_files)
        if is_file_of_tag:
            await _publish(executor, storage, self.folder, self.final)
        if self.is_latest:
            await _replace_file(storage, self.save_dir / _LATEST, self.drafts_dir, self.tag.encode())
            _log.info("%s is durable, and %s names it", self.final, self.save_dir / _LATEST)

    def _check_files(self) -> bool:
        """Check that the files of this rank are still in the draft, once they are written. Return whether it has any.

        Raises:
            CorruptCheckpointError: another program has removed or changed one.
        """
        found = self.folder.exists()
        for report in (work.result() for work in self.works):
            if isinstance(report, SaveReport) and report.path is not None and report.path.is_relative_to(self.folder):
                nbytes = report.path.stat().st_size if report.path.exists() else None
                if nbytes != report.image_bytes:
                    there = "is missing" if nbytes is None else f"has {nbytes} bytes"
                    raise CorruptCheckpointError(
                        f"{report.path} {there}, {report.image_bytes} bytes were written: another program changes "
                        f"{self.drafts_dir}"
                    )
        return found

    async def _log_failure(self, storage: Storage, failure: Failure) -> None:
        """Log which checkpoint is lost, and which is the newest: the script may end without another call."""
        try:
            latest = await read_small_file(storage, self.save_dir / _LATEST)
        except (AioCkptError, OSError):
            latest = b"(unreadable)"
        names = "there is none" if latest is None else f"it names {latest.decode(errors='replace')!r}"
        text = "the checkpoint %s was not saved: rank %d failed: %s; %s is unchanged: %s"
        _log.error(text, self.final, failure.rank, failure.text, self.save_dir / _LATEST, names)

    def check(self) -> None:
        """Raise the failure of any rank, once the ranks have agreed."""
        assert self.agreed is not None
        # All of them: the next save would raise a failure that nobody took.
        errors = [work.exception() for work in self.works if work.done()]
        failure = self.agreed.failure()
        if failure is None:
            return
        own = next(filter(None, errors), None)
        raise PeerFailedError(
            f"the checkpoint {self.final} was not saved: rank {failure.rank} failed: {failure.text}; "
            f"{self.save_dir / _LATEST} is unchanged",
            rank=failure.rank,
            stage=WORK_STAGE,
            cause=failure.text,
        ) from own or self.agreed.leaders_error


async def _publish(executor: Executor, storage: Storage, draft: Path, final: Path) -> None:
    """Put ``draft`` in the place of ``final``. Files there that are not DeepSpeed's stay.

    If ``final`` is missing or empty, or holds a checkpoint, it changes in one step. If it holds only files of others,
    the files of the draft are moved into it: ``latest`` does not name it yet, and a writer of those files goes on.
    """
    await storage.make_dir(final.parent, parents=True)
    try:
        await storage.replace(draft, final)
    except WriteError as error:
        if error.errno not in _IN_THE_WAY:
            raise
    else:
        await sync_parents(storage, draft, final)
        return
    if any(name.endswith(_FILES) for name in await names_in(storage, final)):
        await _exchange(executor, storage, draft, final)
        return
    for name in await names_in(storage, draft):
        await storage.replace(draft / name, final / name)
    await storage.sync_dir(final)


async def _exchange(executor: Executor, storage: Storage, draft: Path, final: Path) -> None:
    """Exchange a checkpoint for a newer one of the same tag. Files of others are in both before the exchange."""
    await run_blocking(executor, _link_others, final, draft)
    kept = draft.with_name(_REPLACED)
    replaced = draft
    try:
        await storage.exchange(draft, final)
    except RootError:  # this file system cannot: the older checkpoint is hidden for a moment
        replaced = kept
        await storage.rename(final, replaced)
        await storage.rename(draft, final)
    await sync_parents(storage, draft, final)
    try:
        await run_blocking(executor, _link_others, replaced, final)  # what was made in the meantime
    except OSError:
        if replaced != kept:
            await storage.rename(replaced, kept)
        raise
    if replaced == kept:
        await storage.rename(kept, draft)


def _link_others(source: Path, target: Path) -> None:
    """Link files of ``source`` that are not DeepSpeed's into ``target``, durably, if ``target`` has none of that name.

    Raises:
        WriteError: the file system has no hard links, or the disk failed.
    """
    try:
        _link_files(source, target, is_checkpoint=True)
    except OSError as error:
        raise WriteError(
            error.errno,
            f"files of your own in {source} cannot be kept, because a hard link failed ({error.strerror}): "
            "move them elsewhere, or save under another tag",
            str(target),
        ) from error


def _link_files(source: Path, target: Path, *, is_checkpoint: bool = False) -> None:
    for name in os.listdir(source):
        path, place = source / name, target / name
        if is_checkpoint and name.endswith(_FILES):
            continue
        with contextlib.suppress(FileExistsError):
            if path.is_dir() and not path.is_symlink():
                if not place.exists():
                    place.mkdir()
                    shutil.copystat(path, place)
                _link_files(path, place)
            elif os.path.lexists(path):  # its owner may have removed it
                os.link(path, place, follow_symlinks=False)
    checkpoint_folder.sync_path(target)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _remove_draft(path: Path) -> None:
    """Remove a draft, unless it holds what a checkpoint has replaced. A failure is only logged."""
    try:
        if (path / _REPLACED).exists():
            _log.warning("%s stays: it holds what was in the place of a checkpoint when its save ended", path)
        else:
            checkpoint_folder.remove(path)
    except (AioCkptError, OSError) as error:
        _log.warning("%s stays: it could not be removed: %s", path, error)


def _clear_leftovers(save_dir: Path, here: Owner) -> None:
    """Remove the drafts of processes that are proven dead."""
    for path in save_dir.glob(f"{_DRAFTS}*"):
        owner = owner_by_name(path.name, here)
        if owner is not None and owner.is_proven_dead(here):
            _remove_draft(path)
        elif owner is None:
            _log.warning("%s stays: its process was not on this machine; delete it if no job writes there", path)


async def _replace_file(storage: Storage, path: Path, folder: Path, data: bytes) -> None:
    """Replace a file in one step, durably. ``folder`` holds the new one until then."""
    await storage.make_dir(folder, parents=True)
    await storage.write_file(folder / path.name, data)
    await storage.replace(folder / path.name, path)
    await storage.sync_dir(path.parent)


# -- the engine ---------------------------------------------------------------------------------------


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
        self._run = ""
        """Name of this run in the names of its drafts, the same on all ranks."""
        self._drafts = 0
        """Number of checkpoints of the run that were begun."""
        self._stale: list[Path] = []
        """Drafts of checkpoints that were abandoned."""
        self._cleared: set[Path] = set()
        """Directories in which the drafts of dead runs were removed."""
        self._written: _Draft | None = None
        """The checkpoint whose files DeepSpeed gives now."""
        self._pending: _Draft | None = None
        """The checkpoint that is captured and not known to be durable."""

    def wait(self) -> None:
        """Wait until the pending checkpoint is durable on all ranks, and ``latest`` names it.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike. ``latest`` is unchanged.
        """
        self._poll(blocking=True)

    # -- what DeepSpeed calls -------------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Begin a checkpoint, once the one before it is durable."""
        self.abandon()
        self.wait()
        save_dir = Path(os.path.abspath(info.save_dir))
        if self._engine is None:
            self._engine = SyncCheckpointEngine(save_dir / _DRAFTS.rstrip("-"), self.config)  # makes nothing there
            self._run = _of_first_rank(_run_name(self._engine._ctx.owner))
        if save_dir not in self._cleared and _comm.get_rank() == 0:
            _clear_leftovers(save_dir, self._engine._ctx.owner)
        self._cleared.add(save_dir)
        self._drafts += 1
        name = f"{_DRAFTS}{self._run}-{self._drafts}"
        stale, self._stale = self._stale, []
        self._written = _Draft(tag=info.tag, save_dir=save_dir, name=name, is_latest=info.save_latest, stale=stale)

    def save(self, state_dict: Any, path: str) -> None:
        """Capture a file, which is written in the background. A failure is raised on all ranks, at the commit."""
        draft, engine = self._written, self._engine
        if draft is None or engine is None:
            self.stock.save(state_dict, path)
            return
        place = draft.place_of(path)
        try:
            draft.works.append(engine.save_file(state_dict, place).committed)
        except Exception as error:  # noqa: BLE001 - raised here, it would leave the other ranks behind
            if isinstance(error, OSError) or not isinstance(error, AioCkptError):
                draft.works.append(_failed(error))
                return
            _log.warning("the engine cannot save %s, so DeepSpeed writes it now: %s", path, error)
            draft.works.append(_outcome_of(functools.partial(self._save_by_stock, state_dict, place)))

    def _save_by_stock(self, state_dict: Any, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        self.stock.save(state_dict, str(place))
        for path in (place, place.parent, place.parent.parent):
            checkpoint_folder.sync_path(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file as DeepSpeed does."""
        return self.stock.load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Return once the files are durable on all ranks. ``save_16bit_model`` calls this.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike.
        """
        self.seal()
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
                    _remove_draft(path)
            self._stale = []

    def preserves_storage_sharing(self) -> bool:
        """Return True: a file holds the whole memory behind a view, as a file of ``torch.save`` does."""
        return True

    # -- what install() adds --------------------------------------------------------------------------

    def seal(self) -> None:
        """Let the ranks agree on the checkpoint whose files were given; it becomes visible in the background."""
        draft, self._written = self._written, None
        if draft is not None and self._engine is not None:
            settle = functools.partial(draft.settle, self._engine._ctx.executor)
            draft.agreed = self._engine._agree(draft.works, on_leader=settle, what=str(draft.final))
            self._pending = draft

    def abandon(self) -> None:
        """Forget a checkpoint of which DeepSpeed gave only some files, because its save raised an error."""
        draft, self._written = self._written, None
        if draft is None:
            return
        for work in draft.works:
            work.exception()
        self._stale += [*draft.stale, draft.drafts_dir]

    def poll(self) -> None:
        """Raise the failure of the pending checkpoint, at the same call on all ranks. Never blocks on a disk.

        Raises:
            PeerFailedError: a rank failed; on all ranks alike. ``latest`` is unchanged.
        """
        self._poll(blocking=False)

    def _poll(self, *, blocking: bool) -> None:
        draft = self._pending
        if draft is None or draft.agreed is None or not draft.agreed.is_done(blocking=blocking):
            return
        self._pending = None
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
        ``model_engine.checkpoint_engine``: an :class:`AioCheckpointEngine`, or DeepSpeed's own.

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
        return stock
    if type(stock).__name__ != _STOCK:
        raise ConfigError(
            f"model_engine has the checkpoint engine {shown(stock)}: give what deepspeed.initialize returns, for "
            "settings without checkpoint.writer and datastates_ckpt, and with an optimizer"
        )
    ours = AioCheckpointEngine(stock, config)
    model_engine.checkpoint_engine = ours
    model_engine.save_checkpoint = _sealing(model_engine.save_checkpoint, ours)
    model_engine.load_checkpoint = _waiting(model_engine.load_checkpoint, ours)
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


def _sealing(stock: Callable[..., Any], ours: AioCheckpointEngine) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        try:
            saved = stock(*args, **options)
        except BaseException:
            ours.abandon()
            raise
        ours.seal()
        return saved

    return save_checkpoint


def _waiting(stock: Callable[..., Any], ours: AioCheckpointEngine) -> Callable[..., Any]:
    @functools.wraps(stock)
    def load_checkpoint(*args: Any, **options: Any) -> Any:
        ours.wait()
        return stock(*args, **options)

    return load_checkpoint


def _polling(stock: Callable[..., Any], ours: AioCheckpointEngine) -> Callable[..., Any]:
    @functools.wraps(stock)
    def step(*args: Any, **options: Any) -> Any:
        done = stock(*args, **options)
        ours.poll()  # after the step: whoever goes on after a failed save has not lost a step
        return done

    return step


def _run_name(owner: Owner) -> str:
    return f"{owner.session}-{owner.tag}"


def _of_first_rank(text: str) -> str:
    """Return the text of rank 0, on all ranks."""
    texts = [text]
    _comm.broadcast_object_list(texts, src=0)
    return texts[0]


def _failed(error: BaseException) -> Future[None]:
    failed: Future[None] = Future()
    failed.set_exception(error)
    return failed


def _outcome_of(work: Callable[[], None]) -> Future[None]:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised on all ranks, at the commit
        return _failed(error)
    outcome: Future[None] = Future()
    outcome.set_result(None)
    return outcome
