"""What the tests of ``aio_ckpt.dcp`` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gated_storage import TIMEOUT, GatedStorage

from aio_ckpt.runtime.portal import Executor


@pytest.fixture
def storage() -> Iterator[GatedStorage]:
    executor = Executor("test", 6)
    gated = GatedStorage(executor)
    yield gated
    gated.open_gates()
    assert executor.close(TIMEOUT)
