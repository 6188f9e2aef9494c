"""Chrome traces, as the tests read them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


def events_of(path: Path) -> dict[str, list[Event]]:
    """Complete events by the name of their lane."""
    document = json.loads(path.read_text())
    events: Sequence[Event] = document["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(lanes.values())) == len(lanes)
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            found[lanes[event["tid"]]].append(event)
    return found


def check_nested(events: Sequence[Event]) -> None:
    """Of two events of a lane one lies inside the other, or behind it (to a nanosecond: ``ts`` is a float)."""
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1e-3, f"{event['name']} ends behind what it began in"
        ends.append(end)


def check_apart(events: Sequence[Event]) -> None:
    """No two events of the lane at the same time."""
    ordered = sorted(events, key=lambda event: event["ts"])
    for before, after in pairwise(ordered):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, f"{before['name']} and {after['name']}"


def covered_secs(events: Sequence[Event]) -> float:
    """Length of the union."""
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], reached))
        reached = max(reached, end)
    return total / 1e6


def error_in(path: Path) -> str:
    document = json.loads(path.read_text())
    (failed,) = [event for event in document["traceEvents"] if event["ph"] == "i"]
    assert failed["args"]["error"] == document["otherData"]["error"]
    return str(document["otherData"]["error"])
