"""The engine with blocking calls, for a training loop without asyncio.

Editors show the docstring of the method itself, so each docstring stands here in full. A test compares them with those
of :class:`~aio_ckpt.engine.engine.CheckpointEngine`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from aio_ckpt.engine.engine import BaseEngine
from aio_ckpt.engine.shutdown import log_if_second_to
from aio_ckpt.leaves.values import State
from aio_ckpt.match.rename import Rename
from aio_ckpt.reports import LoadReport, OnProgress
from aio_ckpt.restore.options import LoadOptions
from aio_ckpt.runtime.futures import cancellable_result_blocking

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine(BaseEngine):
    """Saves and loads the checkpoints of one root, for a trainer without asyncio. Usable from any thread.

    What is awaited there blocks here until it has ended. ``save`` returns a ticket, and its ``result()`` blocks.
    Otherwise this is :class:`~aio_ckpt.engine.engine.CheckpointEngine`.

    The engine owns one event loop on one thread of its own; saves run there, in the order of the calls, while
    the caller goes on. Invariant: a save is pending from ``save()`` until its ticket is settled. At most
    ``max_in_flight`` saves are pending, and the step of a new save exceeds every committed and pending one. Any call
    may raise EngineClosedError once the engine is closed, and WrongThreadError on the engine's own threads.

    Args:
        root: directory of the checkpoints, or its ``file:`` URL; the first save makes it if it is missing.
        config: settings; the defaults suit a trainer on a local disk.
        coordinator: the ranks that save together; all of torch.distributed's default group if it is initialised. Give
            ``SoloCoordinator()`` for an engine of this process alone.
        storage: file system of the checkpoints; by default the local one.

    Raises:
        RootError: ``root`` is a file, a URL of another kind, or cannot be made.
        ConfigError: a setting does not suit this machine or this number of ranks, or an argument has a wrong type.
            Later, by a call that saves or loads: the engine was opened before the process group of its ranks.
        SystemLimitError: the system gives no thread, or no open file. The engine keeps none.
    """

    def ready(self) -> None:
        """Block until ``save()`` would not have to wait for an earlier save.

        If an earlier save fails meanwhile, this does not raise: the next ``save()`` or ``close()`` does.
        """
        self._wait_ready()

    def load(
        self,
        state: State,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        strict: bool = False,
        allow_missing: bool = False,
        fallback: bool = True,
        skip_untrusted: bool = False,
        skip_mismatched: bool = False,
        cast: bool = False,
        rename: Rename | None = None,
        progress: OnProgress | None = None,
    ) -> LoadReport:
        """Fill ``state`` in place from a checkpoint. After Ctrl-C, this ends once no thread fills ``state`` any more.

        Tensors are filled as they are read, once the templates of all ranks match: after an error with
        ``target_modified`` they may hold anything. Objects and Stateful values are set once everything was verified.

        Pending saves of this engine that may be loaded end first: those of ``step`` or ``path``, or of all steps. If
        one fails, this goes on with what is committed, and the next ``save()`` or ``close()`` raises the failure.

        Args:
            state: the template, with the names, shapes and dtypes of the saved state.
            step: step of the checkpoint; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step.
            strict: refuse names of the checkpoint that the template lacks.
            allow_missing: leave template names that the checkpoint lacks as they are, also keys of modules and other
                Stateful values: these get them from their own ``state_dict()``.
            fallback: with ``step=None``, pass damaged ones by (:mod:`aio_ckpt.commit.quarantine`);
                False raises at the newest.
            skip_untrusted: leave objects that only running code reads as they are, and list them in the report.
            skip_mismatched: leave tensors of another shape as they are, and list them in the report. Those of modules
                and of optimizers that hold state count, too.
            cast: convert tensors of another dtype to that of the template, as far as ``torch.can_cast`` allows.
                Values beyond the range of the template's dtype are not kept; a warning names such tensors.
            rename: what the template calls a stored leaf: a mapping from stored names of leaves or branches, or a
                function from the stored name of each leaf. A renamed leaf takes the place of one of that name.
            progress: function that gets a :class:`Progress` of this rank: at each change of the stage, and at most ten
                times a second between. It runs on a thread of the engine, one call at a time, and calls no engine. The
                load waits for it. If it raises, that is logged once, it is not called again, and the load goes on. In
                the last call the stage is ``done``, with all bytes, or ``failed``. If a damaged checkpoint is read
                again or passed by, the bytes begin anew.

        Raises:
            CheckpointNotFoundError: no committed checkpoint, or not this step.
            CorruptCheckpointError: the checkpoint does not verify; with ``step=None``, none does, and none is moved.
            MissingNameError, UnexpectedNameError, TemplateMismatchError: the template does not match.
            ConfigError, StepOrderError: a bad argument; nothing was touched.
            UnsafeObjectError: only running code reads an object; see ``trusted_objects`` and ``skip_untrusted``.
            UnsupportedLeafError: a leaf of the template that cannot be filled.
            FormatVersionError: a newer version wrote the checkpoint.
            ReadError: the operating system could not read the checkpoint.
            PeerFailedError, StallError: another rank failed, or gave no heartbeat.
            Exception: any error of a ``load_state_dict``. All tensors are filled by then; ``target_modified`` is False
                if there was nothing to fill.
        """
        given_up: Future[None] = Future()
        options = LoadOptions(
            step=step,
            path=path,
            fallback=fallback,
            strict=strict,
            allow_missing=allow_missing,
            skip_untrusted=skip_untrusted,
            skip_mismatched=skip_mismatched,
            cast=cast,
            rename=rename,
            progress=progress,
        )
        return cancellable_result_blocking(self._submit_load(state, options, given_up), given_up)

    def read(
        self,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        only: Collection[str] | None = None,
        skip_untrusted: bool = False,
        with_report: bool = False,
        progress: OnProgress | None = None,
    ) -> Any:
        """Return the nested state of a checkpoint, without a template.

        If as many ranks read as saved, each gets the state that the same rank saved. Otherwise it gets the names of all
        ranks, and of ``PerRank`` values its own. Pending saves of this engine that may be read end first.

        Args:
            step: step of the checkpoint; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step.
            only: names of leaves, or of branches above them.
            skip_untrusted: put an :class:`UntrustedObject` in the place of objects that only running code reads.
            with_report: return a tuple of the state and a :class:`ReadReport`.
            progress: function that gets a :class:`Progress`, as for :meth:`load`; there is no stage ``apply``.

        Raises:
            MissingNameError: a name of ``only`` selects no leaf of this rank; tells which rank has it.
            CheckpointNotFoundError, CorruptCheckpointError and others: as :meth:`load`.
        """
        reading = self._submit_read(
            step, only=only, path=path, skip_untrusted=skip_untrusted, with_report=with_report, progress=progress
        )
        return reading.result()

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, without those that a load of this engine proved damaged.

        Raises:
            StallError: the disk does not answer within ``stall_timeout_secs``.
            ReadError: the root cannot be read.
        """
        return self._root_session.steps()

    def latest_step(self) -> int | None:
        """Return the newest committed step, or None.

        Raises:
            StallError, ReadError: as :meth:`steps`.
        """
        return self._root_session.latest_step()

    def rollback(self, step: int) -> list[int]:
        """Make ``step`` the newest; return the later steps, which move below ``.aio_ckpt/abandoned/`` for good.

        If there are several ranks, every rank calls this, as it calls ``save()``.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            BusyError: saves are pending: await their tickets first.
            RootError: the root is not writable, or another writer holds it.
            WriteError: the disk failed.
            PeerFailedError, StallError: as :meth:`load`.
        """
        return self._frontend.rollback(step)

    def protect(self, step: int) -> None:
        """Never delete ``step``. The protection is durable. Any process may set it, also beside a writer.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed (any more).
            StepOrderError: ``step`` is no valid step.
            WriteError, StallError: the disk failed, or does not answer.
        """
        self._root_session.protect(step)

    def unprotect(self, step: int) -> None:
        """Let ``step`` expire again, from the next commit on. Does nothing if the step is not protected.

        Args:
            step: step of the checkpoint.

        Raises:
            StepOrderError, WriteError, StallError: as :meth:`protect`.
        """
        self._root_session.unprotect(step)

    def protected_steps(self) -> list[int]:
        """Return the protected steps, ascending.

        Raises:
            StallError, ReadError: as :meth:`steps`.
        """
        return self._root_session.protected_steps()

    def delete(self, step: int, *, allow_newest: bool = False) -> None:
        """Delete a committed step. When this returns, its files are deleted, and a power loss does not bring it back.

        The step is renamed to trash first, so that it is whole or gone at any instant. A load of the newest step that
        reads it meanwhile takes another one; a load of this step is told that it is gone. ``protect()`` a step that
        must stay.

        If there are several ranks, every rank calls this, as it calls ``save()``. The leader deletes.

        Args:
            step: step of the checkpoint.
            allow_newest: delete ``step`` even if it is the newest. A later ``save()`` may have its number again.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            ProtectedStepError: ``step`` is protected: ``unprotect()`` it first.
            StepOrderError: ``step`` is the newest committed step, or no valid step.
            BusyError: saves are pending: await their tickets first.
            ConfigError: a bad argument; nothing was touched.
            RootError: the root is not writable, or another writer holds it.
            WriteError: the disk failed. The step is whole, or gone; what is left of it is deleted later.
            PeerFailedError, StallError: as :meth:`load`.
        """
        self._frontend.delete(step, allow_newest=allow_newest)

    def close(self) -> None:
        """Finish pending saves, then release all resources. A second call does nothing.

        ``with`` does this at the end of its block. If Ctrl-C ends the wait, nothing is released: pending saves go on,
        and a later call, or the interpreter's exit, finishes them.

        Raises:
            Exception: the failure of a save that nobody awaited, once, after all resources were released. With
                ``on_failure="log"``, failures are only logged.
        """
        self._close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        with log_if_second_to(error):
            self.close()
        return False
