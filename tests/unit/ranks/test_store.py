"""The store of the ranks: its thread may be stuck, and no rank's keys are taken from under another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import anyio
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from log_lines import early_lines

from aio_ckpt.errors import StallError
from aio_ckpt.ranks.failure import Failure
from aio_ckpt.ranks.messages import Frame, Heartbeat, Reply
from aio_ckpt.ranks.store import Rendezvous, StoreClient, StoreKeys
from aio_ckpt.runtime.futures import run_cancellable
from aio_ckpt.runtime.portal import ON_SUBMIT

SECS = 10.0


async def test_a_load_ends_although_the_thread_that_asks_the_store_does_not() -> None:
    """Its deadline is that of the question: what waits for its threads does not wait for this one."""
    connection, answer = StoreClient("ranks", host_rank=3), threading.Event()
    late = threading.Timer(SECS, answer.set)  # so that it fails, and does not hang
    late.start()
    try:
        with anyio.fail_after(SECS), pytest.raises(StallError, match=r"not answering within 0\.05 s.*rank 3"):
            await run_cancellable(Future(), lambda: connection.ask(answer.wait, limit_secs=0.05))
        assert not answer.is_set(), "the thread is still about it"
    finally:
        late.cancel()
        answer.set()
        connection.close()


async def test_a_store_that_does_not_answer_is_told_of() -> None:
    connection, answer = StoreClient("ranks", host_rank=3), threading.Event()
    with early_lines() as lines:
        try:
            asking = asyncio.create_task(connection.ask(answer.wait, limit_secs=SECS))
            text = r"the store of the ranks has not answered for \d+ s: look at .* rank 3 or its launcher"
            await asyncio.to_thread(lines.wait_for, text, 2)
        finally:
            answer.set()
        assert await asking
    connection.close()


def test_a_blocked_thread_is_told_of_the_store_and_of_its_own_deadline() -> None:
    """As the constructor of an engine, which enters the rendezvous."""
    connection, answer = StoreClient("ranks", host_rank=3), threading.Event()
    opener = threading.Thread(target=lambda: connection.begin(answer.wait, wait_secs=SECS))
    with early_lines() as lines:
        opener.start()
        try:
            lines.wait_for(
                r"the store of the ranks has not answered .* rank 3 .*; this thread waits for 10 s at most", 2
            )
        finally:
            answer.set()
            opener.join(SECS)
    connection.close()


def test_a_blocked_thread_goes_on_at_its_deadline() -> None:
    connection, answer = StoreClient("ranks", host_rank=3), threading.Event()
    assert not connection.begin(answer.wait, wait_secs=0.05).done()
    answer.set()
    connection.close()


async def test_a_question_leaves_the_watcher_as_it_was() -> None:
    connection, told = StoreClient("ranks", host_rank=0), list[object]()
    token = ON_SUBMIT.set((told.append,))
    try:
        assert await connection.ask(lambda: 7, limit_secs=SECS) == 7
        assert ON_SUBMIT.get() == (told.append,)
        assert not told
    finally:
        ON_SUBMIT.reset(token)
        connection.close()


def boards(store: dist.Store, count: int) -> list[StoreKeys]:
    return [StoreKeys(store, rank=rank, world_size=count) for rank in range(count)]


def test_a_word_stays_until_the_last_rank_has_taken_it_and_each_remembers_it() -> None:
    store = dist.HashStore()
    leader, early, late = boards(store, 3)
    for number in range(100):
        leader.put_reply(f"room {number}", Reply(b"%d" % number))
        assert early.reply(f"room {number}") == Reply(b"%d" % number)
    assert early.reply("room 99") == Reply(b"99")
    assert [late.reply(f"room {number}") for number in range(100)] == [Reply(b"%d" % n) for n in range(100)]
    assert store.num_keys() == 0


def test_the_first_word_on_a_topic_stands() -> None:
    leader, other = boards(dist.HashStore(), 2)
    leader.put_reply("save 1", Reply(b"committed"))
    leader.put_reply("save 1", Reply(b"", failure=Failure(0, "write", "too late")))
    assert other.reply("save 1") == Reply(b"committed")


@given(order=st.permutations(range(3)), takes=st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_last_to_leave_clears_the_board_whatever_was_not_taken(order: list[int], takes: list[bool]) -> None:
    store = dist.HashStore()
    each = boards(store, 3)
    each[0].put_reply("told", Reply(b"x"))
    each[0].put_reply("apart", Reply(b"", is_each=True), (b"a", b"b", b"c"))
    each[1].send("unanswered", Frame(1, b"m"))
    each[2].raise_flag("preempted", wakes=[0, 1])
    for keys, is_taken in zip(each, takes, strict=True):
        keys.beat(Heartbeat(1))
        if is_taken and keys is not each[0]:
            assert keys.reply("apart") is not None
    for rank in order[:-1]:
        each[rank].leave()
        assert each[rank].have_all_left() is None
        assert all(each[order[-1]].beats([order[-1]])), "nothing is taken from whoever is still here"
        assert order[-1] == 0 or each[order[-1]].reply("told") == Reply(b"x")
    each[order[-1]].leave()
    assert each[order[0]].have_all_left()
    assert store.num_keys() == 0


def test_an_engine_that_has_heard_where_to_go_is_answered_no_more() -> None:
    store = dist.HashStore()
    leader, other = (Rendezvous(store, world_size=2, name=name) for name in ("a0", "a1"))
    leader.enter(0, "w")
    assert leader.claim() is None
    other.enter(1, "w")
    assert leader.claim() is None, "the other has not accepted yet"
    assert leader.present() == {0: "a0"}
    assert other.answered() is None
    assert leader.claim() == {0: "a0", 1: "a1"}
    leader.answer(["a1"], b"there")
    assert other.answered() == b"there"
    leader.answer(["a1"], b"nowhere")
    assert other.answered() == b"there"
    assert not other.withdraw()
    assert store.num_keys() == 1


def test_an_engine_of_a_process_that_died_is_not_met_if_another_comes_in_its_place() -> None:
    """The store of torchrun keeps its keys when the ranks are started again."""
    store = dist.HashStore()
    dead = Rendezvous(store, world_size=3, name="dead")
    dead.enter(1, "before")
    leader, one, two = (Rendezvous(store, world_size=3, name=f"a{rank}") for rank in range(3))
    leader.enter(0, "w")
    two.enter(2, "w")
    assert leader.claim() is None
    assert two.answered() is None
    assert leader.claim() is None
    assert sorted(leader.present()) == [0, 2]
    one.enter(1, "w")
    assert leader.claim() is None
    assert one.answered() is None
    assert leader.claim() == {0: "a0", 1: "a1", 2: "a2"}
    leader.answer(["a1", "a2"], b"there")
    assert [one.answered(), two.answered()] == [b"there"] * 2
    assert store.num_keys() == 1, "the queue, with the entry of the dead one"


@given(order=st.permutations(["polls", "leader", "withdraws", "polls", "leader"]))
def test_a_leader_that_gives_up_leaves_no_key_whenever_the_other_comes_to_know(order: list[str]) -> None:
    store = dist.HashStore()
    leader, other = (Rendezvous(store, world_size=3, name=name) for name in ("a0", "a1"))
    leader.enter(0, "w")
    other.enter(1, "w")
    leader.claim()
    party: Mapping[int, str] | None = None
    has_withdrawn = False
    for what in order:
        if what == "polls" and not has_withdrawn:
            other.answered()
        elif what == "withdraws":
            has_withdrawn = other.withdraw()
        elif what == "leader" and party is None:
            party, _ = leader.dismiss(withdraws_alone=False)
        elif what == "leader":
            leader.answer([name for rank, name in (party or {}).items() if rank], b"no")
    assert has_withdrawn or other.answered() == b"no"
    assert store.num_keys() == 1, "the queue"


class Waitless(dist.HashStore):
    """``get`` waits for a key that somebody deletes behind a ``check``; here it is none of the ways to ask."""

    def get(self, key: str) -> bytes:
        raise AssertionError(f"{key} would be waited for")

    multi_get = wait = get  # type: ignore[assignment]


def test_nothing_on_a_board_or_in_a_lobby_waits_for_a_key() -> None:
    store = Waitless()
    leader, other = boards(store, 2)
    assert other.beats([0, 1]) == [b"", b""]
    leader.beat(Heartbeat(1))
    assert list(map(bool, other.beats([0, 1]))) == [True, False]
    assert other.reply("apart") is None
    other.send("apart", Frame(1, b"m"))
    assert leader.frames("apart") == [Frame(1, b"m")]
    leader.put_reply("apart", Reply(b"", is_each=True), (b"a", b"\0b"))
    assert other.reply("apart") == Reply(b"\0b", is_each=True)
    other.raise_flag("preempted", wakes=[0])
    leader.lower_flag("preempted")
    ones, others = Rendezvous(store, world_size=2, name="leads"), Rendezvous(store, world_size=2, name="comes")
    ones.enter(0, "world")
    others.enter(1, "world")
    assert ones.claim() is None
    assert others.answered() is None
    assert ones.claim() == {0: "leads", 1: "comes"}
    assert others.answered() is None
    ones.answer(["comes"], b"here")
    assert others.answered() == b"here"
    for keys in (other, leader):
        keys.leave()
    assert store.num_keys() == 1, "the queue, which is empty"
