"""The ground of a campaign: one root, an engine over a fault store, and how to tell that nothing was lost or kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.commit.in_place import PENDING
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.checkpoint_files import save_of_file, save_of_metadata
from aio_ckpt.format.root_names import ENGINE_DIR, LOCK_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.plan import chunks
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from aio_ckpt.ticket import SaveTicket
from tests.campaigns.faults.store import FaultStorage
from tests.support.saved_files import DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST, without_save_id

__all__ = ["WAIT_SECS", "Ground", "Outcome", "is_state", "small_chunks", "state_of"]

WAIT_SECS = 60.0
"""Deadline of every wait; none is reached unless something hangs, which the campaign must report."""
CHUNK_BYTES = 64 << 10
_STOP_SECS = 20.0
"""In the place of their names: a replacement in doubt leaves the files of both saves."""
_WHOLE = {".metadata", DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST}


def state_of(value: int) -> dict[str, Any]:
    """A state of three chunks (see :func:`small_chunks`) that differs in every leaf from that of another value."""
    return {
        "large": torch.full((36_000,), float(value)),
        "small": [torch.arange(100) * value, torch.full((7, 3), value, dtype=torch.bfloat16)],
        "lr": value / 7,
        "names": [f"name {value}", {"step": value}],
    }


def is_state(found: object, value: int) -> bool:
    """Whether ``found`` is :func:`state_of` ``value``, bit for bit."""
    want = state_of(value)
    if not isinstance(found, dict) or found.keys() != want.keys():
        return False
    pairs = [(found["large"], want["large"]), *zip(found["small"], want["small"], strict=True)]
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return same and found["lr"] == want["lr"] and found["names"] == want["names"]


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks of 64 KiB instead of 4 MiB and more, so that a tiny state has several."""
    with mock.patch.object(chunks, "chunk_bytes_for", return_value=CHUNK_BYTES):
        yield


def _wait_idle(executor: Executor) -> None:
    """Until each thread of ``executor`` has taken up work that was queued after all other.

    Not by ``submit``, which a campaign replaces.
    """
    if executor._is_closed:
        executor.close(WAIT_SECS)
        return
    together = threading.Barrier(len(executor._threads))
    met: list[Future[int]] = [Future() for _ in executor._threads]
    for thread in met:
        executor._queue.put((thread, together.wait))
    for thread in met:
        thread.result(WAIT_SECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one save ended."""

    step: int
    """Its step."""
    value: int
    """Of its state."""
    error: BaseException | None
    """None: it succeeded."""
    was_refused: bool
    """Whether ``save()`` itself raised."""
    report: SaveReport | None
    """Of a success."""


class Ground:
    """A root, its engine and what must be found there.

    ``committed`` holds the value of each step that must load; ``baseline`` what the process held when the engine was
    new. Every check returns what is wrong, as sentences.
    """

    def __init__(self, root: Path, **config: Any) -> None:
        self.root = root
        self.config = EngineConfig(**{"workers": 2, **config})
        self.committed: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._names = StepNames(self.config.step_dir)
        self._value = 0
        self.executor = Executor("faults", 3)
        self.storage = FaultStorage(Storage(self.executor))
        self._reader = CheckpointEngine(root, EngineConfig(workers=1))
        self.engine = CheckpointEngine(root, self.config, storage=self.storage)
        self.baseline = self._held()

    def close(self) -> None:
        """End the engine and its threads."""
        self.storage.disarm()
        self.engine.terminate()
        self._reader.close_blocking()
        self.executor.close(_STOP_SECS)

    def reopen(self) -> None:
        """A new engine on the same root."""
        self.engine.terminate()
        self.executor.close(_STOP_SECS)
        self.executor = Executor("faults", 3)
        self.storage = FaultStorage(Storage(self.executor))
        self.engine = CheckpointEngine(self.root, self.config, storage=self.storage)
        self.baseline = self._held()

    # -- what is done ---------------------------------------------------------------------------------

    def begin(
        self, *, overwrite: bool = False, profile: Callable[..., object] | None = None
    ) -> Outcome | tuple[SaveTicket, int, int]:
        """Call ``save()`` with a state of its own: its ticket, step and value, or the outcome if it raised."""
        self._value += 1
        newest = max(self.committed, default=0)
        step = newest if overwrite else newest + 1
        state = state_of(self._value)
        try:
            sys.setprofile(profile)
            try:
                ticket = self.engine.save(state, step=step, overwrite=overwrite)
            finally:
                sys.setprofile(None)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - an outcome to judge
            return Outcome(step=step, value=self._value, error=error, was_refused=True, report=None)
        return ticket, step, self._value

    def save(self, *, settles: bool = True, **options: Any) -> Outcome:
        """A whole save; until the threads have let go of it unless not ``settles``."""
        begun = self.begin(**options)
        if isinstance(begun, Outcome):
            if settles:
                self.settle()
            return begun
        ticket, step, value = begun
        error = ticket.exception(WAIT_SECS)
        if settles:
            self.settle()
        report = None if error is not None else ticket.result()
        return Outcome(step=step, value=value, error=error, was_refused=False, report=report)

    def settle(self) -> None:
        """Until no thread works for the engine and no retention pass runs."""
        for deletion in self.engine._root_session.passes:
            deletion.exception(WAIT_SECS)
        for executor in (self.executor, self.engine._portal.executor):
            _wait_idle(executor)

    def shows(self, outcome: Outcome) -> bool:
        """Whether the step holds what that save was to store."""
        return self._path(outcome.step).exists() and is_state(self.read(outcome.step), outcome.value)

    def keep(self, outcome: Outcome) -> None:
        """It succeeded: from now on it must load."""
        self.committed[outcome.step] = outcome.value
        self._digests[outcome.step] = _digest(self._path(outcome.step))
        last = self.config.keep_last
        if last is not None:
            for step in sorted(self.committed)[:-last]:
                if not self._path(step).exists():
                    del self.committed[step], self._digests[step]

    def forget(self, step: int) -> None:
        """It was set aside: it is not listed any more."""
        del self.committed[step], self._digests[step]

    # -- what must be found ---------------------------------------------------------------------------

    def look(self, *, leftovers: tuple[str, ...] = (), other_saves: bool = False) -> list[str]:
        """All that is wrong on the disk and in the process.

        Args:
            leftovers: beginnings of names under the root that may be there.
            other_saves: whether files of other saves may be in a checkpoint.
        """
        return [*self._look_at_disk(leftovers, other_saves=other_saves), *self._look_at_process()]

    def _look_at_disk(self, leftovers: tuple[str, ...], *, other_saves: bool) -> Iterator[str]:
        # The call that makes the root may be the one that fails.
        here = set(os.listdir(self.root) if self.root.exists() else ()) - {ENGINE_DIR}
        own = self.root / ENGINE_DIR
        here |= {f"{path.parent.name}/{path.name}" for path in own.glob("*/*")}
        wanted = {self._names.name(step) for step in self.committed}
        for name in sorted(here - wanted):
            if not name.startswith(leftovers or ("/",)):
                yield f"left behind: {name}"
        for engine in (self.engine, self._reader):
            if engine.steps().result() != sorted(self.committed):
                yield f"listed are {engine.steps().result()}, committed {sorted(self.committed)}"
        newest = max(self.committed, default=0)
        for step, value in self.committed.items():
            path = self._path(step)
            if not path.is_dir():
                yield f"lost: step {step}"
                continue
            names = os.listdir(path)
            committed = _committed_in(path)
            others = {name for name in names if _is_of_other(name, committed)}
            odd = set(map(without_save_id, {*names} - others)) ^ _WHOLE
            odd |= set() if other_saves else others
            if odd:
                yield f"step {step} holds or lacks {sorted(odd)}"
            if _digest(path) != self._digests[step]:
                yield f"step {step} changed"
            if step >= newest - 1 and not is_state(self.read(step), value):
                yield f"step {step} does not load as it was saved"

    def read(self, step: int) -> object:
        """The state of a step, by another engine than the one under test."""
        return self._reader.read(step, only=None).result(WAIT_SECS)

    def _look_at_process(self) -> Iterator[str]:
        held = self._held()
        for name, count in (held - self.baseline).items():
            yield f"leaked: {count} x {name}"
        if self.engine.lifetime.leases:
            yield f"leaked: {self.engine.lifetime.leases} leases"
        if self.engine.lifetime.arenas > 1:
            yield f"{self.engine.lifetime.arenas} arenas"
        if self.engine._queue.pending(WriteJob):
            yield "a save is still pending"

    def _held(self) -> Counter[str]:
        """Descriptors, threads and tasks; the lock comes with the first save, the segment with the arena."""
        held = Counter(f"file {path}" for path in _open_files() if not path.endswith((LOCK_FILE, "(deleted)")))
        held.update(f"thread {thread.name}" for thread in threading.enumerate())
        held["task"] = self.engine._portal.call(_count_tasks, timeout=WAIT_SECS)
        held["segment"] = max(0, _segments() - self.engine.lifetime.arenas)
        return held

    def _path(self, step: int) -> Path:
        return self.root / self._names.name(step)


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            yield os.readlink(f"/proc/self/fd/{number}")


def _segments() -> int:
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


async def _count_tasks() -> int:
    """Count the tasks, without the heartbeat of the claim, which comes with the first save."""
    return sum("Claim.keep" not in repr(task) for task in asyncio.all_tasks())


def _is_of_other(name: str, committed: str | None) -> bool:
    """Whether a file in a checkpoint is of another save than the committed one, or a marker."""
    return save_of_file(name) not in (None, committed) or name.startswith(PENDING)


def _committed_in(path: Path) -> str | None:
    metadata = path / ".metadata"
    return save_of_metadata(metadata.read_bytes()) if metadata.exists() else None


def _digest(path: Path) -> str:
    """Of the files of the committed save."""
    digest, committed = hashlib.blake2b(digest_size=16), _committed_in(path)
    for file in sorted(path.iterdir()):
        if not _is_of_other(file.name, committed):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def explain(error: BaseException | None) -> str:
    """An error in one line."""
    stage = error.stage if isinstance(error, AioCkptError) else ""
    return f"{type(error).__name__}: {error} (stage {stage!r})"
