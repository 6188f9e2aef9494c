"""Where the copies of ``device_copy_bytes`` lie; on host memory, whose copies are real (CUDA: tests/gpu)."""

from __future__ import annotations

import pytest
import torch
from rings import issued

from aio_ckpt.memory.copies import HostCopies
from aio_ckpt.snapshot.device_copy import DeviceCopier

ROOM = 1 << 30


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {
        "large": torch.randn(3, 700, 1000),  # cut by the boundaries of chunks
        "transposed": torch.randn(500, 300).t(),
        "odd": torch.randint(0, 9, (77,), dtype=torch.uint8),
        "half": torch.randn(1001).bfloat16(),
        "ints": torch.arange(5),
    }


def test_each_tensor_has_a_copy_of_its_own_at_the_addresses_that_are_issued() -> None:
    plan, tensors = issued(states())
    device_copy = DeviceCopier(ROOM).of(plan, lambda _: HostCopies())
    assert device_copy is not None
    for groups in device_copy.groups.values():
        HostCopies().assemble([(targets, [tensors[leaf] for leaf in leaves]) for targets, leaves in groups])
    copies = {
        leaf: copy
        for groups in device_copy.groups.values()
        for views, all_ in groups
        for leaf, copy in zip(all_, views, strict=True)
    }
    assert copies.keys() == device_copy.leaves == set(range(len(tensors)))
    assert all(torch.equal(copies[leaf], tensor) for leaf, tensor in enumerate(tensors))
    assert all(copies[leaf].stride() == tensor.stride() for leaf, tensor in enumerate(tensors))
    ((_, given),), ((_, copied),) = plan.descriptors.device_copies.items(), device_copy.device_copies.items()
    assert copied.leaves.tolist() == given.leaves.tolist()
    assert copied.vectors[:, [0, 2]].tolist() == given.vectors[:, [0, 2]].tolist()
    for leaf, (_, address, nbytes) in zip(copied.leaves.tolist(), copied.vectors.tolist(), strict=True):
        assert (address, nbytes) == (copies[leaf].data_ptr(), copies[leaf].nbytes)


def test_one_copy_serves_a_layout_and_a_new_layout_gets_a_new_one() -> None:
    device_copier, (plan, _), (other, _) = DeviceCopier(ROOM), issued(states()), issued({"w": torch.ones(5000)})
    first = device_copier.of(plan, lambda _: HostCopies())
    assert device_copier.of(plan, lambda _: HostCopies()) is first
    assert device_copier.of(other, lambda _: HostCopies()) is not first
    device_copier.clear()
    assert device_copier.of(plan, lambda _: HostCopies()) is not first


@pytest.mark.parametrize("most_bytes", [0, 1000])
def test_without_room_there_is_none(most_bytes: int) -> None:
    plan, _ = issued(states())
    assert DeviceCopier(most_bytes).of(plan, lambda _: HostCopies()) is None


def test_without_memory_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "buffer", lambda *_: None)
    plan, _ = issued(states())
    assert DeviceCopier(ROOM).of(plan, lambda _: HostCopies()) is None
