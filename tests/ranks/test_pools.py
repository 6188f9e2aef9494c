"""The tests of a worker share ranks as long as no test leaves them in another state."""

from __future__ import annotations

import pytest
from rank_processes import Pools


def succeed(rank: int, count: int) -> int:
    return rank


def fail(rank: int, count: int) -> None:
    raise ValueError("this rank's own")


def test_ranks_that_failed_or_died_are_replaced_and_others_are_shared() -> None:
    pools = Pools()
    try:
        first = pools.of(1)
        assert first.run(succeed) == [0]
        assert pools.of(1) is first
        with pytest.raises(AssertionError, match="this rank's own"):
            first.run(fail)
        second = pools.of(1)
        assert second is not first
        second.start(0, succeed)
        assert pools.of(1) is not second, "it has not ended its call"
        third = pools.of(1)
        third.kill(0)
        assert pools.of(1).run(succeed) == [0]
    finally:
        pools.close()
