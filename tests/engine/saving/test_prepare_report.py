"""A state with several leaves that cannot be stored or not be read back: one message names them all."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, UnsafeObjectError, UnsupportedLeafError


class Opaque:
    """Only running code brings it back."""


class Odd(Opaque):
    """Another type."""


def bad_state() -> dict[str, Any]:
    return {
        "good": torch.ones(2),
        "meta": torch.ones(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "call": lambda: None,
        "deep": {"log": (line for line in "x")},
        "step": 1,
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", ["prepare", "save"])
def test_every_leaf_that_cannot_be_stored_is_named_in_one_error_with_its_remedy(root: Any, call: str) -> None:
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(UnsupportedLeafError) as caught:
            getattr(engine, call)(bad_state())
        for name, remedy in (
            ("'meta'", "materialize it first"),
            ("'nested'", ".unbind()"),
            ("call:", "leave it out"),
            ("deep.log:", "leave it out"),
        ):
            assert remedy in str(caught.value).partition(name)[2]
        assert str(caught.value).startswith("4 leaves cannot be stored: ")
        assert not root.exists()
        good = {name: value for name, value in bad_state().items() if name in ("good", "step")}
        engine.prepare(good).result(TIMEOUT)
        assert engine.save(good).result(TIMEOUT).plan_hit


@pytest.mark.parametrize(("count", "kind"), [(1, UnsafeObjectError), (12, UnsafeObjectError)])
def test_one_leaf_is_named_alone_and_of_many_ten(root: Any, count: int, kind: type[AioCkptError]) -> None:
    with SyncCheckpointEngine(root) as engine, pytest.raises(kind) as caught:
        engine.prepare({f"call{number}": (lambda: None) for number in range(count)})
    assert str(caught.value).count("cannot be pickled") == min(count, 10)
    assert str(caught.value).startswith("call0: a function" if count == 1 else "12 leaves cannot be stored: call0: ")
    assert str(caught.value).endswith("and 2 more") == (count == 12)


def test_prepare_warns_once_of_what_cannot_be_read_back_without_trust(
    root: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(2), "one": Opaque(), "two": Odd(), "three": [Opaque()]}
    with SyncCheckpointEngine(root) as engine, caplog.at_level(logging.WARNING, "aio_ckpt"):
        engine.prepare(state).result(TIMEOUT)
        engine.save(state).result(TIMEOUT)
    (text,) = [record.getMessage() for record in caplog.records]
    assert all(repr(name) in text for name in ("one", "two", "three"))
    assert "trusted_objects=True" in text
    assert "skip_untrusted=True" in text
