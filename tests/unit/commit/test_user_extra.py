"""Extra: which values ``save(extra=)`` takes, and that it takes them by value."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.commit.user_extra import MAX_EXTRA_BYTES, check_extra
from aio_ckpt.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
NAMES = st.text(max_size=10)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))


class Level(enum.IntEnum):
    HIGH = 3


def nested(levels: int) -> Any:
    """A list in a list, ``levels`` of them."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@examples(200)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_json_values_come_back_from_json_as_they_were(extra: dict[str, Any]) -> None:
    copied = check_extra(extra)
    assert copied == extra
    assert repr(msgspec.json.decode(msgspec.json.encode(copied))) == repr(extra)


def test_no_extra_is_an_empty_dict() -> None:
    assert check_extra(None) == check_extra({}) == {}


def test_subclasses_of_json_types_become_the_plain_type() -> None:
    copied = check_extra({np.str_("loss"): np.float64(1.5), "torch": torch.__version__, "level": Level.HIGH})
    assert copied == {"loss": 1.5, "torch": str(torch.__version__), "level": 3}
    assert {type(value) for value in (*copied, *copied.values())} == {str, float, int}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["loss"], r"extra=\['loss'\]: give a dict"),
        ({1: 2}, r"extra\[1\]=2 is no JSON value .*strings as keys"),
        ({"a": {None: 2}}, r"extra\['a'\]={None: 2} is no JSON value .*strings as keys"),
        ({"loss": torch.ones(())}, r"extra\['loss'\]=tensor\(1.\) .*Tensor is not JSON serializable.* give .*item"),
        ({"a": [{"b": np.ones(2)}]}, r"extra\['a'\]=\[{'b': array.*ndarray is not JSON serializable"),
        ({"a": (1, 2)}, r"extra\['a'\]=\(1, 2\) is no JSON value \(it comes back otherwise\): give .*list"),
        ({"a": b"x"}, r"extra\['a'\]=b'x' is no JSON value"),
        ({"loss": math.nan}, r"extra\['loss'\]=nan is no JSON value .* give a str, finite float.*None"),
        ({"loss": -math.inf}, r"extra\['loss'\]=-inf"),
        ({"n": 2**64}, r"extra\['n'\]=18446744073709551616 .*so large a number .*int of at most 64 bits"),
        ({"n": -(2**63) - 1}, r"extra\['n'\]=-9223372036854775809 .*so large a number"),
        ({"a": "\ud800"}, r"extra\['a'\]='\\ud800' .*surrogates not allowed"),
        ({"\ud800": 1}, r"extra\['\\ud800'\]=1 .*surrogates not allowed"),
        ({"a": nested(32)}, r"nested deeper than 32"),
        ({"log": "x" * MAX_EXTRA_BYTES, "b": 1}, r"65552 bytes as JSON, 65536 are allowed, and extra\['log'\] takes"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:20].encode("unicode_escape").decode(),
)
def test_another_value_is_refused_by_its_key_with_a_remedy(extra: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_extra(extra)


def test_the_largest_extra_and_the_deepest_are_taken() -> None:
    assert check_extra({"x": "y" * (MAX_EXTRA_BYTES - 8)})
    assert check_extra({"a": nested(31)})


def test_a_dict_that_contains_itself_is_refused() -> None:
    extra: dict[str, Any] = {}
    extra["me"] = extra
    with pytest.raises(ConfigError, match="nested deeper"):
        check_extra(extra)
