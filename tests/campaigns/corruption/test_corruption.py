"""Damage of every kind in every class of bytes is found by ``verify``, named, and never loaded as other values."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from tests.campaigns.corruption.campaign import Range
from tests.campaigns.corruption.damage import FILES, IN_FILE, WHOLE_FILE, hurt_file, hurt_region

KINDS = ("item header", "raw data", "item trailer", "object", "padding", ".metadata", "rank manifest", "root manifest")
LEAVES_THE_REST = ("flip", "garble", "zero-fill", "swap ranges")
REFUSED_BY_LOAD = ("raw data", "object", ".metadata", "rank manifest", "root manifest")
"""A zip's header and trailer and the padding are not read by a load, which goes by the manifest."""

FEW = examples(6, gate=1)


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    return Range(tmp_path_factory.mktemp("range"))


@pytest.mark.parametrize("how", IN_FILE)
@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(seed=st.integers(0, 1 << 32), place=st.floats(0, 1, exclude_max=True))
def test_damage_inside_a_file_is_found_and_named(grounds: Range, kind: str, how: str, seed: int, place: float) -> None:
    regions = [region for region in grounds.regions if region.kind == kind]
    region = regions[int(place * len(regions))]
    with grounds.copy() as checkpoint:
        if not hurt_region(checkpoint, region, how, random.Random(seed)):
            return
        examined = grounds.examine(checkpoint)
    assert examined.misses([region.file], region.name if how in LEAVES_THE_REST else None) == ""
    if kind in REFUSED_BY_LOAD:
        assert examined.error is not None
        assert region.file in examined.error
        if region.name and how in LEAVES_THE_REST:
            assert repr(region.name) in examined.error


@pytest.mark.sampled
@pytest.mark.parametrize("how", WHOLE_FILE)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("other", [0, 1], ids=["of another step", "of another run"])
def test_damage_of_a_whole_file_is_found_and_named(grounds: Range, kind: str, how: str, other: int) -> None:
    with grounds.copy() as checkpoint:
        hurt = hurt_file(checkpoint, FILES[kind], how, grounds.others[other], random.Random(other))
        examined = grounds.examine(checkpoint)
    assert examined.misses(hurt, None) == ""
    assert examined.error is not None


def test_a_sound_checkpoint_is_found_sound(grounds: Range) -> None:
    with grounds.copy() as checkpoint:
        examined = grounds.examine(checkpoint)
    assert (examined.faults, examined.error, examined.is_equal) == ((), None, True)
    assert {region.kind for region in grounds.regions} == set(KINDS)
