"""Joint loads: all ranks load the same checkpoint, and walk back together past one that any of them found bad."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import anyio
import msgspec

from aio_ckpt import commit
from aio_ckpt.coordinator import Coordinator
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, CorruptCheckpointError
from aio_ckpt.frames import Verdict
from aio_ckpt.items import SkippedCheckpoint
from aio_ckpt.pending import Site
from aio_ckpt.walk import ChangedError, Damage, Walk, candidates, too_many_changes

__all__ = ["newest_good_for_all"]

T = TypeVar("T")
_BEATS = 4


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of the checkpoint that all were told to load."""

    kind: Literal["none yet", "good", "damaged", "changed"]
    """``changed``: deleted or replaced meanwhile."""
    text: str = ""
    """What is damaged."""
    is_proven: bool = False
    """Whether it is a mismatch that was read twice."""


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells all."""

    kind: Literal["load", "done", "not found", "damaged"]
    """``load``: this step; ``done``: it is loaded; else none can be, and why."""
    step: int = 0
    """Which."""
    text: str = ""
    """For errors."""
    blame: _Outcome | None = None
    """What some rank found wrong with the checkpoint before."""
    newest: int | None = None
    """``done``: the newest committed step, less what was proven damaged."""
    is_new_look: bool = False
    """The root was looked at anew: what was found before counts no more."""


async def newest_good_for_all(
    site: Site, step: int | None, use: Callable[[commit.Committed], Awaitable[T]], *, fallback: bool
) -> tuple[commit.Committed, tuple[SkippedCheckpoint, ...], T]:
    """As :func:`aio_ckpt.walk.newest_good`, for the same call on every rank.

    Raises:
        PeerFailedError: another rank could not load for a reason that is no damage, or is gone.
    """
    coordinator, stall_secs = site.peers.coordinator, site.config.stall_timeout_secs
    leading = _Leading(site, step, fallback=fallback)
    walk, own_error = Walk(site=site), None
    candidate: commit.Committed | None = None
    value: T | None = None
    outcome, topic, turn = _Outcome("none yet"), "", 0
    name = site.peers.next_load()
    while True:
        turn, topic = turn + 1, f"{name}, turn {turn + 1}"
        message = msgspec.msgpack.encode(outcome)
        word = await coordinator.agree(topic, message, leading.decide, stage="load")
        order = msgspec.msgpack.decode(word, type=_Order)
        _take_blame(walk, candidate, outcome, order)
        if order.kind == "done" and candidate is not None:
            site.peers.newest = order.newest
            return candidate, await walk.settle(), value  # type: ignore[return-value]  # it was read
        if order.kind != "load":
            raise own_error or _error(order, walk)
        own_error = None
        try:
            (candidate,) = await candidates(site, order.step)
            value = await _while_beating(coordinator, stall_secs, functools.partial(walk.use, candidate, use))
            outcome = _Outcome("good")
        except CorruptCheckpointError as error:
            own_error = error
            outcome = _Outcome("damaged", str(error), walk.damaged[-1].is_proven)
        except ChangedError as error:
            outcome = _Outcome("changed", str(error))
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await _abandon(coordinator, f"{name}, turn {turn + 1}", error)
            if isinstance(error, AioCkptError):
                error.target_modified = error.target_modified or walk.is_modified
            raise


class _Leading:
    """The leader's side: which checkpoint next."""

    def __init__(self, site: Site, step: int | None, *, fallback: bool) -> None:
        self._site = site
        self._step = step
        self._falls_back = fallback and step is None
        self._left: list[int] = []
        self._tried = 0
        self._looks = 0
        self._found: list[str] = []
        self._proven: set[int] = set()

    async def decide(self, messages: tuple[bytes, ...]) -> Verdict:
        """From what became of the last one on every rank."""
        outcomes = [msgspec.msgpack.decode(message, type=_Outcome) for message in messages]
        return Verdict(common=msgspec.msgpack.encode(await self._order(outcomes)))

    async def _order(self, outcomes: Sequence[_Outcome]) -> _Order:
        kinds = {outcome.kind for outcome in outcomes}
        if kinds == {"good"}:
            site = self._site
            committed = await site.quarantine.committed(site.storage, site.root, site.names)
            steps = {checkpoint.step for checkpoint in committed} - self._proven
            return _Order("done", newest=max(steps, default=None))
        if kinds & {"none yet", "changed"}:
            return await self._look()
        rank, bad = next((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.kind == "damaged")
        blame = _Outcome("damaged", f"rank {rank}: {bad.text}", bad.is_proven)
        self._found.append(blame.text)
        if blame.is_proven:
            self._proven.add(self._tried)
        if not self._falls_back:
            return _Order("damaged", text=blame.text, blame=blame)
        if not self._left:
            each = "; ".join(self._found)
            text = f"no checkpoint under {self._site.root} verifies, and nothing was moved: {each}"
            return _Order("damaged", text=text, blame=blame)
        return self._next(_Order("load", blame=blame))

    async def _look(self) -> _Order:
        self._looks += 1
        if self._looks > commit.MAX_LOOKS:
            return _Order("not found", text=str(too_many_changes(Walk(site=self._site))))
        try:
            found = await candidates(self._site, self._step)
        except CheckpointNotFoundError as error:
            return _Order("not found", text=str(error))
        self._found.clear()
        self._proven.clear()
        self._left = [checkpoint.step for checkpoint in found]
        return self._next(_Order("load", is_new_look=True))

    def _next(self, order: _Order) -> _Order:
        self._tried = self._left.pop(0)
        return msgspec.structs.replace(order, step=self._tried)


def _take_blame(walk: Walk, candidate: commit.Committed | None, outcome: _Outcome, order: _Order) -> None:
    """What another rank found wrong is wrong for this one, too."""
    if order.is_new_look:
        walk.damaged.clear()
    elif order.blame is not None and outcome.kind != "damaged" and candidate is not None:
        error = CorruptCheckpointError(order.blame.text)
        walk.damaged.append(Damage(checkpoint=candidate, error=error, is_proven=order.blame.is_proven))


def _error(order: _Order, walk: Walk) -> AioCkptError:
    kind = CheckpointNotFoundError if order.kind == "not found" else CorruptCheckpointError
    error: AioCkptError = kind(order.text)
    error.target_modified = walk.is_modified
    return error


async def _while_beating(coordinator: Coordinator, stall_secs: float, work: Callable[[], Awaitable[T]]) -> T:
    """What ``work`` gives; meanwhile the other ranks hear that this one reads."""

    async def beat() -> None:
        while True:
            await anyio.sleep(stall_secs / _BEATS)
            await coordinator.beat()

    result: list[T] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            result.append(await work())
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return result[0]


async def _abandon(coordinator: Coordinator, topic: str, error: BaseException) -> None:
    try:
        await coordinator.abandon(topic, error, stage="load")
    except AioCkptError as untold:  # the others learn it by their deadlines
        error.add_note(f"the other ranks could not be told: {untold}")
