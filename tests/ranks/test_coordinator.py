"""Ranks agree over a store: one message each, one decision, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch.distributed as dist
from log_lines import early_lines
from rank_processes import Ranks, needs_list_keys, ranks
from slow import slow

from aio_ckpt.errors import ConfigError, EngineClosedError, PeerFailedError, StallError, WriteError
from aio_ckpt.ranks import heartbeats
from aio_ckpt.ranks import store_coordinator as coordinator_module
from aio_ckpt.ranks.coordinator import CallEnd, SoloCoordinator
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Heartbeat, Topic
from aio_ckpt.ranks.missing_ranks import HEARTBEATS_A_STALL, REMEDY, RankWait
from aio_ckpt.ranks.store import StoreKeys
from aio_ckpt.ranks.store_coordinator import StoreCoordinator, default_coordinator

STALL_SECS = 20.0
SHORT_SECS = 2.0
BYTES: Exchange[bytes, bytes] = Exchange(bytes, bytes, stage="agree")
COMMIT: Exchange[bytes, bytes] = Exchange(bytes, bytes, stage="commit")


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3) as running:
        yield running


async def in_order(messages: Sequence[bytes]) -> bytes:
    return b"|".join(messages)


async def tell_apart(
    coordinator: StoreCoordinator, topic: Topic, message: bytes, apart: Callable[[Sequence[bytes]], Sequence[bytes]]
) -> bytes:
    """Every rank goes on in the topic "second"."""
    messages = await BYTES.gather(coordinator, topic, message)
    return await BYTES.broadcast(coordinator, topic, apart(messages), then=Topic("second"))


async def never(messages: Sequence[bytes]) -> bytes:
    raise AssertionError(f"decided on {messages}")


@asynccontextmanager
async def opened(name: str) -> AsyncIterator[StoreCoordinator]:
    coordinator = default_coordinator()
    assert isinstance(coordinator, StoreCoordinator)
    await coordinator.open(name, stall_secs=STALL_SECS)
    try:
        yield coordinator
    finally:
        coordinator.close()


# -- all is well ------------------------------------------------------------------------------------


def decide_together(rank: int, count: int, name: str) -> tuple[bytes, int, int]:
    async def main() -> tuple[bytes, int, int]:
        async with opened(name) as coordinator:
            common = await BYTES.run(coordinator, Topic("a"), b"m%d" % rank, in_order)
            return common, coordinator.messages_sent, coordinator.bytes_sent

    return asyncio.run(main())


def test_the_leader_decides_on_the_message_of_every_rank_and_all_hear_it(three: Ranks) -> None:
    assert three.run(decide_together, "decide") == [(b"m0|m1|m2", 0, 0), (b"m0|m1|m2", 1, 13), (b"m0|m1|m2", 1, 13)]


def tell_each(rank: int, count: int) -> list[bytes]:
    def apart(messages: Sequence[bytes]) -> Sequence[bytes]:
        return [b"for " + message for message in messages]

    async def main() -> list[bytes]:
        async with opened("each") as coordinator:
            return [await tell_apart(coordinator, Topic(f"{n}"), b"%d.%d" % (n, rank), apart) for n in range(40)]

    return asyncio.run(main())


def test_each_rank_may_be_told_something_else(three: Ranks) -> None:
    assert three.run(tell_each) == [[b"for %d.%d" % (n, rank) for n in range(40)] for rank in range(3)]


def test_the_keys_of_past_agreements_are_deleted(three: Ranks) -> None:
    three.run(tell_each)
    before = three.store.num_keys()
    three.run(tell_each)
    # 40 agreements; each opening keeps those of its last few, and its signs of life.
    assert three.store.num_keys() - before <= 4 * 16 + 3


LARGE = 9 << 20
"""More than a TCPStore takes in one request."""


def exchange_large(rank: int, count: int) -> tuple[bool, bool]:
    def message(rank: int) -> bytes:
        return random.Random(rank).randbytes(LARGE)  # of which nothing can be compressed away

    def back(messages: Sequence[bytes]) -> Sequence[bytes]:
        assert tuple(messages) == (tuple(map(message, range(count))) if rank == 0 else ())
        return [data[::-1] for data in messages]

    async def joined(messages: Sequence[bytes]) -> bytes:
        return b"".join(messages)

    async def main() -> tuple[bool, bool]:
        async with opened("large") as coordinator:
            each = await tell_apart(coordinator, Topic("each"), message(rank), back)
            common = await BYTES.run(coordinator, Topic("common"), message(rank), joined)
            await coordinator.leave()
            return each == message(rank)[::-1], common == b"".join(map(message, range(count)))

    return asyncio.run(main())


@pytest.mark.slow
def test_messages_and_replies_may_be_larger_than_a_request_to_the_store(three: Ranks) -> None:
    three.run(exchange_large)  # the first engines leave the keys by which later ones meet
    before = three.store.num_keys()
    assert three.run(exchange_large) == [(True, True)] * 3
    assert three.store.num_keys() <= before + 1, "no piece stays; the queue may"


def open_two(rank: int, count: int) -> list[bytes]:
    async def main() -> list[bytes]:
        async with opened("root a") as one, opened("root b") as other, opened("root a") as again:
            works = [
                BYTES.run(coordinator, Topic("t"), b"%d%d" % (rank, n), in_order)
                for n, coordinator in enumerate((one, other, again))
            ]
            return await asyncio.gather(*works)

    return asyncio.run(main())


def test_engines_side_by_side_and_one_after_the_other_never_meet(three: Ranks) -> None:
    for _ in range(2):
        assert three.run(open_two) == [[b"00|10|20", b"01|11|21", b"02|12|22"]] * 3


def test_one_process_decides_alone() -> None:
    async def main() -> bytes:
        coordinator = SoloCoordinator()
        await coordinator.open("x", stall_secs=1)
        await coordinator.beat()
        await coordinator.abort(Topic("u"), ValueError(), stage="agree")
        return await BYTES.run(coordinator, Topic("t"), b"mine", in_order)

    assert isinstance(default_coordinator(), SoloCoordinator)
    assert asyncio.run(main()) == b"mine"


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="world size"):
        StoreCoordinator(dist.HashStore(), rank=2, world_size=2)


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="store is a NoneType"):
        StoreCoordinator(None, rank=0, world_size=2)


# -- a rank fails -----------------------------------------------------------------------------------


def fail_at(rank: int, count: int, failing: int) -> tuple[int, str, str]:
    async def main() -> tuple[int, str, str]:
        async with opened(f"fail {failing}") as coordinator:
            if rank == failing:
                error = OSError(28, "No space left on device")
                await coordinator.abort(Topic("t"), error, stage="write")
            try:
                if rank != failing:
                    await BYTES.run(coordinator, Topic("t"), b"", never)
            except PeerFailedError as peer:
                found = peer.rank, peer.stage, str(peer)
            else:
                assert rank == failing
                found = rank, "write", "No space"
            assert await BYTES.run(coordinator, Topic("u"), b"%d" % rank, in_order) == b"0|1|2"
            return found

    return asyncio.run(main())


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_one_rank_failed_with_is_raised_by_the_others_and_the_next_agreement_works(
    three: Ranks, failing: int
) -> None:
    for rank, stage, text in three.run(fail_at, failing):
        assert (rank, stage) == (failing, "write")
        assert "No space" in text


def decide_badly(rank: int, count: int) -> str:
    async def full(messages: Sequence[bytes]) -> bytes:
        raise OSError(28, "No space left on device")

    async def main() -> str:
        async with opened("bad") as coordinator:
            try:
                await COMMIT.run(coordinator, Topic("t"), b"", full)
            except (PeerFailedError, OSError) as error:
                return f"{type(error).__name__} {getattr(error, 'rank', '-')} {getattr(error, 'stage', '-')} {error}"
            return "agreed"

    return asyncio.run(main())


def test_a_leader_that_fails_raises_its_own_error_and_the_others_name_it(three: Ranks) -> None:
    leader, *others = three.run(decide_badly)
    assert leader == "OSError - - [Errno 28] No space left on device"
    assert all(text.startswith("PeerFailedError 0 commit ") and "No space" in text for text in others)


def test_a_leader_that_cannot_tell_of_its_error_says_so_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(messages: Sequence[bytes]) -> bytes:
        raise OSError(28, "No space left on device")

    def broken(keys: StoreKeys, *_: object) -> None:
        raise RuntimeError("the store is away")

    async def main() -> list[str]:
        async with two_here(STALL_SECS) as (leader, other):
            sent = await BYTES.gather(other, Topic("t"), b"")
            assert sent == ()
            monkeypatch.setattr(StoreKeys, "put_reply", broken)
            with pytest.raises(OSError, match="No space") as raised:
                await COMMIT.run(leader, Topic("t"), b"", full)
            return raised.value.__notes__

    (note,) = asyncio.run(main())
    assert note.startswith("the other ranks could not be told: PeerFailedError")
    assert "the store is away" in note


# -- a rank is gone ---------------------------------------------------------------------------------


def wait_in_vain(rank: int, count: int, absent: int) -> tuple[float, int, str]:
    async def main() -> tuple[float, int, str]:
        async with opened(f"absent {absent}") as coordinator:
            await BYTES.run(coordinator, Topic("met"), b"", in_order)
            if rank == absent:
                return 0.0, rank, ""
            began = time.monotonic()
            with pytest.raises(PeerFailedError) as raised:
                coordinator.stall_secs = SHORT_SECS
                await BYTES.run(coordinator, Topic("t"), b"", never)
            return time.monotonic() - began, raised.value.rank, str(raised.value)

    return asyncio.run(main())


@pytest.mark.parametrize("absent", [slow(0), 1])
def test_a_rank_that_never_comes_is_named_within_the_deadline(three: Ranks, absent: int) -> None:
    for secs, rank, text in three.run(wait_in_vain, absent):
        # The others may hear of it one deadline after the leader has waited for its own.
        assert secs < 2 * SHORT_SECS + 2
        assert rank == absent
        assert not text or f"rank {absent} gave no sign of life" in text


def be_slow(rank: int, count: int) -> bytes:
    async def main() -> bytes:
        async with opened("slow") as coordinator:
            if rank == 1:
                for _ in range(6):  # 1.5 deadlines; the time that passes is what is tested
                    await asyncio.sleep(SHORT_SECS / 4)
                    await coordinator.beat()
            coordinator.stall_secs = SHORT_SECS
            return await BYTES.run(coordinator, Topic("t"), b"", in_order)

    return asyncio.run(main())


def test_a_rank_that_is_slow_but_alive_is_waited_for(three: Ranks) -> None:
    assert three.run(be_slow) == [b"||"] * 3


def stop_amid(rank: int, count: int) -> str:
    async def main() -> str:
        async with opened("stopped") as coordinator:
            await BYTES.run(coordinator, Topic("met"), b"", in_order)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(PeerFailedError) as raised:
                coordinator.stall_secs = SHORT_SECS
                await BYTES.run(coordinator, Topic("t"), b"", never)
            assert raised.value.rank == 1
            return (await BYTES.run(coordinator, Topic("u"), b"", in_order)).decode()

    return asyncio.run(main())


@needs_list_keys
def test_a_stopped_rank_hears_that_it_was_given_up_and_the_next_agreement_works() -> None:
    with ranks(2) as two:
        two.start(0, stop_amid)
        two.start(1, stop_amid)
        two.wait_until(lambda: _state(two.processes[1].pid) == "T")
        two.wait_until(lambda: any(key.endswith("/t/out") for key in two.store.list_keys()))
        two.signal(1, signal.SIGCONT)
        assert [two.finish(0), two.finish(1)] == ["|", "|"]


def _state(pid: int | None) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def lose_leader(rank: int, count: int) -> tuple[float, str]:
    async def main() -> tuple[float, str]:
        async with opened("dead") as coordinator:
            await BYTES.run(coordinator, Topic("met"), b"", in_order)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(PeerFailedError, match="rank 0 gave no sign"):
                coordinator.stall_secs = SHORT_SECS
                await BYTES.run(coordinator, Topic("t"), b"", never)
            return time.monotonic() - began, ""

    return asyncio.run(main())


def test_a_dead_leader_is_named_within_the_deadline() -> None:
    with ranks(2) as two:
        two.start(0, lose_leader)
        two.start(1, lose_leader)
        secs, _ = two.finish(1)
        assert secs < 2 * SHORT_SECS + 2


# -- a rank leaves ----------------------------------------------------------------------------------


async def meet(coordinators: Iterable[StoreCoordinator], stall_secs: float = STALL_SECS) -> None:
    await asyncio.gather(*(coordinator.open("x", stall_secs=stall_secs) for coordinator in coordinators))


@asynccontextmanager
async def two_here(stall_secs: float) -> AsyncIterator[tuple[StoreCoordinator, StoreCoordinator]]:
    """Both ranks in this process, where every interleaving can be had."""
    store = dist.HashStore()
    both = [StoreCoordinator(store, rank=rank, world_size=2) for rank in range(2)]
    try:
        await meet(both, stall_secs)
        await asyncio.gather(*(BYTES.run(coordinator, Topic("met"), b"", in_order) for coordinator in both))
        yield both[0], both[1]
    finally:
        for coordinator in both:
            coordinator.close()


def test_a_line_about_a_missing_rank_costs_one_reading_of_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[int]] = []
    beats = StoreKeys.beats

    def counted(keys: StoreKeys, ranks: Sequence[int]) -> list[bytes]:
        read.append(ranks)
        return beats(keys, ranks)

    async def main() -> bytes:
        async with two_here(STALL_SECS) as (leader, other):
            monkeypatch.setattr(StoreKeys, "beats", counted)
            other.begin_call(Topic("load", 1))
            waiting = asyncio.create_task(BYTES.run(leader, Topic("save", 5), b"0", in_order))
            text = r"rank 1 has not called save\(\) for \d+ s; it was last seen opening its engine.*"
            await asyncio.to_thread(lines.wait_for, text, 3)
            _, found = await asyncio.gather(BYTES.run(other, Topic("save", 5), b"1", in_order), waiting)
            return found

    with early_lines() as lines:
        assert asyncio.run(main()) == b"0|1"
    told = sum("not called" in message or "not finished" in message for message in lines.messages)
    assert [message.endswith(REMEDY) for message in lines.messages if "not called" in message][:3] == [
        True,
        False,
        False,
    ]
    by_leader = [ranks for ranks in read if list(ranks) != [0]]  # on a slow machine, the other rank looks, too
    assert by_leader == [[1]] * len(by_leader)
    assert len(by_leader) <= told + 2  # one for its own first heartbeat, one for a line that came to nothing


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_after_the_leaders_word_leaves_the_topic_that_follows(leaving: int) -> None:
    async def main() -> tuple[float, str]:
        async with two_here(STALL_SECS) as both:
            first = (tell_apart(each, Topic("first"), b"", lambda _: [b"a", b"b"]) for each in both)
            assert await asyncio.gather(*first) == [b"a", b"b"]
            began = time.monotonic()
            # It has not heard the reply: what it gives up is "first".
            leaves = both[leaving].abort(Topic("first"), OSError(28, "No space left on device"), stage="write")
            stays = BYTES.run(both[1 - leaving], Topic("second"), b"", never)
            told, error = await asyncio.gather(leaves, stays, return_exceptions=True)
            assert isinstance(told, CallEnd)
            assert told.failure is not None
            assert not told.is_earlier
            assert isinstance(error, PeerFailedError)
            assert error.rank == leaving
            return time.monotonic() - began, str(error)

    secs, text = asyncio.run(main())
    assert secs < STALL_SECS / HEARTBEATS_A_STALL
    assert "No space" in text


async def given_up(coordinator: StoreCoordinator, topic: Topic) -> asyncio.Task[CallEnd]:
    """It has sent that it gives ``topic`` up, and waits for the leader's reply."""
    task = asyncio.create_task(coordinator.abort(topic, ValueError("bad"), stage="agree"))
    with anyio.fail_after(STALL_SECS):
        while topic not in coordinator._waits:
            await anyio.sleep(0.001)
    return task


def test_a_rank_leaves_once_it_has_heard_of_what_it_gives_up() -> None:
    """With the last rank to leave the leader's reply goes, and whoever still waits for it waits in vain."""

    async def main() -> list[str]:
        async with two_here(STALL_SECS) as (leader, other):
            order: list[str] = []
            heard = await given_up(other, Topic("t"))
            left = asyncio.create_task(other.leave())
            heard.add_done_callback(lambda _: order.append("heard"))
            left.add_done_callback(lambda _: order.append("left"))
            with pytest.raises(PeerFailedError, match="bad"):
                await BYTES.run(leader, Topic("t"), b"", never)
            await asyncio.gather(heard, left, leader.leave())
            told = heard.result().failure
            assert told is not None
            assert told.rank == 1
            return order

    assert asyncio.run(main()) == ["heard", "left"]


def test_a_rank_that_has_left_waits_for_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine ends, also where the leader never comes to what was given up."""
    monkeypatch.setattr(coordinator_module, "_GIVE_UP_SECS", 0.05)

    async def main() -> float:
        async with two_here(STALL_SECS) as (_, other):
            heard = await given_up(other, Topic("t"))
            began = time.monotonic()
            await other.leave()
            assert await heard == CallEnd()
            return time.monotonic() - began

    assert asyncio.run(main()) < STALL_SECS / HEARTBEATS_A_STALL


@pytest.mark.sampled
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_leaves_while_it_waits_tells_so_before_it_goes_and_leaves_no_keys(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank to leave deletes all keys: what another rank sets after that would stay for ever."""
    monkeypatch.setattr(heartbeats, "_POLL_SHARE", 1)
    monkeypatch.setattr(heartbeats, "POLL_SECS_MAX", 0.2)  # its wait ends long after leave() was called

    async def main() -> int:
        store = dist.HashStore()
        both = [StoreCoordinator(store, rank=rank, world_size=2) for rank in range(2)]
        try:
            await meet(both)
            waits = asyncio.create_task(BYTES.run(both[last], Topic("t"), b"", never))
            while Topic("t") not in both[last]._waits:
                await anyio.sleep(0.001)
            with anyio.move_on_after(SHORT_SECS if last else 0.1):  # the leader waits for the others to leave, too
                await both[1 - last].leave()
            await both[last].leave()
            with pytest.raises(EngineClosedError):
                await waits
            return store.num_keys()
        finally:
            for coordinator in both:
                coordinator.close()

    assert asyncio.run(main()) == 1, "the queue, empty"


def test_a_word_that_is_out_is_never_taken_back() -> None:
    async def main() -> None:
        async with two_here(STALL_SECS) as (leader, other):
            sent = BYTES.run(other, Topic("t"), b"1", in_order)
            heard = asyncio.create_task(sent)
            assert await BYTES.run(leader, Topic("t"), b"0", in_order) == b"0|1"
            assert await leader.abort(Topic("t"), ValueError("late"), stage="agree") == CallEnd()
            assert await heard == b"0|1"

    asyncio.run(main())


class HeldStoreCoordinator(StoreCoordinator):
    """The leader's reply waits at a gate."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        super().__init__(store, rank=rank, world_size=world_size)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def _send_replies(self, topic: Topic, replies: Sequence[bytes], then: Topic | None) -> None:
        self.reached.set()
        await self.gate.wait()
        await super()._send_replies(topic, replies, then)


def test_a_leader_that_is_cancelled_while_it_tells_has_told() -> None:
    async def main() -> bytes:
        store = dist.HashStore()
        leader, other = (HeldStoreCoordinator(store, rank=rank, world_size=2) for rank in range(2))
        await meet((leader, other))
        scope = anyio.CancelScope()

        async def lead() -> None:
            with scope:
                await BYTES.run(leader, Topic("t"), b"0", in_order)

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(lead)
                group.start_soon(_open_when_cancelled, leader, scope)
                return await BYTES.run(other, Topic("t"), b"1", in_order)
        finally:
            leader.close()
            other.close()

    assert asyncio.run(main()) == b"0|1"


async def _open_when_cancelled(leader: HeldStoreCoordinator, scope: anyio.CancelScope) -> None:
    await leader.reached.wait()
    scope.cancel()
    await anyio.lowlevel.checkpoint()
    leader.gate.set()


def test_a_cancelled_agreement_is_told_in_words() -> None:
    async def main() -> str:
        async with two_here(STALL_SECS) as (leader, other):
            with anyio.move_on_after(0):
                await BYTES.run(leader, Topic("t"), b"", never)
            with pytest.raises(PeerFailedError) as raised:
                await BYTES.run(other, Topic("t"), b"", never)
            return str(raised.value)

    assert asyncio.run(main()) == "rank 0 failed in t: CancelledError: the call was cancelled"


@pytest.mark.parametrize("failing", [0, 1])
def test_doubt_crosses_the_ranks(failing: int) -> None:
    async def main() -> None:
        async with two_here(STALL_SECS) as both:
            error = WriteError(5, "Input/output error", "root")
            error.in_doubt = True
            leaves = both[failing].abort(Topic("t"), error, stage="commit")
            stays = BYTES.run(both[1 - failing], Topic("t"), b"", never)
            for found in await asyncio.gather(leaves, stays, return_exceptions=True):
                error = found.failure if isinstance(found, CallEnd) else found
                assert isinstance(error, PeerFailedError)
                assert error.in_doubt

    asyncio.run(main())


# -- a rank is elsewhere ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "call"),
    [
        (Topic("save", 3), ("save", 3)),
        (Topic("save", 12, "planned"), ("save", 12)),
        (Topic("rollback", 3), ("save", 3)),
        (Topic("delete", 3), ("save", 3)),
        (Topic("save", 3, "room"), ("save", 3)),
        (Topic("load", 2, "round 1"), ("load", 2)),
        (Topic("the preemption"), None),
        (Topic("the opening"), None),
    ],
)
def test_the_call_that_a_topic_is_part_of(topic: Topic, call: tuple[str, int] | None) -> None:
    assert topic.call == call


async def keep_beating(coordinator: StoreCoordinator) -> None:
    while True:
        await coordinator.beat()
        await asyncio.sleep(SHORT_SECS / 10)  # the time that passes is what is tested


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("ended", [Topic("save", 5), Topic("rollback", 5)])
def test_a_rank_that_lives_but_has_ended_the_call_is_named_at_once(waiting: int, ended: Topic) -> None:
    async def main() -> tuple[float, PeerFailedError]:
        async with two_here(SHORT_SECS) as both:
            beating = asyncio.create_task(keep_beating(both[1 - waiting]))
            both[1 - waiting].end_call(ended)
            began = time.monotonic()
            with pytest.raises(PeerFailedError) as raised:
                async with asyncio.timeout(3 * SHORT_SECS):
                    await BYTES.run(both[waiting], Topic("save", 5, "planned"), b"", never)
            beating.cancel()
            return time.monotonic() - began, raised.value

    secs, error = asyncio.run(main())
    assert secs < SHORT_SECS
    assert error.rank == 1 - waiting
    assert "is elsewhere" in str(error)


def test_a_later_call_that_ended_first_hurries_nobody() -> None:
    async def main() -> bytes:
        async with two_here(SHORT_SECS) as (leader, other):
            for topic in (Topic("save", 6), Topic("save", 4), Topic("load", 5, "round 2"), Topic("the preemption")):
                other.end_call(topic)
            waiting = asyncio.create_task(BYTES.run(leader, Topic("save", 5), b"0", in_order))
            with anyio.move_on_after(1.25 * SHORT_SECS):  # the time that passes is what is tested
                await keep_beating(other)
            _, found = await asyncio.gather(BYTES.run(other, Topic("save", 5), b"1", in_order), waiting)
            return found

    assert asyncio.run(main()) == b"0|1"


def test_two_ranks_that_wait_in_different_calls_do_not_keep_each_other_alive() -> None:
    async def main() -> list[object]:
        async with two_here(SHORT_SECS) as (leader, other):
            leader.end_call(Topic("rollback", 5))  # which the other refused, and so numbers its next save 5
            ahead = asyncio.create_task(BYTES.run(leader, Topic("save", 6), b"", in_order))
            with pytest.raises(PeerFailedError, match=r"rank 0 does not come to save\(\) \(call 5\), it is elsewhere"):
                async with asyncio.timeout(3 * SHORT_SECS):
                    await BYTES.run(other, Topic("save", 5), b"", in_order)
            # From here on they are together again.
            return list(await asyncio.gather(ahead, BYTES.run(other, Topic("save", 6), b"", in_order)))

    assert asyncio.run(main()) == [b"|", b"|"]


@pytest.mark.sampled
@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("here", [slow(Topic("save", 2)), Topic("load", 1, "round 1")])
def test_ranks_that_wait_in_calls_of_another_kind_are_told_of_both(waiting: int, here: Topic) -> None:
    there = {Topic("save", 2): Topic("load", 1, "round 1"), Topic("load", 1, "round 1"): Topic("save", 2)}[here]

    async def main() -> tuple[float, list[str]]:
        async with two_here(SHORT_SECS) as both:
            both[waiting].begin_call(here)
            both[1 - waiting].begin_call(there)
            began = time.monotonic()
            works = [
                BYTES.run(both[waiting], here, b"", in_order),
                BYTES.run(both[1 - waiting], there, b"", in_order),
            ]
            async with asyncio.timeout(3 * SHORT_SECS):
                errors = await asyncio.gather(*works, return_exceptions=True)
            assert all(isinstance(error, PeerFailedError) for error in errors)
            return time.monotonic() - began, [str(error) for error in errors]

    secs, texts = asyncio.run(main())
    assert SHORT_SECS / 2 <= secs < SHORT_SECS + 1
    text = f"does not come to {here.text()}, it waits in {there.text()} for this one, which has not come there"
    assert f"rank {1 - waiting} {text}" in texts[0]


def test_a_rank_that_rolls_back_where_another_saves_is_found_out() -> None:
    async def main() -> list[str]:
        async with two_here(SHORT_SECS) as both:
            works = []
            for coordinator, topic in zip(both, (Topic("rollback", 4), Topic("save", 4)), strict=True):
                coordinator.begin_call(topic)
                works.append(BYTES.run(coordinator, topic, b"", in_order))
            async with asyncio.timeout(3 * SHORT_SECS):
                return [str(error) for error in await asyncio.gather(*works, return_exceptions=True)]

    one, other = asyncio.run(main())
    assert "it waits in save() (call 4) for this one" in one or "it waits in rollback() (call 4) for this one" in other


@pytest.mark.sampled
@pytest.mark.parametrize(("rank", "begun"), [(0, Topic("load", 1)), (1, Topic("save", 2))])
def test_a_rank_that_waits_elsewhere_is_waited_for_if_either_has_begun_the_others_call(rank: int, begun: Topic) -> None:
    async def main() -> bytes:
        async with two_here(SHORT_SECS) as both:
            leader, other = both
            leader.begin_call(Topic("save", 2))
            other.begin_call(Topic("load", 1))
            both[rank].begin_call(begun)  # it is on its way there, in another thread
            saving = asyncio.create_task(BYTES.run(leader, Topic("save", 2), b"0", in_order))
            loading = asyncio.create_task(BYTES.run(other, Topic("load", 1, "round 1"), b"1", in_order))
            await asyncio.wait([loading, saving], timeout=1.25 * SHORT_SECS)  # the time that passes is what is tested
            found = BYTES.run(other, Topic("save", 2), b"1", in_order)
            met = BYTES.run(leader, Topic("load", 1, "round 1"), b"0", in_order)
            return b" ".join(await asyncio.gather(loading, saving, found, met))

    assert asyncio.run(main()) == b"0|1 0|1 0|1 0|1"


@pytest.mark.parametrize(("over", "moves"), [(False, True), (True, True), (True, False)])
def test_who_waits_in_a_call_that_has_ended_here_is_not_waited_for(over: bool, moves: bool) -> None:
    """It was skipped here, say, and that other rank never heard of it. An old sign of life tells of an old wait."""
    own = Heartbeat(1, (("save", 3),) if over else (), begun={"save": 3, "load": 1})
    wait = RankWait(Topic("load", 1, "round 1"), None, stage="load", stall_secs=1e-6, name="x")
    for beat in range(3):  # at every look, and each time with another sign of life
        waits = (Topic("rollback", 3),)
        there = msgspec.msgpack.encode(Heartbeat(beat if moves else 1, begun={"save": 3}, waits=waits))
        found = wait.look([1], [there], own, is_met=True)
    assert (found is not None and "waits in rollback() (call 3) for this one" in str(found.error)) is (over and moves)


def test_many_calls_of_one_kind_leave_what_ended_of_another_told() -> None:
    async def main() -> None:
        async with two_here(SHORT_SECS) as (leader, other):
            leader.end_call(Topic("load", 1, "round 1"))
            for number in range(40):
                leader.end_call(Topic("save", number))
            beating = asyncio.create_task(keep_beating(leader))
            with pytest.raises(PeerFailedError, match="that call has ended there"):
                async with asyncio.timeout(3 * SHORT_SECS):
                    await BYTES.run(other, Topic("load", 1, "round 1"), b"", never)
            beating.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("closing", [0, 1])
def test_a_rank_that_has_closed_is_not_waited_for(closing: int) -> None:
    async def main() -> float:
        async with two_here(SHORT_SECS) as both:
            with anyio.move_on_after(SHORT_SECS / HEARTBEATS_A_STALL):  # the leader waits for the others to leave, too
                await both[closing].leave()
            began = time.monotonic()
            with pytest.raises(PeerFailedError, match=f"rank {closing} does not come to t, it has closed its engine"):
                await BYTES.run(both[1 - closing], Topic("t"), b"", never)
            return time.monotonic() - began

    assert asyncio.run(main()) < SHORT_SECS


def test_a_leader_that_was_waited_for_in_vain_is_not_waited_for_again() -> None:
    async def main() -> tuple[float, float]:
        async with two_here(SHORT_SECS) as (_, other):
            began = time.monotonic()
            with pytest.raises(PeerFailedError, match="rank 0 gave no sign of life") as raised:
                await BYTES.run(other, Topic("t"), b"", never)
            lost = time.monotonic()
            assert await other.abort(Topic("t"), raised.value, stage="agree") == CallEnd()
            return lost - began, time.monotonic() - lost

    waited, left = asyncio.run(main())
    assert waited >= SHORT_SECS
    assert left < SHORT_SECS / HEARTBEATS_A_STALL


# -- the store --------------------------------------------------------------------------------------


def test_a_store_that_is_gone_is_an_error_that_says_so() -> None:
    async def main() -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        coordinator = StoreCoordinator(client, rank=1, world_size=2)
        coordinator.register("x", stall_secs=STALL_SECS)
        try:
            del server
            with pytest.raises(PeerFailedError, match="store of the ranks cannot be reached"):
                await coordinator.open("x", stall_secs=STALL_SECS)
        finally:
            coordinator.close()

    asyncio.run(main())


def test_a_request_that_the_store_refuses_blames_no_dead_process() -> None:
    class Refusing(dist.HashStore):
        def append(self, key: str, value: str) -> None:
            raise RuntimeError("the value is too large")

    async def main() -> None:
        async with two_here(STALL_SECS) as (_, other):
            assert other._keys is not None
            other._keys._store = Refusing()
            with pytest.raises(
                PeerFailedError, match=r"refused a request \(RuntimeError: the value is too large\)"
            ) as raised:
                await BYTES.run(other, Topic("t"), b"", never)
            assert "has ended" not in str(raised.value)

    asyncio.run(main())


def test_a_closed_coordinator_says_so() -> None:
    async def main() -> None:
        async with two_here(STALL_SECS) as (leader, _):
            leader.close()
            leader.close()
            with pytest.raises(EngineClosedError):
                await BYTES.run(leader, Topic("t"), b"", never)

    asyncio.run(main())


def test_a_store_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    async def main() -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        coordinator = StoreCoordinator(server, rank=1, world_size=2)
        coordinator.register("x", stall_secs=0.1)
        connection, gate = coordinator._client, threading.Event()
        assert connection is not None
        connection.begin(lambda: gate.wait(STALL_SECS), wait_secs=0)
        with pytest.raises(StallError, match="not answering within"):
            await coordinator.open("x", stall_secs=0.1)
        gate.set()
        await asyncio.to_thread(coordinator.close)

    asyncio.run(main())
