"""Each private name of torch in ``aio_ckpt/_torch.py`` does what the package takes it to do."""

from __future__ import annotations

import inspect
import io
import logging
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine, _torch
from aio_ckpt.dcp import Reader
from aio_ckpt.leaves.sharded_tensor import shard_of

PACKAGE = Path(aio_ckpt.__file__).parent
PRIVATE = re.compile(
    r"^\s*from torch[\w.]*\._\w+[\w.]* import"
    r"|^\s*from torch[\w.]* import .*\b_[a-z]\w*"
    r"|\btorch\._[a-zA-Z]|\._local_tensor\b|\bdistributed_c10d\.",
    re.MULTILINE,
)
PICKLED = {"format/tensor_pickle.py", "leaves/pickle_allow_list.py", "leaves/object_unpickler.py"}
"""They hold private names as text, which stands in files and is never imported."""


@pytest.fixture
def sharded() -> Iterator[DTensor]:
    """Rank 1's half of a tensor of 4 rows."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield distribute_tensor(torch.arange(8.0).reshape(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {match[0].strip()}"
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in PICKLED | {"_torch.py"}
        for match in PRIVATE.finditer(path.read_text())
    }
    assert found == set()


def test_storage_info_is_pickled_under_the_name_that_dcp_reads() -> None:
    data = pickle.dumps(_torch.StorageInfo("__0_0.distcp", 3, 5), protocol=2)
    assert b"torch.distributed.checkpoint.filesystem\n_StorageInfo\n" in data
    assert vars(pickle.loads(data)).items() >= {"relative_path": "__0_0.distcp", "offset": 3, "length": 5}.items()


def test_the_local_tensor_of_a_dtensor_is_its_own_memory(sharded: DTensor) -> None:
    assert _torch.local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
    assert _torch.local_tensor(sharded).shape == (2, 2)


def test_the_chunk_of_a_dtensor_is_the_box_of_this_rank(sharded: DTensor) -> None:
    [chunk] = _torch.create_chunk_list(sharded)
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((2, 0), (2, 2))


def test_a_dtensor_over_other_memory_is_laid_out_as_the_first(sharded: DTensor) -> None:
    memory = torch.full((2, 2), 7.0)
    made = _torch.dtensor_over(memory, sharded)
    assert (made.shape, made.placements, made.device_mesh) == (sharded.shape, sharded.placements, sharded.device_mesh)
    assert made.to_local().data_ptr() == memory.data_ptr()


def test_a_sharded_tensor_tells_its_shards_and_its_shape(sharded: DTensor) -> None:
    shard = TorchShard.from_tensor_and_offsets(torch.ones(2, 2), [2, 0], 1)
    metadata = ShardedTensorMetadata(
        [ShardMetadata([0, 0], [2, 2], "rank:0/cpu"), shard.metadata],
        torch.Size((4, 2)),
        TensorProperties(torch.float32),
    )
    made = _torch.ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata)
    found = shard_of(made, "w")
    assert (found.tensor.tolist(), found.global_shape, found.offsets) == ([[1, 1], [1, 1]], (4, 2), (2, 0))
    assert found.owner is made


def test_default_store_is_that_of_the_default_group(sharded: DTensor) -> None:
    assert isinstance(_torch.default_store(), _torch.Store)
    assert issubclass(_torch.PrefixStore, _torch.Store)


def test_without_a_group_there_is_no_default_store() -> None:
    assert _torch.default_store() is None


def test_narrow_takes_the_part_that_offsets_and_lengths_name() -> None:
    whole = torch.arange(12).reshape(3, 4)
    part = _torch.narrow_tensor_by_index(whole, (1, 2), (2, 1))
    assert part.tolist() == [[6], [10]]
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_foreach_copy_copies_each() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    _torch.foreach_copy(targets, [torch.ones(2), torch.full((3,), 2.0, dtype=torch.float64)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]


def test_neg_view_negates_without_a_copy() -> None:
    tensor = torch.ones(2)
    negated = _torch.neg_view(tensor)
    assert negated.is_neg()
    assert negated.tolist() == [-1, -1]


def test_references_to_storages_are_equal_if_the_storage_is_the_same_one() -> None:
    memory = bytearray(8)
    first, second = (torch.frombuffer(memory, dtype=torch.uint8) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    assert _torch.storage_reference(first) == _torch.storage_reference(first.view(2, 4).detach())
    assert _torch.storage_reference(first) != _torch.storage_reference(second)
    reference = _torch.storage_reference(first)
    assert not reference.expired()
    del first
    assert reference.expired()


class Greedy(torch.Tensor):
    """Makes every tensor one of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_bare_tensor_is_of_no_subclass_and_the_same_memory() -> None:
    tensor = torch.ones(2).as_subclass(Greedy).requires_grad_()
    bare = _torch.bare_tensor(tensor)
    assert (type(bare), bare.data_ptr(), bare.requires_grad) == (torch.Tensor, tensor.data_ptr(), False)


def test_a_tensor_of_a_functional_collective_is_waited_for() -> None:
    tensor = _torch.AsyncCollectiveTensor(torch.ones(2))
    assert tensor.wait().tolist() == [1, 1]


def test_the_parts_of_a_sparse_tensor_are_its_own_memory_coalesced_or_not() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,), check_invariants=True)
    indices, values = _torch.sparse_coo_parts(tensor)
    indices[0, 1], values[1] = 2, 5
    assert tensor.to_dense().tolist() == [0, 1, 5]
    _torch.mark_coalesced(tensor, is_coalesced=True)
    assert tensor.is_coalesced()


def test_shard_and_strided_shard_differ_where_the_constant_says_so() -> None:
    strided = getattr(torch.distributed.tensor.placement_types, "_StridedShard", None)
    assert _torch.SHARDS_DIFFER is (strided is None or Shard(0) != strided(0, split_factor=2))


def test_the_dcp_version_is_what_stock_writes() -> None:
    assert _torch.DCP_VERSION is None or re.fullmatch(r"\d+\.\d+\.\d+", _torch.DCP_VERSION)


class Doubling(StreamTransformExtension):  # type: ignore[misc]
    """Stands for a stream extension of a user."""

    @staticmethod
    def registry_name() -> str:
        return "doubling"

    @staticmethod
    def from_descriptor(version: str) -> Doubling:
        return Doubling()

    def get_descriptor(self) -> str:
        return "doubling/1"

    def transform_to(self, output):  # type: ignore[no-untyped-def]
        return output

    def transform_from(self, input):  # type: ignore[no-untyped-def]
        return input


def test_transforms_name_the_extensions_that_they_apply() -> None:
    item = WriteItem(index=MetadataIndex("w"), type=WriteItemType.BYTE_IO)
    _, descriptors = _torch.writer_transforms([Doubling()]).transform_save_stream(item, io.BytesIO())
    assert list(descriptors) == ["doubling/1"]
    assert _torch.reader_transforms(None).extension_registry is not None


# -- versions ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    _torch.log_untried_torch.cache_clear()
    yield
    _torch.log_untried_torch.cache_clear()


@pytest.mark.parametrize(("newest", "lines"), [((2, 6), 1), ((99, 0), 0)])
def test_a_torch_newer_than_any_that_was_tried_gets_one_info_line(
    newest: tuple[int, int],
    lines: int,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_torch, "NEWEST_TRIED", newest)
    with caplog.at_level(logging.DEBUG, logger="aio_ckpt"):
        for number in range(2):
            with SyncCheckpointEngine(tmp_path / str(number)):
                pass
        with Reader(tmp_path):
            pass
    found = [record for record in caplog.records if "is newer than 2.6" in record.getMessage()]
    assert [record.levelname for record in found] == ["INFO"] * lines


def test_the_torch_that_runs_the_tests_was_tried() -> None:
    assert tuple(int(part) for part in torch.__version__.split(".")[:2]) <= _torch.NEWEST_TRIED


def test_pytree_nodes_are_the_registered_containers() -> None:
    assert {dict, list, tuple} <= set(_torch.PYTREE_NODES)
    assert set not in _torch.PYTREE_NODES


def test_hooks_of_torch_are_told_from_hooks_of_others() -> None:
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, *arguments: object) -> None: ...

    hooked = torch.nn.Linear(1, 1)
    hooked.register_load_state_dict_pre_hook(lambda *arguments: None)
    assert [_torch.has_load_hooks(module) for module in (Own(1, 1), hooked)] == [True, True]
    normed = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    assert normed._load_state_dict_pre_hooks
    assert [_torch.has_load_hooks(module) for module in (normed, torch.nn.BatchNorm1d(1))] == [False, False]


def test_a_load_state_dict_of_torch_is_told_from_others() -> None:
    class Own(torch.nn.Linear):
        def load_state_dict(self, *arguments: object) -> None: ...  # type: ignore[override]

    assert not _torch.is_load_of_torch(Own(1, 1))
    assert _torch.is_load_of_torch(torch.nn.Linear(1, 1))
    assert _torch.is_load_of_torch(torch.optim.SGD([torch.zeros(1)]))


def test_a_module_that_takes_its_own_names_alone_is_told_from_others() -> None:
    class OwnLoad(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None: ...

    class OwnSave(torch.nn.Linear):
        def _save_to_state_dict(self, *args: Any) -> None: ...

    class OwnState(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any: ...

    def hooked(register: str) -> torch.nn.Module:
        module = torch.nn.Linear(1, 1)
        getattr(module, register)(lambda *_: None)
        return module

    registers = (
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
        "register_state_dict_post_hook",
    )
    others = [*map(hooked, registers), OwnLoad(1, 1), OwnSave(1, 1), OwnState(1, 1), torch.nn.LazyLinear(1)]
    for other in others:
        assert not _torch.loads_by_names(torch.nn.Sequential(torch.nn.ReLU(), other)), other
    plain = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1), torch.nn.LSTM(1, 1))
    assert _torch.loads_by_names(plain)
    assert _torch.loads_by_names(torch.compile(plain, backend="eager"))  # type: ignore[arg-type]


def test_dcp_makes_what_its_caller_did_not_pass_through_the_named_globals(tmp_path: Path) -> None:
    made: list[str] = []
    places = _torch.dcp_globals(package=False)
    assert [str(place) for place in places if place.value is None or not place.is_of_torch] == []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in places:
            patch.setattr(place.module, place.name, _Counted(place, made))
        state = {"w": torch.zeros(2)}
        dcp.save(state, checkpoint_id=tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)
        assert made == ["FileSystemWriter", "FileSystemReader"]
        saving = dcp.async_save(state, checkpoint_id=tmp_path)
        getattr(saving, "upload_completion", saving).result(30)
    wanted = {place.name for place in places} - {"_ProcessBasedAsyncCheckpointExecutor"}
    assert set(made) == wanted


class _Counted:
    """Class of DCP that notes each object that is made of it."""

    def __init__(self, place: _torch.DcpGlobal, made: list[str]) -> None:
        self._name, self._value, self._made = place.name, place.value, made

    def __call__(self, *args: object, **given: object) -> object:
        self._made.append(self._name)
        return self._value(*args, **given)

    def __getattr__(self, name: str) -> object:
        return getattr(self._value, name)


def test_the_package_gives_the_classes_that_libraries_take() -> None:
    added = set(map(str, _torch.dcp_globals(package=True))) - set(map(str, _torch.dcp_globals(package=False)))
    prefix = "torch.distributed.checkpoint"
    assert added == {f"{prefix}.FileSystemWriter", f"{prefix}.FileSystemReader"}


@pytest.mark.parametrize("kind", ["_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor"])
def test_the_executors_of_dcp_take_writer_and_path_by_name(kind: str) -> None:
    parameters = inspect.signature(getattr(state_dict_saver, kind).execute_save).parameters
    for name in ("checkpoint_id", "storage_writer"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_pickled_storage_is_described_as_torch_save_describes_it() -> None:
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    typed = _torch.pickled_storage(torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True))
    untyped = _torch.pickled_storage(tensor[1:].untyped_storage())
    assert typed is not None
    assert untyped is not None
    assert (typed.dtype, typed.kind, typed.location, typed.slots) == (torch.float32, torch.FloatStorage, "cpu", 4)
    assert (untyped.dtype, untyped.slots) == (torch.uint8, 16)
    assert typed.identity == untyped.identity
    assert _torch.pickled_storage(tensor) is None
