"""Hypothesis profiles: the gate tries few examples of each property, the nightly run tries all of them.

The profile ``gate`` is the default. ``pytest --hypothesis-profile nightly`` chooses the other one.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["examples", "gate_limit", "gate_stride"]

GATE_EXAMPLES = 15
NIGHTLY_EXAMPLES = 100
"""Of a property that names no number. This is the default of Hypothesis."""

# On a loaded machine an example takes any time, so neither a deadline nor `too_slow` tells anything about the code.
_ANY = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.register_profile("gate", _ANY, max_examples=GATE_EXAMPLES)
settings.register_profile("nightly", _ANY, max_examples=NIGHTLY_EXAMPLES)
settings.load_profile("gate")


def examples(nightly: int, *, gate: int = GATE_EXAMPLES) -> settings:
    """Settings of a property: ``nightly`` examples in the nightly run, at most ``gate`` in the gate."""
    return settings(max_examples=min(nightly, gate) if _is_gate() else nightly)


def gate_stride(stride: int) -> int:
    """Step between the points that a test tries: ``stride`` in the gate, 1 (each point) in the nightly run."""
    return stride if _is_gate() else 1


def gate_limit(most: int) -> int | None:
    """Number of points that a test tries: ``most`` in the gate, None (all) in the nightly run."""
    return most if _is_gate() else None


def _is_gate() -> bool:
    return settings.default.max_examples <= GATE_EXAMPLES
