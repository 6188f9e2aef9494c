"""One typed exchange: what each rank sends and is replied has the types of its kind, or the error names the rank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import anyio
import pytest
import torch.distributed as dist

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.coordinator import Coordinator, SoloCoordinator
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.store_coordinator import StoreCoordinator

SECS = 10.0
SUM: Exchange[int, str] = Exchange(int, str, stage="agree")
OTHER: Exchange[str, int] = Exchange(str, int, stage="agree")
"""As of another version: its messages and replies are none of :data:`SUM`."""


async def add(numbers: Sequence[int]) -> str:
    return f"{numbers} make {sum(numbers)}"


async def two_ranks(stall_secs: float = SECS) -> tuple[StoreCoordinator, StoreCoordinator]:
    store = dist.HashStore()
    one, other = (StoreCoordinator(store, rank=rank, world_size=2) for rank in range(2))
    await asyncio.gather(*(each.open("x", stall_secs=stall_secs) for each in (one, other)))
    return one, other


def close(*coordinators: Coordinator) -> None:
    for each in coordinators:
        each.close()


async def test_one_rank_decides_on_its_own_message_as_one_of_many_does() -> None:
    assert await SUM.run(SoloCoordinator(), Topic("t"), 5, add) == "(5,) make 5"
    ranks = await two_ranks()
    try:
        found = await asyncio.gather(*(SUM.run(each, Topic("t"), 5 + rank, add) for rank, each in enumerate(ranks)))
    finally:
        close(*ranks)
    assert found == ["(5, 6) make 11"] * 2


async def test_the_leader_may_act_between_the_two_halves() -> None:
    async def act(coordinator: Coordinator, number: int) -> tuple[tuple[int, ...], str]:
        numbers = await SUM.gather(coordinator, Topic("t"), number)
        return numbers, await SUM.broadcast(
            coordinator, Topic("t"), [f"rank {coordinator.rank} has acted on {len(numbers)}"]
        )

    assert await act(SoloCoordinator(), 3) == ((3,), "rank 0 has acted on 1")
    ranks = await two_ranks()
    try:
        leader, other = await asyncio.gather(*(act(each, 3 + each.rank) for each in ranks))
    finally:
        close(*ranks)
    assert leader == ((3, 4), "rank 0 has acted on 2")
    assert other == ((), "rank 0 has acted on 2")


async def test_each_rank_may_get_a_reply_of_its_own() -> None:
    ranks = await two_ranks()
    try:
        for each in reversed(ranks):
            await SUM.gather(each, Topic("t"), 0) if each.rank else None
        replies = (SUM.broadcast(each, Topic("t"), ["for 0", "for 1"], then=Topic("u")) for each in ranks)
        assert await asyncio.gather(*replies) == ["for 0", "for 1"]
    finally:
        close(*ranks)


async def test_a_message_that_is_none_of_this_kind_fails_the_exchange_on_all_and_names_its_rank() -> None:
    async def never(messages: Sequence[object]) -> int:
        raise AssertionError(messages)

    one, other = await two_ranks()
    try:
        calls = SUM.run(one, Topic("t"), 5, add), OTHER.run(other, Topic("t"), "five", never)
        errors = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        close(one, other)
    for error in errors:
        assert isinstance(error, PeerFailedError)
        assert error.rank == 1
        assert "run one version of aio_ckpt on all ranks" in str(error)


async def test_a_reply_that_is_none_of_this_kind_names_the_leader() -> None:
    one, other = await two_ranks()
    try:
        calls = SUM.broadcast(one, Topic("t"), ["text"]), OTHER.broadcast(other, Topic("t"), [0])
        found, error = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        close(one, other)
    assert found == "text"
    with pytest.raises(PeerFailedError, match="rank 0 sent"):
        raise error if isinstance(error, BaseException) else AssertionError(error)


async def test_a_rank_that_cannot_send_its_message_keeps_no_rank_waiting() -> None:
    one, other = await two_ranks()
    try:
        with anyio.fail_after(SECS / 2):
            calls = SUM.run(one, Topic("t"), 5, add), SUM.run(other, Topic("t"), object(), add)  # type: ignore[arg-type]
            error, cause = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        close(one, other)
    assert isinstance(cause, TypeError)
    assert isinstance(error, PeerFailedError)
    assert str(error) == f"rank 1 failed in t: TypeError: {cause}"


async def test_a_rank_that_is_cancelled_keeps_no_rank_waiting_in_what_follows() -> None:
    one, other = await two_ranks()
    acts, gate, scope = asyncio.Event(), asyncio.Event(), anyio.CancelScope()

    async def act(numbers: Sequence[int]) -> str:
        acts.set()
        await gate.wait()
        return "done"

    async def be_cancelled() -> None:
        with scope:
            await SUM.run(other, Topic("t"), 6, act, then=Topic("u"))

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(be_cancelled)
            leader = asyncio.create_task(SUM.run(one, Topic("t"), 5, act, then=Topic("u")))
            await acts.wait()
            scope.cancel()
            gate.set()
            assert await leader == "done", "the leader had all messages"
            with anyio.fail_after(SECS / 2), pytest.raises(PeerFailedError, match=r"rank 1 failed in u.*cancelled"):
                await SUM.run(one, Topic("u"), 5, act)
    finally:
        close(one, other)


async def test_a_leader_that_acts_for_longer_than_a_stall_is_waited_for() -> None:
    one, other = await two_ranks(1.0)

    async def act(numbers: Sequence[int]) -> str:
        await asyncio.sleep(1.5)  # the time that passes is what is tested
        return "done"

    try:
        found = await asyncio.gather(*(SUM.run(each, Topic("t"), 5, act) for each in (one, other)))
    finally:
        close(one, other)
    assert found == ["done"] * 2
