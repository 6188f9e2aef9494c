"""Group loads: all ranks load the same checkpoint. If it is damaged on any rank, all fall back together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import anyio
import msgspec

from aio_ckpt.commit import discovery
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.fallback import ChangedError, Damage, FallbackSearch, Wanted, candidates, too_many_changes
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    PeerFailedError,
    SaveCancelledError,
)
from aio_ckpt.match.match import OnMatched
from aio_ckpt.ranks.coordinator import Coordinator, Exchange
from aio_ckpt.ranks.liveness import HEARTBEATS_A_STALL
from aio_ckpt.reports import SkippedCheckpoint
from aio_ckpt.runtime.futures import first_cause

__all__ = ["GroupUse", "Loaded", "newest_good_for_all", "refuse_for_all"]

_log = logging.getLogger("aio_ckpt")
T = TypeVar("T")


class Loaded(Protocol):
    """A checkpoint that one rank has read and verified."""

    @property
    def identity(self) -> str:
        """Identity of the save, the same on every rank that read it."""
        ...

    async def put_back(self) -> None:
        """Set objects and Stateful values. Called once all ranks have read the checkpoint."""
        ...


L = TypeVar("L", bound=Loaded)
GroupUse: TypeAlias = Callable[[discovery.CommittedCheckpoint, bool, OnMatched], Awaitable[L]]
"""Like :data:`aio_ckpt.engine.fallback.Use`. It awaits the third argument before it fills the template."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank: the result of the last order."""

    kind: Literal["none yet", "matched", "read", "put back", "damaged", "changed"]
    """``none yet``: the first message; ``matched``: the template matches and is not yet touched; ``changed``: a writer
    has deleted or replaced the checkpoint."""
    text: str = ""
    """``matched`` and ``read``: identity of the save; ``damaged`` and ``changed``: text of the error."""
    is_proven: bool = False
    """``damaged``: whether two readings found a mismatch."""
    is_unknown: bool = False
    """``damaged``: whether the format is unknown, because a newer torch or aio_ckpt wrote the checkpoint."""
    asked: tuple[int | None, str, bool] | None = None
    """``none yet``: step, path (empty if none was given) and ``fallback`` of the call."""


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader: what all ranks do next."""

    kind: Literal["load", "fill", "put back", "done", "not found", "damaged", "unknown"]
    """``load``: read this step; ``fill``: fill the templates, which all match; ``put back``: set the objects, as all
    have read the step; ``done``: the load has ended well. The others end the load with an error."""
    step: int = 0
    """``load``: the step to read."""
    text: str = ""
    """Text of the error that ends the load; else empty."""
    blame: _Outcome | None = None
    """Damage that a rank found in the checkpoint before; None if there is none."""
    newest: int | None = None
    """``done``: the newest committed step, without those proven damaged; None if there is none."""
    is_new_look: bool = False
    """Whether the search begins anew, with a new list of checkpoints: damage found before does not count."""

    @property
    def is_last(self) -> bool:
        """Whether this order ends the load."""
        return self.kind not in ("load", "fill", "put back")


_ERRORS: dict[str, type[AioCkptError]] = {
    "not found": CheckpointNotFoundError,
    "damaged": CorruptCheckpointError,
    "unknown": FormatVersionError,
}
"""By kind of the last order, the type of the error that each rank raises."""
_TURN: Exchange[_Outcome, _Order] = Exchange(_Outcome, _Order, stage="load")


async def newest_good_for_all(
    ctx: EngineContext, quarantine: Quarantine, name: str, wanted: Wanted, use: GroupUse[L], *, fallback: bool
) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], L]:
    """Do :func:`aio_ckpt.engine.fallback.newest_good` on all ranks; ``name`` is the same on every rank for this call.

    No template is touched before the templates of all ranks match the same save. Objects are set only once all ranks
    have read it. A rank that leaves tells the others.

    Raises:
        PeerFailedError: another rank could not load for a reason that is no damage, was called with another step, path
            or ``fallback``, or is gone.
    """
    coordinator, stall_secs = ctx.members.coordinator, ctx.config.stall_timeout_secs
    turns = LoadRound(coordinator, name, LoadLeader(ctx, quarantine, wanted, fallback=fallback))
    own = LoadMember(FallbackSearch(ctx=ctx, quarantine=quarantine), use, turns, wanted)
    try:
        order = await turns.tell(_Outcome("none yet", asked=(wanted.step, str(wanted.path or ""), fallback)))
        while not order.is_last:
            own.take_blame(order)
            try:
                outcome = await _while_beating(coordinator, stall_secs, functools.partial(own.follow, order))
            except _OtherOrderError as other:
                order = other.order
            else:
                order = await turns.tell(outcome)
        own.take_blame(order)
        return await own.end(order)
    except BaseException as error:
        await _tell(coordinator, turns.unheard, error, stall_secs)
        if isinstance(error, Exception):
            own.search.complete(error)
        raise
    finally:
        coordinator.end_call(name)  # a rank that still waits for this one learns that it has left


async def refuse_for_all(ctx: EngineContext, name: str, error: BaseException) -> None:
    """Tell the other ranks that this rank takes no part in the load ``name``: it fails on all ranks."""
    await _tell(ctx.members.coordinator, (_topic(name, 1),), error, ctx.config.stall_timeout_secs)


def _topic(name: str, turn: int) -> str:
    return f"{name}, turn {turn}"


class _OtherOrderError(Exception):
    """The leader's next order tells this rank not to end the reading that it has begun."""

    def __init__(self, order: _Order) -> None:
        super().__init__(order.kind)
        self.order = order


class LoadRound:
    """Exchanges of one load. In each, every rank sends its outcome and the leader replies with the next order."""

    def __init__(self, coordinator: Coordinator, name: str, leading: LoadLeader) -> None:
        self._coordinator = coordinator
        self._name = name
        self._leading = leading
        self._turn = 1
        self.unheard = [_topic(name, 1), _topic(name, 2)]
        """Topics in which the other ranks may wait for this one. If this rank fails, it aborts them."""

    async def tell(self, outcome: _Outcome) -> _Order:
        """Send this rank's outcome and return the next order."""
        topic, following = _topic(self._name, self._turn), _topic(self._name, self._turn + 1)
        self.unheard = [topic, following]
        order = await _TURN.run(self._coordinator, topic, outcome, self._leading.decide)
        self._turn += 1
        self.unheard = [] if order.is_last else [following]
        return order


class LoadMember(Generic[L]):
    """This rank's part of a load: it follows the orders of the leader."""

    def __init__(self, search: FallbackSearch, use: GroupUse[L], turns: LoadRound, wanted: Wanted) -> None:
        self.search = search
        self._wanted = wanted
        self._newest_before = search.ctx.members.newest
        self._use = use
        self._turns = turns
        self._outcome = _Outcome("none yet")
        self._candidate: discovery.CommittedCheckpoint | None = None
        self._loaded: L | None = None
        self._error: CorruptCheckpointError | FormatVersionError | None = None

    async def follow(self, order: _Order) -> _Outcome:
        """Read the ordered step, or set the objects that were read.

        Raises:
            _OtherOrderError: the templates of the ranks do not all match the same save.
        """
        self._error = None
        try:
            self._outcome = await self._put_back() if order.kind == "put back" else await self._read(order.step)
        except (CorruptCheckpointError, FormatVersionError) as error:
            if order.kind == "put back":
                raise
            self._error = error
            is_unknown = isinstance(error, FormatVersionError)
            self._outcome = _Outcome("damaged", str(error), self.search.damaged[-1].is_proven, is_unknown)
        except ChangedError as error:
            self._outcome = _Outcome("changed", str(error))
        return self._outcome

    async def _read(self, step: int) -> _Outcome:
        self._candidate = self._loaded = None
        self._outcome = _Outcome("none yet")
        try:
            ordered = Wanted(step=step) if self._wanted.path is None else self._wanted
            self._candidate = (await candidates(self.search.ctx, ordered))[0]
        except CheckpointNotFoundError as error:  # retention has deleted it meanwhile
            raise ChangedError(str(error)) from error
        self._loaded = await self.search.use(
            self._candidate, lambda candidate, again: self._use(candidate, again, self._matched)
        )
        self.search.is_modified = True
        return _Outcome("read", self._loaded.identity)

    async def _matched(self, identity: str) -> None:
        """Return once all ranks may fill their templates. In the second reading of a checkpoint they may already."""
        if self._outcome.kind == "matched":
            return
        self._outcome = _Outcome("matched", identity)
        order = await self._turns.tell(self._outcome)
        if order.kind != "fill":
            raise _OtherOrderError(order)

    async def _put_back(self) -> _Outcome:
        assert self._loaded is not None, "the leader knows that this rank has read it"
        await self._loaded.put_back()
        return _Outcome("put back")

    def take_blame(self, order: _Order) -> None:
        """Note the damage that another rank found: the checkpoint is damaged for this rank, too."""
        if order.is_new_look:
            self.search.damaged.clear()
        elif order.blame is not None and self._outcome.kind != "damaged" and self._candidate is not None:
            kind = FormatVersionError if order.blame.is_unknown else CorruptCheckpointError
            error = kind(order.blame.text)
            found = Damage(checkpoint=self._candidate, error=error, is_proven=order.blame.is_proven)
            self.search.damaged.append(found)

    async def end(self, order: _Order) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], L]:
        """Return the loaded checkpoint; raise the error if none was loaded."""
        if order.kind == "done" and self._candidate is not None and self._loaded is not None:
            self._learn_newest(order)
            return self._candidate, await self.search.settle(), self._loaded
        raise _ERRORS[order.kind](order.text) from self._error

    def _learn_newest(self, order: _Order) -> None:
        """Take over the newest step that the leader found, or that of a save committed meanwhile if it is newer."""
        members = self.search.ctx.members
        beside = members.newest if members.newest != self._newest_before else None
        members.newest = max((step for step in (order.newest, beside) if step is not None), default=None)


class LoadLeader:
    """The leader's part of a load: it chooses the next checkpoint."""

    def __init__(self, ctx: EngineContext, quarantine: Quarantine, wanted: Wanted, *, fallback: bool) -> None:
        self._ctx = ctx
        self._quarantine = quarantine
        self._wanted = wanted
        self._falls_back = fallback and wanted.is_newest
        self._left: list[int] = []
        self._tried = 0
        self._looks = 0
        self._found: list[str] = []
        self._proven: set[int] = set()
        self._all_unknown = True
        """Whether all candidates so far have an unknown format, and none is damaged."""

    async def decide(self, outcomes: Sequence[_Outcome]) -> _Order:
        """Return the next order, from the outcomes of all ranks."""
        kinds = {outcome.kind for outcome in outcomes}
        if kinds == {"none yet"}:
            _check_asked(outcomes)
        if kinds in ({"matched"}, {"read"}) and len({outcome.text for outcome in outcomes}) == 1:
            return _Order("fill" if kinds == {"matched"} else "put back")
        if kinds == {"put back"}:
            return _Order("done", newest=await self._newest())
        if "damaged" not in kinds or "changed" in kinds:  # or matched or read, but not the same save on all ranks
            return await self._look()
        rank, bad = next((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.kind == "damaged")
        blame = _Outcome("damaged", f"rank {rank}: {bad.text}", bad.is_proven, bad.is_unknown)
        self._all_unknown = self._all_unknown and bad.is_unknown
        self._found.append(f"{self._wanted.path or f'step {self._tried}'}: {blame.text}")
        if blame.is_proven:
            self._proven.add(self._tried)
        if not self._falls_back:
            text = f"{self._found[-1]}, under {self._ctx.root}"
            return _Order("unknown" if bad.is_unknown else "damaged", text=text, blame=blame)
        if not self._left:
            each = "; ".join(self._found)
            text = f"no checkpoint under {self._ctx.root} verifies, and nothing was moved: {each}"
            return _Order("unknown" if self._all_unknown else "damaged", text=text, blame=blame)
        return self._next(_Order("load", blame=blame))

    async def _newest(self) -> int | None:
        """Return the newest committed step, without those proven damaged.

        If the root cannot be read, return the last known one.
        """
        ctx = self._ctx
        try:
            committed = await self._quarantine.committed(ctx.storage, ctx.root, ctx.names)
        except AioCkptError as error:  # the load itself has succeeded
            _log.warning("%s could not be looked at behind a load: %s", ctx.root, error)
            return None if ctx.members.newest in self._proven else ctx.members.newest
        return max({checkpoint.step for checkpoint in committed} - self._proven, default=None)

    async def _look(self) -> _Order:
        self._looks += 1
        if self._looks > discovery.MAX_RETRIES:
            return _Order("not found", text=str(too_many_changes(self._ctx.root)))
        try:
            found = await candidates(self._ctx, self._wanted)
        except CheckpointNotFoundError as error:
            return _Order("not found", text=str(error))
        self._found.clear()
        self._proven.clear()
        self._all_unknown = True
        self._left = [checkpoint.step for checkpoint in found]
        return self._next(_Order("load", is_new_look=True))

    def _next(self, order: _Order) -> _Order:
        self._tried = self._left.pop(0)
        return msgspec.structs.replace(order, step=self._tried)


def _check_asked(outcomes: Sequence[_Outcome]) -> None:
    first, *others = (outcome.asked for outcome in outcomes)
    for rank, asked in enumerate(others, 1):
        if asked != first:
            raise PeerFailedError(
                f"rank {rank} loads {_called(asked)} where rank 0 loads {_called(first)}: every rank has to call "
                "load() as often as the others, with the same step, path and fallback",
                rank=rank,
                stage="load",
            )


def _called(asked: tuple[int | None, str, bool] | None) -> str:
    step, path, falls_back = asked or (None, "", True)
    which = path or ("the newest checkpoint" if step is None else f"step {step}")
    return which if falls_back else f"{which} with fallback=False"


async def _while_beating(coordinator: Coordinator, stall_secs: float, work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``work``; meanwhile send heartbeats to the other ranks."""

    async def beat() -> None:
        while True:
            await anyio.sleep(stall_secs / HEARTBEATS_A_STALL)
            await coordinator.beat()

    result: list[T] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            result.append(await work())
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    return result[0]


async def _tell(coordinator: Coordinator, topics: Sequence[str], error: BaseException, stall_secs: float) -> None:
    """Abort the topics in which the other ranks wait: the second of ``topics`` if the first has a reply already."""
    cause = error if isinstance(error, Exception) else SaveCancelledError("the load was given up")
    is_leader = coordinator.rank == coordinator.leader
    with anyio.CancelScope(shield=True):
        try:
            for topic in topics:
                if await coordinator.failure(topic) is not None:
                    return  # all ranks learn of it by this topic
                # The failure is sent at once. The second topic is needed only if no answer comes in time.
                with anyio.move_on_after(stall_secs / HEARTBEATS_A_STALL):
                    is_heard = await coordinator.abort(topic, cause, stage="load")
                    if is_heard and not is_leader:  # some ranks may have the leader's earlier reply
                        return
        except AioCkptError as untold:  # the other ranks fail by their deadlines
            error.add_note(f"the other ranks could not be told: {untold}")
