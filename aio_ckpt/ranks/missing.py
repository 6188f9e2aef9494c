"""Lines about the ranks that a wait waits for: what each has not done, and where it was last seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aio_ckpt.ranks.messages import Call, Heartbeat, Topic
from aio_ckpt.runtime.waiting import duration_text

SHOWN = 5
"""Most ranks that a line or an error names."""
MEETING = Topic("the rendezvous")
"""Topic in which the engines of one root meet."""
REMEDY = ". Look at the log and the stack (py-spy dump) there: every rank must make the same calls"
"""End of the first line about a rank that has not made a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """The ranks that a wait waits for, and the first of them in detail."""

    ranks: Sequence[int]
    """All of them."""
    beats: Sequence[Heartbeat | None]
    """Last heartbeat of each of the first ``SHOWN``; None for none."""
    silent_secs: Sequence[float]
    """Seconds since this wait saw the heartbeat of each of those change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What this rank knows by messages, which come sooner than heartbeats.

    A leader has heard all ranks if it has heard one, and the others hear the leader only.
    """

    numbers: Mapping[str, int]
    """Highest number of a call in which they sent a message, by the kind of ``Topic.call``."""
    last: Call | None
    """The last call in which they sent a message; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What one line says of one rank, or of several alike."""

    is_in_call: bool
    """Whether the rank has begun the call that this rank waits in."""
    where: str
    """Where the rank is; empty if it is in that call."""
    silence: str
    """How long the rank gave no heartbeat, as text; empty if it need not have given one."""


def line_about(
    topic: Topic,
    call: Call | None,
    awaited: Awaited,
    heard: Heard,
    *,
    waited: str,
    name: str,
    leader: int,
    heartbeat_secs: float,
    is_first: bool,
) -> str:
    """Return the line about a wait in ``topic``, which is part of ``call``; empty if no rank is awaited any more.

    Args:
        topic: what the ranks agree on.
        call: the call of this rank that the topic is part of; None if it is part of none.
        awaited: the ranks that this rank waits for.
        heard: what they have told so far.
        waited: the duration of the wait as text.
        name: name of the engine.
        leader: the rank that leads. If it waits in the same topic, it logs the missing ranks.
        heartbeat_secs: time between two heartbeats of a rank that is in a call.
        is_first: whether this is the first line about the wait. It tells what to do about a rank that is not in the
            call.
    """
    if not awaited.ranks:
        return ""
    waiting = call.text if call else f"the engine on {name}" if topic == MEETING else topic.text()
    first = awaited.beats[0]
    if awaited.ranks[0] == leader and first is not None and topic in first.waits:
        return f"{waiting} has waited {waited} for other ranks: rank {leader} logs which"
    groups: dict[_State, list[int]] = {}
    for rank, beat, silent_secs in zip(awaited.ranks, awaited.beats, awaited.silent_secs, strict=False):
        silence = duration_text(silent_secs) if silent_secs >= 2 * heartbeat_secs else ""
        groups.setdefault(_state(call, beat or Heartbeat(0), heard, silence), []).append(rank)
    lines = [_line(state, ranks, topic, call, waited, name) for state, ranks in groups.items()]
    more = len(awaited.ranks) - len(awaited.beats)
    told = [*lines, *([f"{more} more ranks are missing"] if more else [])]
    remedy = REMEDY if is_first and call is not None and not all(state.is_in_call for state in groups) else ""
    return ". ".join([told[0], *(f"{line[0].upper()}{line[1:]}" for line in told[1:])]) + remedy


def names_of(ranks: Sequence[int]) -> str:
    """Return the names of ``ranks``, the first ``SHOWN`` of them: "rank 1", "ranks 1, 2"."""
    names = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _state(call: Call | None, beat: Heartbeat, heard: Heard, silence: str) -> _State:
    if call is not None and _is_in(call, beat, heard):
        return _State(is_in_call=True, where="", silence=silence)
    seen = beat.call
    if heard.last is not None and (seen is None or heard.numbers.get(seen.numbering[0], 0) >= seen.number):
        seen = heard.last  # its message came after this heartbeat
    if beat.has_left:
        where = "closed its engine"
    elif seen is None:
        where = "was last seen opening its engine" if beat.count else ""
    elif seen is beat.call and any(seen.has(topic) for topic in beat.waits):
        where = f"waits in {seen.text}"
    else:
        where = f"was last seen in {seen.text}"
    return _State(is_in_call=False, where=where, silence=silence)


def _is_in(call: Call, beat: Heartbeat, heard: Heard) -> bool:
    kind, number = call.numbering
    if heard.numbers.get(kind, 0) >= number:
        return True
    is_other = beat.call is not None and beat.call.numbering == call.numbering and beat.call.kind != call.kind
    return beat.begun.get(kind, 0) >= number and not is_other


def _line(state: _State, ranks: Sequence[int], topic: Topic, call: Call | None, waited: str, name: str) -> str:
    if state.is_in_call and call is not None:
        lack = f"finished the part of {call.text}"
    elif call is not None:
        lack = f"called {call.text}"
    else:
        lack = f"opened an engine on {name}" if topic == MEETING else f"answered in {topic.text()}"
    have, each = ("has", "it") if len(ranks) == 1 else ("have", "each")
    line = f"{names_of(ranks)} {have} not {lack} for {waited}"
    notes = [state.where, f"gave no heartbeat for {state.silence}" if state.silence else ""]
    told = " and ".join(filter(None, notes))
    return f"{line}; {each} {told}" if told else line
