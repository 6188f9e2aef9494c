"""Group loads: all ranks load the same checkpoint. If it is damaged on any rank, all fall back together."""

from __future__ import annotations

import enum
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import msgspec

from aio_ckpt.commit import discovery
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import sent_path
from aio_ckpt.engine.newest_good import (
    ChangedError,
    Damage,
    FallbackSearch,
    WantedCheckpoint,
    candidates,
    copies_or_none,
    nothing_verifies,
    too_many_changes,
)
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    PeerFailedError,
)
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.same_root import different_roots
from aio_ckpt.reports import SkippedCheckpoint
from aio_ckpt.restore.load import LoadOutcome, Matched

_log = logging.getLogger("aio_ckpt")


MatchCandidate: TypeAlias = Callable[[discovery.CommittedCheckpoint, bool], AbstractAsyncContextManager[Matched]]
"""Compares the template with a checkpoint; with True, past the page cache."""


class _Outcome(enum.Enum):
    """Result of a rank after an instruction of the leader."""

    NONE = "none yet"
    """The rank has got no instruction yet."""
    MATCHED = "matched"
    """The template matches the checkpoint and is not yet touched."""
    READ = "read"
    """The rank has read and verified the checkpoint."""
    APPLIED = "applied"
    """The rank has set the objects."""
    DAMAGED = "damaged"
    """The checkpoint does not verify on this rank."""
    CHANGED = "changed"
    """A writer has deleted or replaced the checkpoint."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank in one round."""

    outcome: _Outcome
    text: str = ""
    """``MATCHED`` and ``READ``: identity of the save; ``DAMAGED`` and ``CHANGED``: text of the error."""
    is_proven: bool = False
    """``DAMAGED``: whether two readings found a mismatch."""
    is_unknown: bool = False
    """``DAMAGED``: whether the format is unknown, because a newer torch or aio_ckpt wrote the checkpoint."""
    arguments: tuple[int | None, str, bool] | None = None
    """``NONE``: step, path (empty if none was given) and ``fallback`` of the call."""
    host: str = ""
    """``NONE``: name of the host of the rank, for errors."""


class _Action(enum.Enum):
    """Kind of an instruction."""

    LOAD = "load"
    """Read a step."""
    FILL = "fill"
    """Fill the templates: the templates of all ranks match the same save."""
    APPLY = "apply"
    """Set the objects: all ranks have read the step."""
    DONE = "done"
    """Return: the load has succeeded."""
    NOT_FOUND = "not found"
    """Raise CheckpointNotFoundError."""
    DAMAGED = "damaged"
    """Raise CorruptCheckpointError."""
    UNKNOWN = "unknown"
    """Raise FormatVersionError."""
    APART = "apart"
    """Raise RootError: the ranks do not see the same root."""


class _Instruction(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader in one round: what all ranks do next."""

    action: _Action
    step: int = 0
    """``LOAD``: the step to read."""
    directory: str = ""
    """``LOAD``: name of its directory below the root; empty if each rank was given a path."""
    in_mirror: bool = False
    """``LOAD``: whether the directory lies below the mirror, and not below the root."""
    text: str = ""
    """Text of the error that ends the load; empty if there is no error. ``APART``: host of ``rank``."""
    rank: int = 0
    """``APART``: a rank that does not see the checkpoint of the leader."""
    damage: _Message | None = None
    """Damage that a rank reported of the last checkpoint; None if none was reported."""
    newest: int | None = None
    """``DONE``: the newest committed step, without those proven damaged; None if there is none."""
    restarts_search: bool = False
    """Whether the search begins anew, with a new list of checkpoints: damage found before does not count."""

    @property
    def is_last(self) -> bool:
        """Whether this instruction ends the load."""
        return self.action not in (_Action.LOAD, _Action.FILL, _Action.APPLY)


_ERRORS: dict[_Action, type[AioCkptError]] = {
    _Action.NOT_FOUND: CheckpointNotFoundError,
    _Action.DAMAGED: CorruptCheckpointError,
    _Action.UNKNOWN: FormatVersionError,
}
"""By action of the last instruction, the type of the error that each rank raises."""
_MAX_LONELY_SEARCHES = 3
"""A rank of another root never sees the leader's checkpoint. One that sees it late sees it at a later search."""
_ROUND: Exchange[_Message, _Instruction] = Exchange(_Message, _Instruction, stage="load")


async def newest_good_for_all(
    ctx: EngineContext,
    quarantine: Quarantine,
    name: Topic,
    wanted: WantedCheckpoint,
    match: MatchCandidate,
    *,
    fallback: bool,
) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], LoadOutcome]:
    """Do :func:`~aio_ckpt.engine.newest_good.newest_good` on all ranks. On every rank, ``name`` is the same.

    No template is touched before the templates of all ranks match the same save. Objects are set only once all ranks
    have read it. A rank that leaves tells the others.

    Raises:
        PeerFailedError: another rank could not load for a reason that is no damage, was called with another step, path
            or ``fallback``, or is gone.
    """
    coordinator = ctx.members.coordinator
    rounds = LoadRounds(coordinator, name, LoadLeader(ctx, quarantine, wanted, fallback=fallback))
    member = LoadMember(FallbackSearch(ctx=ctx, quarantine=quarantine), match, rounds, wanted)
    try:
        arguments = (wanted.step, "" if wanted.path is None else sent_path(wanted.path, ctx.root), fallback)
        instruction = await rounds.run(_Message(_Outcome.NONE, arguments=arguments, host=socket.gethostname()))
        while not instruction.is_last:
            member.note_damage(instruction)
            try:
                message = await coordinator.while_beating(functools.partial(member.follow, instruction))
            except _ReadingStoppedError as stopped:
                instruction = stopped.instruction
            else:
                instruction = await rounds.run(message)
        member.note_damage(instruction)
        return await member.end(instruction)
    except BaseException as error:
        if rounds.next is not None:
            await coordinator.abort(rounds.next, error, stage="load")
        if isinstance(error, Exception):
            member.search.complete(error)
        raise
    finally:
        coordinator.end_call(name)  # a rank that still waits for this one learns that it has left


def first_round(load: Topic) -> Topic:
    """Return the topic of the first round of ``load``."""
    return _round(load, 1)


def _round(load: Topic, number: int) -> Topic:
    return load._replace(part=f"round {number}")


class _ReadingStoppedError(Exception):
    """The leader's next instruction ends the reading that this rank has begun."""

    def __init__(self, instruction: _Instruction) -> None:
        super().__init__(instruction.action.value)
        self.instruction = instruction


class LoadRounds:
    """Rounds of one load. In each, every rank sends a message and the leader replies with the next instruction."""

    def __init__(self, coordinator: Coordinator, name: Topic, leader: LoadLeader) -> None:
        self._coordinator = coordinator
        self._name = name
        self._leader = leader
        self._number = 0
        self.next: Topic | None = first_round(name)
        """Topic in which the other ranks may wait for this one; None in a round, which ends itself, and at the end."""

    async def run(self, message: _Message) -> _Instruction:
        """Send this rank's message and return the next instruction."""
        self._number += 1
        topic, following, self.next = _round(self._name, self._number), _round(self._name, self._number + 1), None
        instruction = await _ROUND.run(self._coordinator, topic, message, self._leader.decide, then=following)
        self.next = None if instruction.is_last else following
        return instruction


class LoadMember:
    """This rank's part of a load: it follows the instructions of the leader."""

    def __init__(
        self, search: FallbackSearch, match: MatchCandidate, rounds: LoadRounds, wanted: WantedCheckpoint
    ) -> None:
        self.search = search
        self._wanted = wanted
        self._newest_before = search.ctx.members.newest_step
        self._match = match
        self._rounds = rounds
        self._message = _Message(_Outcome.NONE)
        self._candidate: discovery.CommittedCheckpoint | None = None
        self._loaded: LoadOutcome | None = None
        self._error: CorruptCheckpointError | FormatVersionError | None = None

    async def follow(self, instruction: _Instruction) -> _Message:
        """Read the step of the instruction, or set the objects that were read.

        Raises:
            _ReadingStoppedError: the templates of the ranks do not all match the same save.
        """
        applies = instruction.action is _Action.APPLY
        self._error = None
        try:
            self._message = await self._apply() if applies else await self._read(instruction)
        except (CorruptCheckpointError, FormatVersionError) as error:
            if applies:
                raise
            self._error = error
            is_unknown = isinstance(error, FormatVersionError)
            self._message = _Message(_Outcome.DAMAGED, str(error), self.search.damaged[-1].is_proven, is_unknown)
        except ChangedError as error:
            self._message = _Message(_Outcome.CHANGED, str(error))
        return self._message

    async def _read(self, instruction: _Instruction) -> _Message:
        self._candidate = self._loaded = None
        self._message = _Message(_Outcome.NONE)
        ctx = self.search.ctx
        try:
            if self._wanted.path is None:
                path = (ctx.mirror if instruction.in_mirror and ctx.mirror else ctx.root) / instruction.directory
                self._candidate = await discovery.step_at(ctx.storage, path, instruction.step)
            else:
                self._candidate = (await candidates(ctx, self._wanted))[0]
        except CheckpointNotFoundError as error:  # retention has deleted it meanwhile
            raise ChangedError(str(error)) from error
        self._loaded = await self.search.read_twice(self._candidate, self._fill)
        self.search.is_modified = True
        return _Message(_Outcome.READ, self._loaded.checkpoint.identity)

    async def _fill(self, candidate: discovery.CommittedCheckpoint, past_page_cache: bool) -> LoadOutcome:
        async with self._match(candidate, past_page_cache) as matched:
            await self._await_others(matched.checkpoint.identity)
            return await matched.fetch()

    async def _await_others(self, identity: str) -> None:
        """Return once all ranks may fill their templates. In the second reading of a checkpoint they may already."""
        if self._message.outcome is _Outcome.MATCHED:
            return
        self._message = _Message(_Outcome.MATCHED, identity)
        instruction = await self._rounds.run(self._message)
        if instruction.action is not _Action.FILL:
            raise _ReadingStoppedError(instruction)

    async def _apply(self) -> _Message:
        assert self._loaded is not None, "the leader knows that this rank has read it"
        await self._loaded.apply()
        return _Message(_Outcome.APPLIED)

    def note_damage(self, instruction: _Instruction) -> None:
        """Note the damage that another rank found: the checkpoint is damaged for this rank, too."""
        damage = instruction.damage
        if instruction.restarts_search:
            self.search.damaged.clear()
        elif damage is not None and self._message.outcome is not _Outcome.DAMAGED and self._candidate is not None:
            error = (FormatVersionError if damage.is_unknown else CorruptCheckpointError)(damage.text)
            found = Damage(checkpoint=self._candidate, error=error, is_proven=damage.is_proven)
            self.search.damaged.append(found)

    async def end(
        self, instruction: _Instruction
    ) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], LoadOutcome]:
        """Return the loaded checkpoint; raise the error if none was loaded."""
        if instruction.action is _Action.DONE and self._candidate is not None and self._loaded is not None:
            self._learn_newest(instruction)
            return self._candidate, await self.search.report_skipped(), self._loaded
        if instruction.action is _Action.APART:
            ctx = self.search.ctx
            raise different_roots(ctx.members, self._wanted.path or ctx.root, instruction.rank, instruction.text)
        raise _ERRORS[instruction.action](instruction.text) from self._error

    def _learn_newest(self, instruction: _Instruction) -> None:
        """Take over the newest step that the leader found, or that of a save committed meanwhile if it is newer."""
        members = self.search.ctx.members
        meanwhile = members.newest_step if members.newest_step != self._newest_before else None
        members.newest_step = max((step for step in (instruction.newest, meanwhile) if step is not None), default=None)


class LoadLeader:
    """The leader's part of a load: it chooses the next checkpoint."""

    def __init__(self, ctx: EngineContext, quarantine: Quarantine, wanted: WantedCheckpoint, *, fallback: bool) -> None:
        self._ctx = ctx
        self._quarantine = quarantine
        self._wanted = wanted
        self._falls_back = fallback and wanted.is_newest
        self._remaining: list[discovery.CommittedCheckpoint] = []
        """Candidates that no rank has read yet, newest first."""
        self._step = 0
        """Candidate that the ranks read now."""
        self._search_count = 0
        self._hosts: list[str] = []
        """Name of the host of each rank."""
        self._found: list[discovery.CommittedCheckpoint] = []
        """Candidates of the last search, newest first."""
        self._lonely_searches = 0
        """Searches in a row in which only some ranks read the newest candidate, and no writer changed it."""
        self._faults: list[str] = []
        """Description of the damage of each candidate so far."""
        self._proven: set[int] = set()
        """Steps that are proven damaged."""
        self._all_unknown = True
        """Whether all candidates so far have an unknown format, and none is damaged."""

    async def decide(self, messages: Sequence[_Message]) -> _Instruction:
        """Return the next instruction, from the messages of all ranks."""
        outcomes = {message.outcome for message in messages}
        if outcomes == {_Outcome.NONE}:
            _check_arguments(messages)
            self._hosts = [message.host for message in messages]
        if outcomes in ({_Outcome.MATCHED}, {_Outcome.READ}) and len({message.text for message in messages}) == 1:
            return _Instruction(_Action.FILL if outcomes == {_Outcome.MATCHED} else _Action.APPLY)
        if outcomes == {_Outcome.APPLIED}:
            return _Instruction(_Action.DONE, newest=await self._newest())
        if _Outcome.DAMAGED not in outcomes or _Outcome.CHANGED in outcomes:
            return await self._restart_search(messages)  # the first round, or the ranks do not see the same save
        rank, found = next((rank, each) for rank, each in enumerate(messages) if each.outcome is _Outcome.DAMAGED)
        damage = msgspec.structs.replace(found, text=f"rank {rank}: {found.text}")
        self._all_unknown = self._all_unknown and damage.is_unknown
        self._faults.append(f"{self._wanted.path or f'step {self._step}'}: {damage.text}")
        if damage.is_proven:
            self._proven.add(self._step)
        if not self._falls_back:
            text = f"{self._faults[-1]}, under {self._ctx.root}"
            return _Instruction(_Action.UNKNOWN if damage.is_unknown else _Action.DAMAGED, text=text, damage=damage)
        if not self._remaining:
            text = nothing_verifies(self._ctx, self._faults)
            return _Instruction(_Action.UNKNOWN if self._all_unknown else _Action.DAMAGED, text=text, damage=damage)
        return self._load_next(_Instruction(_Action.LOAD, damage=damage))

    async def _newest(self) -> int | None:
        """Return the newest committed step, without those proven damaged.

        If the root cannot be read, return the last known one.
        """
        ctx = self._ctx
        try:
            committed = await self._quarantine.committed(ctx.storage, ctx.root, ctx.names)
        except AioCkptError as error:  # the load itself has succeeded
            _log.warning("%s could not be looked at behind a load: %s", ctx.root, error)
            return None if ctx.members.newest_step in self._proven else ctx.members.newest_step
        copies = await copies_or_none(ctx, is_needed=False)
        own = {checkpoint.step for checkpoint in committed} - self._proven
        return max(own.union(copy.step for copy in copies), default=None)

    async def _restart_search(self, messages: Sequence[_Message]) -> _Instruction:
        """List the candidates anew and return the instruction to load the newest."""
        self._search_count += 1
        before = self._found[:1]
        if self._search_count > discovery.MAX_RETRIES:
            return _Instruction(_Action.NOT_FOUND, text=str(too_many_changes(self._ctx.root)))
        try:
            self._found = await candidates(self._ctx, self._wanted)
        except CheckpointNotFoundError as error:
            return _Instruction(_Action.NOT_FOUND, text=str(error))
        apart = _rank_apart(messages, self._ctx.members.coordinator.leader)
        self._lonely_searches = self._lonely_searches + 1 if apart is not None and self._found[:1] == before else 0
        if apart is not None and self._lonely_searches == _MAX_LONELY_SEARCHES:
            return _Instruction(_Action.APART, rank=apart, text=self._hosts[apart])
        self._faults.clear()
        self._proven.clear()
        self._all_unknown = True
        self._remaining = list(self._found)
        return self._load_next(_Instruction(_Action.LOAD, restarts_search=True))

    def _load_next(self, instruction: _Instruction) -> _Instruction:
        """Return ``instruction`` for the next candidate."""
        candidate = self._remaining.pop(0)
        self._step = candidate.step
        directory = "" if candidate.is_given else candidate.path.name
        in_mirror = candidate.path.parent == self._ctx.mirror
        return msgspec.structs.replace(instruction, step=self._step, directory=directory, in_mirror=in_mirror)


def _rank_apart(messages: Sequence[_Message], leader: int) -> int | None:
    """Return a rank that did not read what the leader has read, or read another save; None if there is none."""
    own = messages[leader]
    if own.outcome not in (_Outcome.MATCHED, _Outcome.READ):
        return None
    return next(
        (rank for rank, each in enumerate(messages) if (each.outcome, each.text) != (own.outcome, own.text)), None
    )


def _check_arguments(messages: Sequence[_Message]) -> None:
    """Raise PeerFailedError unless all ranks called ``load()`` with the same arguments."""
    first, *others = (message.arguments for message in messages)
    for rank, arguments in enumerate(others, 1):
        if arguments != first:
            raise PeerFailedError(
                f"rank {rank} loads {_described(arguments)} where rank 0 loads {_described(first)}: every rank has to "
                "call load() as often as the others, with the same step, path and fallback",
                rank=rank,
                stage="load",
            )


def _described(arguments: tuple[int | None, str, bool] | None) -> str:
    """Return what a call with these arguments loads, for an error."""
    step, path, falls_back = arguments or (None, "", True)
    which = path or ("the newest checkpoint" if step is None else f"step {step}")
    return which if falls_back else f"{which} with fallback=False"
