"""What the fuzzers found once, and the seeds they start from. ``python -m tests.campaigns.fuzz`` looks for more."""

from __future__ import annotations

from pathlib import Path

import pytest
from property_examples import gate_stride

from tests.campaigns.fuzz.targets import TARGETS, feed

FINDINGS = sorted((Path(__file__).parent / "findings").iterdir())
GOLDEN = Path(__file__).parents[2] / "golden" / "0.1.0"


@pytest.mark.parametrize("file", FINDINGS, ids=[file.name for file in FINDINGS])
def test_what_was_found_once_ends_in_a_typed_error(file: Path) -> None:
    target = max((name for name in TARGETS if file.name.startswith(f"{name}-")), key=len)
    feed(target, file.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_reads_its_seeds_and_refuses_their_damage(target: str) -> None:
    """The readers themselves, not ``feed``: a seed that is refused guides no fuzzer."""
    seeds = TARGETS[target].seeds(GOLDEN)
    assert seeds
    for seed in seeds:
        if target not in ("tensor-pickle", "object-pickle"):  # theirs are of both kinds
            TARGETS[target].read(seed)
        for at in range(0, len(seed), max(len(seed) // 40, 1) * gate_stride(2)):
            feed(target, seed[:at] + bytes([seed[at] ^ 0xFF]) + seed[at + 1 :])
            feed(target, seed[:at])
            feed(target, seed[:at] + bytes(len(seed) - at))
