"""Coordinator: agreement between the ranks of one engine, over a store of torch.distributed.

Never a collective: training's groups are not ours, and a gloo group is dead after one timeout. Every rank appends one
message to a value of the store, the leader reads them all, decides, and sets one value that every rank looks for. One
process needs none of it: :class:`SoloCoordinator`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import anyio
import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from aio_ckpt.errors import AioCkptError, ConfigError, EngineClosedError, PeerFailedError, StallError
from aio_ckpt.frames import (
    Beat,
    Failure,
    Frame,
    Patience,
    Verdict,
    Word,
    absence,
    call_of,
    failure_of,
    pack,
    unpack,
)
from aio_ckpt.portal import Executor, run_blocking
from aio_ckpt.ranks import Coordinator, Decide, SoloCoordinator

__all__ = ["Coordinator", "Decide", "SoloCoordinator", "StoreCoordinator", "Verdict", "default_coordinator"]

T = TypeVar("T")
Store: TypeAlias = Any
"""``torch.distributed.Store``, whose stubs know neither ``append`` nor values of bytes."""

_POLL_SECS_MIN = 0.001
_POLL_SECS_MAX = 0.01
_POLL_SECS_A_RANK = 1e-4
"""The store is one thread: however many ranks wait, it is asked at most so often a second (1 / this)."""

_BEATS = 4
"""Signs of life in ``stall_secs``: one may be late."""

_TOPICS_KEPT = 16
"""A rank may hear of a topic so many topics later; then its keys go."""

_CALLS_TOLD = 16
"""Each sign of life names the last calls that ended: whoever waits in an older one waits in vain, and unnoticed."""

_STALL_SECS = 600.0
_CLOSE_SECS = 5.0
_LEAVE_SECS = 5.0


# -- over a store -----------------------------------------------------------------------------------


class StoreCoordinator:
    """Ranks that meet in a store of torch.distributed. One coordinator serves one engine.

    Invariant: the store is touched by one thread, through a connection of its own, under a prefix that no other engine
    has. Nothing here blocks: what is waited for is looked for, the more rarely the more ranks there are.

    Args:
        store: reachable from every rank; kept alive as long as the engine, so that a process group may be destroyed.
        rank: this rank, from 0.
        world_size: number of ranks; rank 0 leads.

    Raises:
        ConfigError: a rank beyond the world size.
    """

    leader = 0

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank!r} of world_size={world_size!r}: give a rank from 0 below the world size")
        self.rank = rank
        self.world_size = world_size
        self.stall_secs = _STALL_SECS
        """How long a rank may give no sign of life; as given to ``open``."""
        self._parent = store
        self._store: Store | None = None
        self._executor: Executor | None = None
        self._name = ""
        self._session = uuid.uuid4().hex[:8]
        self._is_met = False
        self._absent: set[int] = set()
        self._beats = 0
        self._over: deque[tuple[str, int]] = deque(maxlen=_CALLS_TOLD)
        self._topics: deque[str] = deque()
        self.messages_sent = 0
        """Messages of agreement that this rank sent."""
        self.bytes_sent = 0
        """Their bytes, as they stand in the store."""
        self.bytes_received = 0
        """Bytes of messages and words that this rank read."""

    # -- opening and ending ---------------------------------------------------------------------------

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Make a connection; the n-th opening of ``name`` by each rank meets the others' n-th."""
        self._name, self.stall_secs = name, stall_secs
        self._executor = Executor(f"aio_ckpt-ranks-{self._session}", 1)
        tag = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

        def connect() -> Store:
            # Before torch 2.7 no store can be cloned; what is asked here never blocks, so that sharing costs little.
            own = self._parent.clone() if hasattr(self._parent, "clone") else self._parent
            store = PrefixStore(f"aio_ckpt/{tag}", own)
            opening = store.add(f"openings/{self.rank}", 1)
            return PrefixStore(f"{opening}", store)

        self._store = await self._limited(run_blocking(self._executor, connect), "connecting")
        await self.beat()

    async def leave(self) -> None:
        """Before the end: the leader stays until all have left, for it may be the host of the store."""
        if not self._is_met or self.leader in self._absent:
            return
        with contextlib.suppress(AioCkptError):
            await self.beat(has_left=True)
            if self._absent:  # which will not leave
                return
            left = await self._ask(lambda store: store.add("left", 1))
            with anyio.move_on_after(_LEAVE_SECS):
                while self.rank == self.leader and left < self.world_size:
                    await anyio.sleep(_POLL_SECS_MAX)
                    left = await self._ask(lambda store: store.add("left", 0))

    def close(self) -> None:
        """End the thread; one that is stuck in the store is left behind."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close(_CLOSE_SECS)
        self._store = None

    # -- agreement ------------------------------------------------------------------------------------

    async def agree(self, topic: str, message: bytes, decide: Decide, *, stage: str) -> bytes:
        """See :class:`Coordinator`."""
        try:
            return await self.consult(topic, message, decide, stage=stage)
        except BaseException as error:
            if self.rank == self.leader:
                with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
                    await self.abandon(topic, error, stage=stage)
            raise

    async def consult(self, topic: str, message: bytes, decide: Decide, *, stage: str) -> bytes:
        """See :class:`Coordinator`."""
        if self.rank != self.leader:
            await self._send(topic, Frame(self.rank, message))
            return await self._hear(topic, stage)
        verdict = await decide(await self._gather(topic, message, stage))
        with anyio.CancelScope(shield=True):  # the thread would tell it all the same, and this rank not know
            await self._tell(topic, verdict)
        return verdict.of(self.rank)

    async def announce(self, topic: str, word: bytes, *, stage: str) -> bytes:
        """See :class:`Coordinator`."""
        if self.rank != self.leader:
            return await self._hear(topic, stage)
        await self._tell(topic, Verdict(common=word))
        return word

    async def abandon(self, topic: str, error: BaseException, *, stage: str) -> PeerFailedError | None:
        """See :class:`Coordinator`."""
        failure = failure_of(self.rank, stage, error)
        word = await self._leave_topic(topic, failure)
        while word is not None and word.then:
            topic = word.then
            word = await self._leave_topic(topic, failure)
        return None if word is None or word.failure is None else word.failure.error(topic, self.rank)

    async def _leave_topic(self, topic: str, failure: Failure) -> Word | None:
        """Give up ``topic`` unless the leader's word is out: what that is, if it came in time."""
        word = await self._word(topic)
        if word is not None:
            return word
        if self.rank == self.leader:
            word = Word(b"", failure=failure)
            data = msgspec.msgpack.encode(word)
            with anyio.CancelScope(shield=True):
                await self._ask(lambda store: store.set(f"{topic}/out", data))
                await self._retire(topic)
            return word
        await self._send(topic, Frame(self.rank, b"", failure))
        if self.leader in self._absent:  # it has just been waited for in vain
            return await self._word(topic)
        with contextlib.suppress(AioCkptError):
            return await self._await_word(topic, failure.stage)
        return None

    async def failure(self, topic: str) -> PeerFailedError | None:
        """See :class:`Coordinator`."""
        word = await self._word(topic)
        return None if word is None or word.failure is None else word.failure.error(topic, self.rank)

    async def _word(self, topic: str) -> Word | None:
        """The leader's, if it is out."""
        data = await self._ask(functools.partial(_found, key=f"{topic}/out"))
        return msgspec.msgpack.decode(data, type=Word) if data else None

    async def raise_flag(self, name: str) -> None:
        """See :class:`Coordinator`."""
        await self._ask(lambda store: store.set(f"flag/{name}", "1"))

    async def is_raised(self, name: str) -> bool:
        """See :class:`Coordinator`."""
        return bool(await self._ask(lambda store: store.check([f"flag/{name}"])))

    async def beat(self, *, has_left: bool = False) -> None:
        """See :class:`Coordinator`."""
        self._beats += 1
        data = msgspec.msgpack.encode(Beat(self._beats, tuple(self._over), has_left))
        await self._ask(lambda store: store.set(f"alive/{self.rank}", data))

    def end_call(self, topic: str) -> None:
        """See :class:`Coordinator`."""
        call = call_of(topic)
        if call is not None:
            self._over.append(call)

    # -- what a rank does -----------------------------------------------------------------------------

    async def _send(self, topic: str, frame: Frame) -> None:
        data = pack(frame)

        def send(store: Store) -> None:
            store.append(f"{topic}/in", data)
            if store.add(f"{topic}/n", 1) == self.world_size - 1 or frame.failure is not None:
                store.set(f"{topic}/woken", "1")

        await self._ask(send)
        self.messages_sent += 1
        self.bytes_sent += len(data)

    async def _hear(self, topic: str, stage: str) -> bytes:
        word = await self._await_word(topic, stage)
        self._is_met = True
        if word.failure is not None:
            raise word.failure.error(topic, self.rank)
        if word.is_each:
            data = await self._ask(functools.partial(_take, key=f"{topic}/out/{self.rank}"))
            self.bytes_received += len(data)
            return bytes(data)
        self.bytes_received += len(word.common)
        return word.common

    async def _await_word(self, topic: str, stage: str) -> Word:
        patience = Patience(self.stall_secs)
        check = functools.partial(self._check_alive, (self.leader,), patience, topic, stage)
        await self._look(f"{topic}/out", check)
        self._absent.discard(self.leader)
        return msgspec.msgpack.decode(await self._ask(lambda store: store.get(f"{topic}/out")), type=Word)

    # -- what the leader does -------------------------------------------------------------------------

    async def _gather(self, topic: str, message: bytes, stage: str) -> tuple[bytes, ...]:
        if self.world_size == 1:
            return (message,)
        patience = Patience(self.stall_secs)

        async def check() -> None:
            found = {frame.rank for frame in await self._frames(topic)}
            missing = sorted(set(range(self.world_size)) - found - {self.rank})
            await self._check_alive(missing, patience, topic, stage)

        await self._look(f"{topic}/woken", check)
        frames = await self._frames(topic)
        failures = [frame.failure for frame in frames if frame.failure is not None]
        if failures:
            raise failures[0].error(topic, self.rank)
        self._is_met = True
        self._absent.clear()
        by_rank = {frame.rank: frame.body for frame in frames}
        return tuple(message if rank == self.rank else by_rank[rank] for rank in range(self.world_size))

    async def _frames(self, topic: str) -> list[Frame]:
        data = await self._ask(functools.partial(_found, key=f"{topic}/in"))
        self.bytes_received += len(data)
        return list(unpack(data))

    async def _tell(self, topic: str, verdict: Verdict) -> None:
        def tell(store: Store) -> None:
            for rank, data in enumerate(verdict.each):
                if rank != self.rank:
                    store.set(f"{topic}/out/{rank}", data)
            word = msgspec.msgpack.encode(Word(verdict.common, is_each=bool(verdict.each), then=verdict.then))
            store.set(f"{topic}/out", word)

        if self.world_size > 1:
            await self._ask(tell)
            await self._retire(topic)

    async def _retire(self, topic: str) -> None:
        """Delete the keys of a topic that every rank has long heard of."""
        self._topics.append(topic)
        if len(self._topics) > _TOPICS_KEPT:
            old = self._topics.popleft()

            def delete(store: Store) -> None:
                for key in ("in", "n", "woken", "out"):
                    store.delete_key(f"{old}/{key}")

            await self._ask(delete)

    # -- waiting --------------------------------------------------------------------------------------

    async def _look(self, key: str, check: Callable[[], Awaitable[None]]) -> None:
        """Look for ``key`` until it is there; a few times in ``stall_secs`` give a sign of life and ``check()``."""
        pause, longest = _POLL_SECS_MIN, max(_POLL_SECS_MAX, _POLL_SECS_A_RANK * self.world_size)
        due = time.monotonic() + self.stall_secs / _BEATS
        is_there = functools.partial(_has, key=key)
        while not await self._ask(is_there):
            if time.monotonic() >= due:
                due = time.monotonic() + self.stall_secs / _BEATS
                await self.beat()
                try:
                    await check()
                except PeerFailedError:
                    if await self._ask(is_there):  # whoever has gone since said so before
                        return
                    raise
            await anyio.sleep(min(pause, max(due - time.monotonic(), 0)))
            pause = min(2 * pause, longest)

    async def _check_alive(self, ranks: Sequence[int], patience: Patience, topic: str, stage: str) -> None:
        """Raise PeerFailedError if the last sign of life of any of ``ranks`` is too long ago, or from elsewhere."""

        def read(store: Store) -> list[bytes]:
            keys = [f"alive/{rank}" for rank in ranks]
            if store.has_extended_api() and store.check(keys):
                return [bytes(value) for value in store.multi_get(keys)]
            return [_found(store, key=key) for key in keys]

        beats = await self._ask(read) if ranks else []
        error = absence(ranks, beats, patience, topic, stage, "" if self._is_met else self._name)
        if error is not None:
            self._absent.add(error.rank)
            raise error

    async def _ask(self, question: Callable[[Store], T]) -> T:
        """Put a question to the store, in its thread."""
        executor, store = self._executor, self._store
        if executor is None or store is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return await self._limited(run_blocking(executor, question, store), "answering")

    async def _limited(self, work: Awaitable[T], what: str) -> T:
        try:
            with anyio.fail_after(self.stall_secs):
                return await work
        except TimeoutError as error:
            raise StallError(f"the store of the ranks was not {what} within {self.stall_secs} s") from error
        except AioCkptError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise PeerFailedError(
                f"the store of the ranks cannot be reached, its host may be gone: {type(error).__name__}: {error}",
                rank=self.leader,
                stage="agree",
            ) from error


def _has(store: Store, *, key: str) -> bool:
    return bool(store.check([key]))


def _found(store: Store, *, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""


def _take(store: Store, *, key: str) -> bytes:
    data = bytes(store.get(key))
    store.delete_key(key)
    return data


def default_coordinator() -> Coordinator:
    """The ranks of torch.distributed's default group if it is initialised and has several, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        return StoreCoordinator(store, rank=dist.get_rank(), world_size=dist.get_world_size())
    return SoloCoordinator()
