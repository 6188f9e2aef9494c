"""Peers: the ranks of one engine, how they meet, and what they agree on in each save."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from aio_ckpt.commit.owner import Owner, pending_path
from aio_ckpt.errors import AioCkptError, ConfigError, PeerFailedError, PlanChangedError, RootError
from aio_ckpt.memory.lifetime import ranks_on_host
from aio_ckpt.ranks.messages import Verdict
from aio_ckpt.ranks.save_ledger import (
    Assigned,
    Book,
    Committed,
    Planned,
    SentSpans,
    Written,
    decode_report,
    decode_word,
    slowest_ranks,
)
from aio_ckpt.ranks.store_coordinator import Coordinator
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage

__all__ = ["Peers", "SaveRound"]

T = TypeVar("T")
Publish = Callable[[Sequence[Written]], Awaitable[None]]
"""The leader's: make what every rank has written visible."""

_log = logging.getLogger("aio_ckpt")
_OPEN = "the opening"
_ROOT = "the root"
_LOOKS, _AGAIN_SECS = 3, 0.2
"""How often a root is looked at before the ranks give up to meet, and how long between."""


class _Met(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells when all have come."""

    owner: Owner
    """In whose name pending directories are made."""
    newest: int | None
    """Newest committed step."""
    is_marked: bool
    """Whether there is a mark under the root that all must see."""


_MET = msgspec.msgpack.Decoder(_Met)
_ASKED = msgspec.msgpack.Decoder(tuple[int, bool])
_HOSTS = msgspec.msgpack.Decoder(tuple[str, bool, dict[str, str]])
_FAULTS = msgspec.msgpack.Decoder(tuple[str, str])


class Peers:
    """All ranks of one engine, this one included.

    Invariant: only the leader renames, clears or deletes anything under the root; every rank writes its own two files
    into the pending directory, which is made in the leader's name.
    """

    def __init__(
        self, coordinator: Coordinator, owner: Owner, *, stall_secs: float, rules: Mapping[str, str] | None = None
    ) -> None:
        """``rules``: settings that must be the same on all ranks."""
        self._rules = rules or {}
        self.stall_secs = stall_secs
        """How long a rank may give no sign of life."""
        self.coordinator = coordinator
        """The way to them."""
        self.owner = owner
        """In whose name pending directories are made: the leader's, once all have met."""
        self.newest: int | None = None
        """Newest committed step when all had met; for those who do not lead."""
        self.book = Book(coordinator.world_size)
        """What the leader knows."""
        self.sent = SentSpans()
        """What the leader was told last."""
        self._loads = 0
        self.opened: Future[None] = Future()
        """All have met, or why not."""
        if coordinator.world_size == 1:
            self.opened.set_result(None)

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits."""
        return self.coordinator.rank == self.coordinator.leader

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.coordinator.world_size > 1

    @property
    def on_host(self) -> int:
        """Ranks of this host, which share its memory and disk."""
        return ranks_on_host(self.coordinator.world_size)

    def next_load(self) -> str:
        """Name of this call of ``load()``, the same on every rank for the same call."""
        self._loads += 1
        name = f"load {self._loads}"
        self.coordinator.begin_call(name)
        return name

    async def announce(self, topic: str, word: bytes) -> bytes:
        """What the leader says of ``topic``: there ``word``."""
        try:
            return await self.coordinator.announce(topic, word, stage="agree")
        finally:
            self.coordinator.end_call(topic)

    async def may_roll_back(self, topic: str, step: int, is_busy: bool) -> str:
        """Which ranks have saves pending: none may go back then. Empty: all may.

        Raises:
            PeerFailedError: not all ranks go back, or not to one step.
        """

        async def decide(messages: tuple[bytes, ...]) -> Verdict:
            asked = [_ASKED.decode(message) for message in messages]
            for rank, (other, _) in enumerate(asked):
                if other != step:
                    text = (
                        f"rank {rank} calls rollback({other}) where rank {self.coordinator.rank} calls rollback({step})"
                    )
                    raise PeerFailedError(f"{text}: give the same step on every rank", rank=rank, stage="agree")
            return Verdict(common=", ".join(str(rank) for rank, (_, busy) in enumerate(asked) if busy).encode())

        message = msgspec.msgpack.encode((step, is_busy))
        return (await self.coordinator.agree(topic, message, decide, stage="agree")).decode()

    async def met(self) -> None:
        """Return when all have met; raise why they did not."""
        if not self.opened.done():
            await asyncio.wrap_future(follow(self.opened))
        self.opened.result()

    async def meet(self, storage: Storage, root: Path, read_steps: Callable[[], Awaitable[Iterable[int]]]) -> None:
        """Wait for all ranks, learn who leads, and see that all have one root.

        Raises:
            PeerFailedError: a rank did not come in time.
            ConfigError: a setting of a rank differs that all must have alike; names it and the rank.
            RootError: a rank does not see what the leader wrote under the root; names the hosts.
        """
        coordinator = self.coordinator
        mark = pending_path(root, self.owner, 0)

        async def lead(_: tuple[bytes, ...]) -> Verdict:
            newest = max(await _persistently(read_steps), default=None)
            met = _Met(self.owner, newest, await _mark(storage, mark))
            return Verdict(common=msgspec.msgpack.encode(met))

        async def compare(messages: tuple[bytes, ...]) -> Verdict:
            told = [_HOSTS.decode(message) for message in messages]
            blind = [f"rank {rank} on {host}" for rank, (host, sees, _) in enumerate(told) if not sees]
            odd = _odd_rules([rules for _, _, rules in told], coordinator.leader)
            return Verdict(common=msgspec.msgpack.encode((", ".join(blind), odd)))

        try:
            await coordinator.open(str(root), stall_secs=self.stall_secs)
            word = await coordinator.agree(_OPEN, b"", lead, stage="open")
            met = _MET.decode(word)
            self.owner, self.newest = met.owner, met.newest
            sees = not met.is_marked or await self._sees(storage, pending_path(root, met.owner, 0))
            message = msgspec.msgpack.encode((socket.gethostname(), sees, self._rules))
            blind, odd = _FAULTS.decode(await coordinator.agree(_ROOT, message, compare, stage="open"))
        except BaseException as error:
            error.add_note("the ranks have not met: close their engines and open them anew, on all ranks")
            with anyio.CancelScope(shield=True):
                await coordinator.leave()  # no call will come to anything
            raise
        finally:
            if self.is_leader:
                with anyio.CancelScope(shield=True):
                    await _unmark(storage, mark)
        if odd:
            raise ConfigError(f"the settings of the ranks differ: {odd}: give all of them the same, and open anew")
        if blind:
            raise RootError(
                errno.ENOTUNIQ,
                f"the ranks have different roots, {blind} does not see that of rank {coordinator.leader} on "
                f"{met.owner.host}: give a directory on a file system that all of them share",
                str(root),
            )

    async def _sees(self, storage: Storage, mark: Path) -> bool:
        try:
            return await _persistently(lambda: storage.exists(mark))
        except Exception as error:
            with anyio.CancelScope(shield=True):
                await self.coordinator.abandon(_ROOT, error, stage="open")
            raise


def _odd_rules(rules: Sequence[Mapping[str, str]], leader: int) -> str:
    """The first setting that a rank has otherwise than the leader, or ''."""
    for rank, own in enumerate(rules):
        for name, value in rules[leader].items():
            if own.get(name) != value:
                return f"{name} is {value} on rank {leader} and {own.get(name)} on rank {rank}"
    return ""


async def _persistently(look: Callable[[], Awaitable[T]]) -> T:
    """What ``look`` gives, tried again where it fails: ranks that have not met will not meet later."""
    for _ in range(_LOOKS - 1):
        try:
            return await look()
        except (AioCkptError, OSError) as error:
            _log.warning("tried again: %s", error)
            await anyio.sleep(_AGAIN_SECS)
    return await look()


async def _mark(storage: Storage, path: Path) -> bool:
    """Make a directory that all must see; False where nothing can be written: such a root is only read."""
    try:
        await storage.make_dir(path)
    except (AioCkptError, OSError):
        return False
    return True


async def _unmark(storage: Storage, path: Path) -> None:
    try:
        if await storage.exists(path):
            await storage.remove_tree(path)
    except (AioCkptError, OSError):
        return  # cleared when the process is dead


class SaveRound:
    """One save's agreement: a plan where any rank missed its own, then what all have written."""

    def __init__(self, peers: Peers, executor: Executor, *, topic: str) -> None:
        self._peers = peers
        self._executor = executor
        self._topic = topic
        self._firsts: Sequence[Planned | Written] = ()
        self.is_told = False
        """This rank's last word was given: the leader may commit from now on."""
        self.is_over = False
        """The leader's last word was heard, or given."""
        self.is_entered = False
        """A pending save has it, and clears up after itself."""
        self.is_failed = False
        """It is certain that the save has failed on all ranks, and for good: what it wrote may go."""

    async def assign(self, planned: Planned) -> Assigned:
        """A miss: what this rank is to write."""

        async def decide(messages: tuple[bytes, ...]) -> Verdict:
            return await self._replan(_reports(messages))

        word = await self._agree(planned, decide, stage="agree")
        self._topic = _second(self._topic)
        if not isinstance(word, Assigned):
            raise PlanChangedError("the leader committed a save that this rank has not written")
        return word

    async def conclude(self, written: Written, publish: Publish) -> Committed:
        """Everything of this rank is durable: once that of all is, the leader publishes it."""
        word: Assigned | Committed
        self.is_told = True
        if self._topic.endswith(_SECOND):
            word = await self._agree(written, lambda messages: self._commit(messages, publish), stage="agree")
        else:

            async def decide(messages: tuple[bytes, ...]) -> Verdict:
                reports = _reports(messages)
                if all(isinstance(report, Written) for report in reports):
                    return await self._commit(messages, publish)
                return await self._replan(reports)

            word = await self._agree(written, decide, stage="agree")
            if isinstance(word, Assigned):  # another rank planned anew; what this one has written stands
                self._topic = _second(self._topic)
                word = await self._agree(None, lambda messages: self._commit(messages, publish), stage="agree")
        if not isinstance(word, Committed):
            raise PlanChangedError("the leader planned a save twice")
        self.is_over = True
        self._peers.coordinator.end_call(self._topic)
        return word

    async def end(self, cause: BaseException, *, limit_secs: float | None = None) -> BaseException:
        """The save fails here with ``cause``: tell the others; what it failed with first, here or elsewhere.

        What the leader says of it is waited for as long as that lives, ``limit_secs`` at most.
        """
        peers = self._peers
        if self.is_over and peers.are_several:  # committed, and told so: nothing undoes that
            if isinstance(cause, AioCkptError):
                cause.in_doubt = True
            return cause
        if not peers.are_several:
            self.is_failed = True
            return cause
        first: PeerFailedError | None = None
        told: PeerFailedError | None = None
        with anyio.move_on_after(limit_secs, shield=True):
            try:
                await peers.met()
                first = told = await peers.coordinator.failure(self._topic)
                if told is None:
                    told = await peers.coordinator.abandon(self._topic, cause, stage="write")
            except AioCkptError as error:  # the store is gone: the others learn it by their deadlines
                cause.add_note(f"the other ranks could not be told: {error}")
        peers.coordinator.end_call(self._topic)  # as the next sign of life says
        may_commit = self.is_told and not peers.is_leader  # the leader has all that it needs
        is_in_doubt = may_commit if told is None else told.in_doubt
        self.is_failed = not is_in_doubt and (peers.is_leader or told is not None)
        if is_in_doubt and isinstance(cause, AioCkptError):
            cause.in_doubt = True
        if first is None or peers.is_leader or isinstance(cause, PeerFailedError):
            return cause
        first.__cause__ = cause
        return first

    async def _agree(
        self,
        report: Planned | Written | None,
        decide: Callable[[tuple[bytes, ...]], Awaitable[Verdict]],
        *,
        stage: str,
    ) -> Assigned | Committed:
        message = b"" if report is None else msgspec.msgpack.encode(report)
        # Who fails in here comes to ``end``, which tells the others why: a cancelled await knows only that it was.
        return decode_word(await self._peers.coordinator.consult(self._topic, message, decide, stage=stage))

    async def _replan(self, reports: Sequence[Planned | Written]) -> Verdict:
        self._peers.book.check(reports)
        self._firsts = reports
        words = await run_blocking(self._executor, self._peers.book.assign, reports)
        return Verdict(each=tuple(msgspec.msgpack.encode(word) for word in words), then=_second(self._topic))

    async def _commit(self, messages: tuple[bytes, ...], publish: Publish) -> Verdict:
        written: list[Written] = []
        for rank, message in enumerate(messages):
            report = decode_report(message, rank=rank) if message else self._firsts[rank]
            if not isinstance(report, Written):
                raise PeerFailedError(f"rank {rank} has not written its share", rank=rank, stage="agree")
            written.append(report)
        if self._peers.are_several:
            self._peers.book.check(written)
        await publish(written)
        return Verdict(common=msgspec.msgpack.encode(Committed(dict(slowest_ranks(written)))))


def _reports(messages: Sequence[bytes]) -> list[Planned | Written]:
    return [decode_report(message, rank=rank) for rank, message in enumerate(messages)]


_SECOND = ", anew planned"


def _second(topic: str) -> str:
    return topic + _SECOND
