"""Joint loads: all ranks load the same checkpoint, and fall back together past one that any of them found bad."""

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
from aio_ckpt.ranks.coordinator import Coordinator, Exchange
from aio_ckpt.ranks.liveness import HEARTBEATS_A_STALL
from aio_ckpt.read.match import OnMatched
from aio_ckpt.reports import SkippedCheckpoint
from aio_ckpt.runtime.futures import first_cause

__all__ = ["GroupUse", "Loaded", "newest_good_for_all", "refuse_for_all"]

_log = logging.getLogger("aio_ckpt")
T = TypeVar("T")


class Loaded(Protocol):
    """A checkpoint that one rank has read and proved."""

    @property
    def identity(self) -> str:
        """The same on every rank that read the same save."""
        ...

    async def put_back(self) -> None:
        """Set what is set only when all ranks have read it."""
        ...


L = TypeVar("L", bound=Loaded)
GroupUse: TypeAlias = Callable[[discovery.CommittedCheckpoint, bool, OnMatched], Awaitable[L]]
"""As :data:`aio_ckpt.engine.fallback.Use`; what it reads fits all ranks once the third argument has returned."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has done of what all were told."""

    kind: Literal["none yet", "matched", "read", "put back", "damaged", "changed"]
    """``matched``: all is known that can be before the template is touched; ``changed``: deleted or replaced
    meanwhile."""
    text: str = ""
    """``matched`` and ``read``: the identity of what was; ``damaged``: of what."""
    is_proven: bool = False
    """Whether it is a mismatch that was read twice."""
    is_unknown: bool = False
    """Whether it is no damage: a newer torch or aio_ckpt wrote the checkpoint."""
    asked: tuple[int | None, str, bool] | None = None
    """``none yet``: step, path (empty if none was given) and ``fallback`` of the call."""


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells all."""

    kind: Literal["load", "fill", "put back", "done", "not found", "damaged", "unknown"]
    """``load``: read this step; ``fill``: the templates of all match the same save; ``put back``: all have read it;
    ``done``: all have put it back; else none can be loaded, and why."""
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

    @property
    def is_last(self) -> bool:
        """Whether nothing more is to be told."""
        return self.kind not in ("load", "fill", "put back")


_ERRORS: dict[str, type[AioCkptError]] = {
    "not found": CheckpointNotFoundError,
    "damaged": CorruptCheckpointError,
    "unknown": FormatVersionError,
}
"""What each rank raises, by the kind of the last order."""
_TURN: Exchange[_Outcome, _Order] = Exchange(_Outcome, _Order, stage="load")


async def newest_good_for_all(
    ctx: EngineContext, quarantine: Quarantine, name: str, wanted: Wanted, use: GroupUse[L], *, fallback: bool
) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], L]:
    """As :func:`aio_ckpt.engine.fallback.newest_good`, for the same call on every rank, which all call ``name``.

    No template is touched before those of all match the same save, and what was read is put back only once all have
    read it. A rank that leaves tells the others.

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
        coordinator.end_call(name)  # whoever still waits for this rank hears that it is elsewhere


async def refuse_for_all(ctx: EngineContext, name: str, error: BaseException) -> None:
    """This rank takes no part in the load called ``name``, so that none does."""
    await _tell(ctx.members.coordinator, (_topic(name, 1),), error, ctx.config.stall_timeout_secs)


def _topic(name: str, turn: int) -> str:
    return f"{name}, turn {turn}"


class _OtherOrderError(Exception):
    """What this rank has begun is not to be ended."""

    def __init__(self, order: _Order) -> None:
        super().__init__(order.kind)
        self.order = order


class LoadRound:
    """What the ranks of one load tell each other: turn by turn each its outcome, and the leader what comes next."""

    def __init__(self, coordinator: Coordinator, name: str, leading: LoadLeader) -> None:
        self._coordinator = coordinator
        self._name = name
        self._leading = leading
        self._turn = 1
        self.unheard = [_topic(name, 1), _topic(name, 2)]
        """Topics in which the others may wait for this rank, should it go no further."""

    async def tell(self, outcome: _Outcome) -> _Order:
        """The next order."""
        topic, following = _topic(self._name, self._turn), _topic(self._name, self._turn + 1)
        self.unheard = [topic, following]
        order = await _TURN.run(self._coordinator, topic, outcome, self._leading.decide)
        self._turn += 1
        self.unheard = [] if order.is_last else [following]
        return order


class LoadMember(Generic[L]):
    """This rank's side: it does what all are told."""

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
        """Read what is ordered, or put back what was read.

        Raises:
            _OtherOrderError: the templates of all do not match it.
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
        except CheckpointNotFoundError as error:  # retention was faster
            raise ChangedError(str(error)) from error
        self._loaded = await self.search.use(
            self._candidate, lambda candidate, again: self._use(candidate, again, self._matched)
        )
        self.search.is_modified = True
        return _Outcome("read", self._loaded.identity)

    async def _matched(self, identity: str) -> None:
        """Return once all may fill their templates. By the second reading of a checkpoint all know it."""
        if self._outcome.kind == "matched":
            return
        self._outcome = _Outcome("matched", identity)
        order = await self._turns.tell(self._outcome)
        if order.kind != "fill":
            raise _OtherOrderError(order)

    async def _put_back(self) -> _Outcome:
        assert self._loaded is not None, "the leader has this rank's word that it read it"
        await self._loaded.put_back()
        return _Outcome("put back")

    def take_blame(self, order: _Order) -> None:
        """What another rank found wrong is wrong for this one, too."""
        if order.is_new_look:
            self.search.damaged.clear()
        elif order.blame is not None and self._outcome.kind != "damaged" and self._candidate is not None:
            kind = FormatVersionError if order.blame.is_unknown else CorruptCheckpointError
            error = kind(order.blame.text)
            found = Damage(checkpoint=self._candidate, error=error, is_proven=order.blame.is_proven)
            self.search.damaged.append(found)

    async def end(self, order: _Order) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], L]:
        """What was loaded; raises why nothing was."""
        if order.kind == "done" and self._candidate is not None and self._loaded is not None:
            self._learn_newest(order)
            return self._candidate, await self.search.settle(), self._loaded
        raise _ERRORS[order.kind](order.text) from self._error

    def _learn_newest(self, order: _Order) -> None:
        """As the leader saw it; a save that was committed beside this load may be newer than its look."""
        members = self.search.ctx.members
        beside = members.newest if members.newest != self._newest_before else None
        members.newest = max((step for step in (order.newest, beside) if step is not None), default=None)


class LoadLeader:
    """The leader's side: which checkpoint next."""

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
        """Whether no candidate was found damaged: those passed by were written by a newer torch or aio_ckpt."""

    async def decide(self, outcomes: Sequence[_Outcome]) -> _Order:
        """From what became of the last one on every rank."""
        kinds = {outcome.kind for outcome in outcomes}
        if kinds == {"none yet"}:
            _check_asked(outcomes)
        if kinds in ({"matched"}, {"read"}) and len({outcome.text for outcome in outcomes}) == 1:
            return _Order("fill" if kinds == {"matched"} else "put back")
        if kinds == {"put back"}:
            return _Order("done", newest=await self._newest())
        if "damaged" not in kinds or "changed" in kinds:  # else matched or read, but not the same save by all
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
        """The newest committed step, less what was proven damaged; what was known before if the root can't be read."""
        ctx = self._ctx
        try:
            committed = await self._quarantine.committed(ctx.storage, ctx.root, ctx.names)
        except AioCkptError as error:  # all have what they wanted
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
    """What ``work`` gives; meanwhile the other ranks hear that this one reads."""

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
    """Abandon what the others wait for, or will: the second of ``topics`` if the word of the first was out already."""
    cause = error if isinstance(error, Exception) else SaveCancelledError("the load was given up")
    is_leader = coordinator.rank == coordinator.leader
    with anyio.CancelScope(shield=True):
        try:
            for topic in topics:
                if await coordinator.failure(topic) is not None:
                    return  # all hear of it there
                # It is told at once. Whether it was heard in time spares the second topic, and nothing else.
                with anyio.move_on_after(stall_secs / HEARTBEATS_A_STALL):
                    is_heard = await coordinator.abort(topic, cause, stage="load")
                    if is_heard and not is_leader:  # the leader's own may have come after a word that some have heard
                        return
        except AioCkptError as untold:  # the others learn it by their deadlines
            error.add_note(f"the other ranks could not be told: {untold}")
