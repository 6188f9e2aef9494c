"""What is said of the ranks that a wait waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from aio_ckpt.ranks.heartbeats import heartbeat_pauses
from aio_ckpt.ranks.messages import HEARTBEATS, Call, Heartbeat, Topic
from aio_ckpt.ranks.missing_ranks import REMEDY, RENDEZVOUS, SHOWN, RankWait

SAVE = Call("save", 5, 200)
BEFORE = Call("save", 4, 199)
NOTHING: Mapping[str, Call] = {}
SAVED = {"load": Call("load", 1), "save": BEFORE}


def beat(*calls: Call, waits: tuple[Topic, ...] = (), has_left: bool = False) -> Heartbeat:
    begun = dict(call.numbering for call in calls)
    return Heartbeat(1, (), has_left, begun, waits, calls[-1] if calls else None)


def line(*beats: Heartbeat | None, heard: Mapping[str, Call] = NOTHING, **changed: Any) -> str:
    topic, call = changed.pop("topic", Topic("save", 5)), changed.pop("call", SAVE)
    wait = RankWait(topic, call, stage="agree", stall_secs=600.0, name="/ckpt")
    wait._began = time.monotonic() - changed.pop("silent", 0.0)
    ranks = changed.pop("ranks", range(1, len(beats) + 1))
    sent = [b"" if found is None else msgspec.msgpack.encode(found) for found in beats]
    wait.look(ranks, [*sent, *[b""] * (len(ranks) - len(sent))], Heartbeat(0), is_met=True)
    return wait.line("30 s", heard=heard, leader=0, is_first=changed.pop("is_first", False))


NOT_CALLED = "rank 1 has not called save() of step 200 for 30 s"


@pytest.mark.parametrize(
    ("seen", "heard", "where"),
    [
        (beat(BEFORE, Call("load", 1)), NOTHING, "; it was last seen in load()"),
        (beat(BEFORE, Call("load", 2)), SAVED, "; it was last seen in load()"),
        (beat(Call("load", 1)), SAVED, "; it was last seen in save() of step 199"),  # the heartbeat is older
        (beat(), SAVED, "; it was last seen in save() of step 199"),
        (None, SAVED, "; it was last seen in save() of step 199"),
        (beat(Call("load", 2), waits=(Topic("load", 2, "round 3"),)), SAVED, "; it waits in load()"),
        (
            beat(Call("load", 1), waits=(Topic("load", 1, "round 3"),)),
            SAVED,
            "; it was last seen in save() of step 199",
        ),
        (beat(Call("rollback", 5), waits=(Topic("rollback", 5),)), SAVED, "; it waits in rollback()"),
        (beat(BEFORE, has_left=True), SAVED, "; it closed its engine"),
        (beat(), NOTHING, "; it was last seen opening its engine"),
        (None, NOTHING, ""),
    ],
)
def test_a_rank_that_has_not_come_is_named_with_its_newest_call(
    seen: Heartbeat | None, heard: Mapping[str, Call], where: str
) -> None:
    assert line(seen, heard=heard) == NOT_CALLED + where


def test_the_first_line_about_a_rank_that_has_not_come_ends_with_what_to_do() -> None:
    seen = "; it was last seen in save() of step 199"
    assert line(None, heard=SAVED, is_first=True) == NOT_CALLED + seen + REMEDY
    assert REMEDY not in line(beat(SAVE), heard=SAVED, is_first=True), "it is in the call"
    assert REMEDY not in line(None, topic=RENDEZVOUS, call=None, is_first=True)


def test_a_rank_that_has_come_is_waited_for_to_finish() -> None:
    text = "rank 1 has not finished the part of save() of step 200 for 30 s"
    assert line(beat(SAVE), heard=SAVED) == text
    assert (
        line(beat(SAVE, Call("load", 2), waits=(Topic("load", 2),)), heard=SAVED) == text
    )  # a save goes on beside a load
    assert line(None, heard={"save": SAVE}) == text  # it has sent its plan
    assert line(beat(SAVE), topic=Topic("save", 5, "room")).startswith(
        "rank 1 has not finished the part of save() of step 200"
    )


def test_ranks_alike_are_named_together_and_only_the_first_of_many() -> None:
    late, busy = beat(Call("load", 2)), beat(SAVE)
    assert line(late, busy, late, heard=SAVED) == (
        "ranks 1, 3 have not called save() of step 200 for 30 s; each was last seen in load(). "
        "Rank 2 has not finished the part of save() of step 200 for 30 s"
    )
    many = line(*[late] * SHOWN, heard=SAVED, ranks=range(1, 1000))
    assert many == (
        "ranks 1, 2, 3, 4, 5 have not called save() of step 200 for 30 s; each was last seen in load(). "
        "994 more ranks are missing"
    )


def test_a_rank_that_waits_for_a_leader_that_waits_says_so() -> None:
    waits = beat(SAVE, waits=(Topic("save", 5),))
    assert line(waits, ranks=[0]) == "save() of step 200 has waited 30 s for other ranks: rank 0 logs which"
    assert line(beat(SAVE), ranks=[0]) == "rank 0 has not finished the part of save() of step 200 for 30 s"
    meeting = line(beat(waits=(RENDEZVOUS,)), ranks=[0], topic=RENDEZVOUS, call=None)
    assert meeting == "the engine on /ckpt has waited 30 s for other ranks: rank 0 logs which"


def test_topics_that_are_no_call_have_words_of_their_own() -> None:
    assert line(None, topic=RENDEZVOUS, call=None) == "rank 1 has not opened an engine on /ckpt for 30 s"
    assert line(beat(), topic=Topic("the preemption"), call=None, heard=SAVED) == (
        "rank 1 has not answered in the preemption for 30 s; it was last seen in save() of step 199"
    )


@pytest.mark.parametrize(
    ("topic", "step", "text"),
    [
        (Topic("save", 5), 200, "the save of step 200"),
        (Topic("save", 5, "planned"), 200, "the save of step 200 (once the ranks have planned it)"),
        (Topic("save", 5, "room"), None, "save() (call 5, whether there is room)"),
        (Topic("the save timer 1", part="period 3"), None, "the save timer 1 (period 3)"),
        (Topic("agreement 1 on x", part="outcome"), None, "agreement 1 on x (how it ended)"),
    ],
)
def test_a_topic_is_named_in_the_words_of_a_user(topic: Topic, step: int | None, text: str) -> None:
    assert topic.text(step) == text


def test_silence_is_told_of_once_two_heartbeats_are_missing() -> None:
    assert "heartbeat" not in line(beat(SAVE), silent=299)
    assert line(beat(SAVE), silent=300).endswith("for 30 s; it gave no heartbeat for 5 min")
    seen = "it was last seen in save() of step 199 and gave no heartbeat for 5 min"
    assert line(None, heard=SAVED, silent=300) == f"{NOT_CALLED}; {seen}"


def test_nobody_awaited_gives_no_line() -> None:
    assert line() == ""


def test_a_heartbeat_of_a_rank_names_its_newest_call_and_one_without_is_read() -> None:
    told = beat(BEFORE, SAVE, waits=(Topic("save", 5),))
    assert HEARTBEATS.decode(msgspec.msgpack.encode(told)) == told
    assert HEARTBEATS.decode(msgspec.msgpack.encode([1, [], False, {}, []])).call is None


def test_the_first_heartbeat_of_a_call_comes_before_the_first_line() -> None:
    pauses = heartbeat_pauses(600)
    assert [next(pauses) for _ in range(3)] == [15, 150, 150]
    pauses = heartbeat_pauses(20)
    assert [next(pauses) for _ in range(3)] == [5, 5, 5]


def test_the_time_in_which_this_process_was_suspended_is_no_silence_of_a_rank() -> None:
    wait = RankWait(Topic("save", 5), SAVE, stage="agree", stall_secs=600.0, name="/ckpt")
    sent = [msgspec.msgpack.encode(beat(SAVE))]
    assert wait.look([1], sent, Heartbeat(0), is_met=True) is None
    wait._seen = {rank: (found, since - 700) for rank, (found, since) in wait._seen.items()}
    wait.forgive(650)
    assert wait.look([1], sent, Heartbeat(0), is_met=True) is None
    wait._seen = {rank: (found, since - 600) for rank, (found, since) in wait._seen.items()}
    lost = wait.look([1], sent, Heartbeat(0), is_met=True)
    assert lost is not None
    assert "rank 1 gave no sign of life in the save of step 200 for 600.0 s" in str(lost.error)
