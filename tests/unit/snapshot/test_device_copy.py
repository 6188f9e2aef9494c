"""Where the copies of ``device_copy_bytes`` lie; on host memory, whose copies are real (CUDA: tests/gpu)."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rings import issued

from aio_ckpt.memory.copies import Copies
from aio_ckpt.plan.structure import flat_bytes
from aio_ckpt.snapshot.device_copy import DeviceCopier, copy_budget_bytes

ROOM = 1 << 30


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {
        "large": torch.randn(3, 700, 1000),  # cut by the boundaries of chunks
        "transposed": torch.randn(500, 300).t(),
        "odd": torch.randint(0, 9, (300_077,), dtype=torch.uint8),
        "half": torch.randn(200_001).bfloat16(),
        "ints": torch.arange(50_000),
    }


def test_each_tensor_has_a_copy_of_its_own_at_the_addresses_that_are_issued() -> None:
    plan, tensors = issued(states())
    allocated = DeviceCopier(ROOM).allocate(plan, lambda _: Copies())
    assert allocated is not None
    device_copy, memory = allocated
    for groups in device_copy.groups.values():
        Copies().copy_groups(groups)
    assert device_copy.leaves == set(range(len(tensors)))
    ((_, given),), ((_, copied),) = plan.copies.issued.items(), device_copy.issued.items()
    assert copied.leaves.tolist() == given.leaves.tolist()
    assert copied.vectors[:, [0, 2]].tolist() == given.vectors[:, [0, 2]].tolist()
    (buffer,) = memory
    for leaf, (_, address, nbytes) in zip(copied.leaves.tolist(), copied.vectors.tolist(), strict=True):
        start = address - buffer.data_ptr()
        assert torch.equal(buffer[start : start + nbytes], flat_bytes(tensors[leaf]))


def test_memory_is_free_once_the_copy_is_dropped_and_the_layout_is_kept() -> None:
    device_copier, (plan, _), (other, _) = DeviceCopier(None), issued(states()), issued({"w": torch.ones(99_999)})
    copies = KeptMemory()
    first, again = (device_copier.allocate(plan, lambda _: copies) for _ in range(2))
    assert first is not None
    assert again is not None
    assert again[0].issued is first[0].issued  # which is what the order of the copies is known by
    assert again[0].groups is first[0].groups
    memory = weakref.ref(copies.memories[-1])
    copies.memories.clear()
    assert memory() is not None
    del first, again
    assert memory() is None
    changed = device_copier.allocate(other, lambda _: copies)
    assert changed is not None
    assert changed[0].leaves == {0}


class KeptMemory(Copies):
    """Gives the same memory again, as the caching allocator does for a stream."""

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.memories: list[npt.NDArray[np.uint8]] = []
        self.found = free_bytes, 1 << 30
        self.released = 0

    def memory_info(self) -> tuple[int, int]:
        return self.found

    def releases(self) -> int:
        return self.released

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        if not self.memories or self.memories[-1].nbytes != nbytes:
            self.memories.append(np.empty(nbytes, dtype=np.uint8))
        return torch.from_numpy(self.memories[-1])


def test_where_not_all_fits_a_part_is_copied_and_the_rest_is_read_where_it_is() -> None:
    state = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(4)}  # 1 MiB each
    plan, tensors = issued(state)
    allocated = DeviceCopier(5 << 19).allocate(plan, lambda _: Copies())
    assert allocated is not None
    device_copy, _ = allocated
    assert len(device_copy.leaves) == 2
    ((_, moved),) = device_copy.issued.items()
    sources = dict(zip(moved.leaves.tolist(), moved.vectors[:, 1].tolist(), strict=True))
    assert {leaf for leaf, source in sources.items() if source != tensors[leaf].data_ptr()} == device_copy.leaves


def test_small_tensors_get_no_copy() -> None:
    plan, _ = issued({"large": torch.ones(1 << 16), "small": torch.ones((1 << 16) - 1)})
    allocated = DeviceCopier(None).allocate(plan, lambda _: Copies())
    assert allocated is not None
    assert [plan.structure.names[leaf] for leaf in allocated[0].leaves] == ["large"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "kept", "free", "copied"),
    [
        (8, 0, 100, 8),  # room for all
        (8, 0, 12, 8),  # a margin of 4 is left
        (8, 0, 9, 5),  # room for a part
        (8, 0, 4, 0),
        (8, 0, 1, 0),
        (8, 8, 0, 8),  # what the allocator kept is asked of nobody
        (6, 8, 0, 6),
        (8, 5, 3, 5),
        (8, 3, 10, 6),
    ],
)
def test_copies_take_what_is_free_but_for_a_margin(wanted: int, kept: int, free: int, copied: int) -> None:
    assert copy_budget_bytes(wanted * GIB, kept * GIB, free * GIB, 80 * GIB) == copied * GIB


def test_a_small_device_keeps_a_gibibyte_free() -> None:
    assert copy_budget_bytes(8 * GIB, 0, 4 * GIB, 8 * GIB) == 3 * GIB


def test_what_the_allocator_gave_back_to_the_device_is_not_counted_on() -> None:
    plan, _ = issued({"w": torch.ones(2 * GIB >> 2 >> 10)})  # 2 MiB
    device_copier, copies = DeviceCopier(None), KeptMemory()
    assert device_copier.allocate(plan, lambda _: copies) is not None
    copies.found = 0, GIB
    assert device_copier.allocate(plan, lambda _: copies) is not None
    copies.released = 1
    assert device_copier.allocate(plan, lambda _: copies) is None


@pytest.mark.parametrize("max_bytes", [0, 1000])
def test_without_room_there_is_none(max_bytes: int) -> None:
    plan, _ = issued(states())
    assert DeviceCopier(max_bytes).allocate(plan, lambda _: Copies()) is None


def test_without_memory_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "allocate", lambda *_: None)
    plan, _ = issued(states())
    assert DeviceCopier(ROOM).allocate(plan, lambda _: Copies()) is None
