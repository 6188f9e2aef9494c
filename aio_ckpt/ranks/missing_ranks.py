"""The ranks that one wait misses: which of them will not come, and the log lines about the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.message_texts import SHOWN, numbered
from aio_ckpt.ranks.messages import HEARTBEATS, Call, Heartbeat, Topic
from aio_ckpt.runtime.waiting import duration_text

HEARTBEATS_A_STALL = 4
"""Heartbeats within ``stall_secs``. Several, because one may be late."""
RENDEZVOUS = Topic("the rendezvous")
"""Topic in which the engines of one root meet."""
REMEDY = ". Look at the log and the stack (py-spy dump) there: every rank must make the same calls"
"""End of the first line about a rank that has not made a call."""
_SAME_ORDER = "every rank must make the same calls in the same order; engines opened anew on all ranks begin anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPeer:
    """A rank that this wait waits for in vain."""

    error: PeerFailedError
    """Names the rank and says why it will not come."""
    left_behind: Heartbeat | None = None
    """Last heartbeat of the rank if it has closed its engine, else None."""
    is_silent: bool = False
    """Whether the rank gave no heartbeat for ``stall_secs``."""


class RankWait:
    """One wait for other ranks in one topic, and what it has seen of those that are missing."""

    def __init__(self, topic: Topic, call: Call | None, *, stage: str, stall_secs: float, name: str) -> None:
        """``call``: the call of this rank that the topic is part of, if any. ``name``: that of the engine."""
        self.topic = topic
        self.call = call
        self.where = topic.text(None if call is None else call.step)
        self._stage = stage
        self._stall_secs = stall_secs
        self._name = name
        self._began = time.monotonic()
        self._missing: Sequence[int] = ()
        self._seen: dict[int, tuple[bytes, float]] = {}
        """By rank, its last heartbeat and when that changed."""
        self._apart: dict[int, float] = {}

    # -- ranks that will not come ---------------------------------------------------------------------

    def look(self, ranks: Sequence[int], beats: Sequence[bytes], mine: Heartbeat, *, is_met: bool) -> LostPeer | None:
        """Note which ranks are missing. Return the first that will not come; None if all may come.

        Args:
            ranks: the ranks that are missing now.
            beats: their encoded heartbeats, as they stand in the store; empty bytes for none.
            is_met: whether the ranks have met in this engine.
        """
        now = time.monotonic()
        self._missing = ranks
        for rank, found in zip(ranks, beats, strict=True):
            if rank not in self._seen:
                self._seen[rank] = (found, self._began)
            elif self._seen[rank][0] != found:
                self._seen[rank] = (found, now)
        for rank in ranks:
            beat = self._beat(rank)
            absence = self._why_absent(rank, beat, mine)
            if absence:
                text = f"rank {rank} does not come to {self.where}, it {absence}"
                error = PeerFailedError(text, rank=rank, stage=self._stage)
                return LostPeer(error=error, left_behind=beat if beat.has_left else None)
        silent = [rank for rank in ranks if now - self._seen[rank][1] >= self._stall_secs]
        return LostPeer(error=self._silence_error(silent, is_met=is_met), is_silent=True) if silent else None

    def forgive(self, secs: float) -> None:
        """Do not count ``secs`` that have passed: this process was suspended, and maybe the other ranks with it."""
        self._began += secs
        self._seen = {rank: (beat, since + secs) for rank, (beat, since) in self._seen.items()}
        self._apart = {rank: since + secs for rank, since in self._apart.items()}

    def _beat(self, rank: int) -> Heartbeat:
        """Return the last heartbeat of a rank; number 0 if it gave none."""
        found = self._seen[rank][0]
        return HEARTBEATS.decode(found) if found else Heartbeat(0)

    def _silence_error(self, ranks: Sequence[int], *, is_met: bool) -> PeerFailedError:
        hint = (
            ": it died, hangs, or never came to this call, which every rank has to make"
            if is_met
            else f": each rank must open an engine on {self._name} "
            "(a rank that saves alone needs coordinator=SoloCoordinator())"
        )
        text = f"{numbered('rank', ranks)} gave no sign of life in {self.where} for {self._stall_secs} s{hint}"
        return PeerFailedError(text, rank=ranks[0], stage=self._stage)

    def _why_absent(self, rank: int, beat: Heartbeat, mine: Heartbeat) -> str:
        """Return why a living rank will not come to the topic; '' if it may come.

        The rank has ended that call, has closed its engine, or waits for this rank in another call. A later call proves
        nothing: saves, loads and rollbacks run beside each other, and a later one may overtake an earlier one.
        """
        if self.topic.call in beat.over:
            return f"is elsewhere: that call has ended there; {_SAME_ORDER}"
        if beat.has_left:
            return "has closed its engine"
        other = next((topic for topic in beat.waits if _never_meet(self.topic, mine, topic, beat)), None)
        now = time.monotonic()
        # Only a heartbeat of this wait counts: an older one may name waits that are over.
        since = self._apart.get(rank, now) if other is not None and self._seen[rank][1] > self._began else now
        self._apart[rank] = since
        if other is None or now - since < self._stall_secs / 2:
            return ""
        step = beat.call.step if beat.call and beat.call.has(other) else None
        return f"waits in {other.text(step)} for this one, which has not come there; {_SAME_ORDER}"

    # -- lines about the others -----------------------------------------------------------------------

    def line(self, waited: str, *, heard: Mapping[str, Call], leader: int, is_first: bool) -> str:
        """Return the line about this wait; empty if no rank is missing any more.

        Args:
            waited: the duration of the wait as text.
            heard: the newest call of each numbering in which the missing ranks sent a message, in the order of those
                messages, which come sooner than heartbeats. A leader has heard all ranks if it has heard one, and the
                others hear the leader only.
            leader: the rank that leads. If it waits in the same topic, it logs the missing ranks.
            is_first: whether this is the first line, which tells what to do about a rank that is not in the call.
        """
        if not self._missing:
            return ""
        call, topic = self.call, self.topic
        if self._missing[0] == leader and topic in self._beat(leader).waits:
            waiting = call.text if call else f"the engine on {self._name}" if topic == RENDEZVOUS else topic.text()
            return f"{waiting} has waited {waited} for other ranks: rank {leader} logs which"
        groups: dict[tuple[bool, str], list[int]] = {}  # ranks alike, by whether they are in the call, and notes
        for rank in self._missing[:SHOWN]:
            groups.setdefault(self._state(rank, heard), []).append(rank)
        lines = [self._line_of_group(is_in_call, notes, ranks, waited) for (is_in_call, notes), ranks in groups.items()]
        if len(self._missing) > SHOWN:
            lines.append(f"{len(self._missing) - SHOWN} more ranks are missing")
        remedy = REMEDY if is_first and call is not None and not all(is_in_call for is_in_call, _ in groups) else ""
        return ". ".join([lines[0], *(f"{line[0].upper()}{line[1:]}" for line in lines[1:])]) + remedy

    def _state(self, rank: int, heard: Mapping[str, Call]) -> tuple[bool, str]:
        """Return whether a rank has begun the call, and what else is known of it: where it is, and its silence."""
        beat, silent_secs = self._beat(rank), time.monotonic() - self._seen[rank][1]
        is_in_call = self.call is not None and _is_in(self.call, beat, heard)
        is_silent = silent_secs >= 2 * self._stall_secs / HEARTBEATS_A_STALL
        notes = [
            "" if is_in_call else _last_seen(beat, heard),
            f"gave no heartbeat for {duration_text(silent_secs)}" if is_silent else "",
        ]
        return is_in_call, " and ".join(filter(None, notes))

    def _line_of_group(self, is_in_call: bool, notes: str, ranks: Sequence[int], waited: str) -> str:
        if self.call is not None:
            lack = f"finished the part of {self.call.text}" if is_in_call else f"called {self.call.text}"
        else:
            meets = self.topic == RENDEZVOUS
            lack = f"opened an engine on {self._name}" if meets else f"answered in {self.topic.text()}"
        have, each = ("has", "it") if len(ranks) == 1 else ("have", "each")
        line = f"{numbered('rank', ranks)} {have} not {lack} for {waited}"
        return f"{line}; {each} {notes}" if notes else line


def _never_meet(topic: Topic, mine: Heartbeat, other_topic: Topic, other: Heartbeat) -> bool:
    """Return whether this rank, which waits in ``topic``, and one that waits in ``other_topic`` wait for each other.

    They do if neither has begun the call of the other. Another thread of a program may still begin it, so the caller
    waits for a while before it decides.
    """
    call, other_call = topic.call, other_topic.call
    if call is None or other_call is None:
        return False
    if call == other_call:  # one call in two topics: the ranks wait for each other if the topics are of different kinds
        return topic.kind != other_topic.kind
    (kind, number), (other_kind, other_number) = call, other_call
    has_begun_other = mine.begun.get(other_kind, 0) >= other_number and other_call not in mine.over
    return kind != other_kind and other.begun.get(kind, 0) < number and not has_begun_other


def _last_seen(beat: Heartbeat, heard: Mapping[str, Call]) -> str:
    """Return where a rank is that has not begun the call; '' if nothing is known of it."""
    seen, last = beat.call, next(reversed(list(heard.values())), None)
    if beat.has_left:
        return "closed its engine"
    if seen is not None and (seen.numbering[0] not in heard or heard[seen.numbering[0]].number < seen.number):
        is_waiting = any(seen.has(topic) for topic in beat.waits)
        return f"waits in {seen.text}" if is_waiting else f"was last seen in {seen.text}"
    seen = last or seen  # the message came after this heartbeat
    if seen is None:
        return "was last seen opening its engine" if beat.count else ""
    return f"was last seen in {seen.text}"


def _is_in(call: Call, beat: Heartbeat, heard: Mapping[str, Call]) -> bool:
    kind, number = call.numbering
    if kind in heard and heard[kind].number >= number:
        return True
    is_other = beat.call is not None and beat.call.numbering == call.numbering and beat.call.kind != call.kind
    return beat.begun.get(kind, 0) >= number and not is_other
