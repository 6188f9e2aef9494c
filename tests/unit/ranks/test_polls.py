"""A poll on which the ranks cannot agree."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aio_ckpt.errors import AioCkptError, EngineClosedError, StallError
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.polls import AgreedPoll


@pytest.mark.parametrize("error", [StallError("no rank answers"), EngineClosedError("the engine was closed")])
async def test_it_is_told_why_unless_the_engine_was_closed_and_nobody_polls_any_more(error: AioCkptError) -> None:
    async def come() -> None:
        raise error

    told = list[AioCkptError]()
    nothing = cast("Any", None)
    poll = AgreedPoll(nothing, nothing, topic=Topic("the end"), has_come=lambda: True, on_error=told.append)
    await poll._decide(come)
    assert poll.error is error
    assert told == ([] if isinstance(error, EngineClosedError) else [error])
    assert poll.is_found is False
    assert poll.poll()  # this rank goes by itself
