"""Bad input: a typed error that says what is wrong and how to mend it, raised before anything is touched."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    ConfigError,
    DuplicateNameError,
    EmptyStateError,
    MissingNameError,
    RootError,
    SourceChangedError,
    StepOrderError,
    TemplateMismatchError,
    UnexpectedNameError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.message_texts import shown

Tree = dict[str, tuple[int, int]]


class OddTensor(torch.Tensor):
    """Keeps its values somewhere, and tells nobody where."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    return tensor


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but old checkpoints' models still hold such tensors
        return torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


BAD_STATES: dict[str, tuple[Callable[[], object], type[AioCkptError], type[Exception], str]] = {
    "an empty state": (lambda: {}, EmptyStateError, ValueError, "no leaf.*give at least one"),
    "only empty containers": (lambda: {"a": {}, "b": {"c": {}}}, EmptyStateError, ValueError, "no leaf.*give"),
    "no mapping at all": (lambda: [torch.ones(2)], UnsupportedLeafError, TypeError, "the state is a list: give a dict"),
    "a lambda": (lambda: {"opt": {"lr": lambda: 1}}, UnsafeObjectError, TypeError, "opt.lr: a function that cannot be"),
    "an open file": (lambda: {"x": [1, sys.stdout]}, UnsafeObjectError, TypeError, "x: a list that cannot be pickled"),
    "a lock in an array": (lambda: {"a": np.array([threading.Lock()])}, UnsafeObjectError, TypeError, "a: .*pickled"),
    "a tensor of oneDNN": (lambda: {"s": torch.eye(3).to_mkldnn()}, UnsupportedLeafError, TypeError, "'s'.*to_dense"),
    "a quantized tensor of 4 bits": (lambda: {"q": quantized()}, UnsupportedLeafError, TypeError, "'q'.*dequantize"),
    "a meta tensor": (lambda: {"m": torch.ones(2, device="meta")}, UnsupportedLeafError, TypeError, "'m'.*materialize"),
    "a subclass of Tensor": (
        lambda: {"t": torch.Tensor._make_wrapper_subclass(OddTensor, (2,))},
        UnsupportedLeafError, TypeError, "'t'.*plain tensor",
    ),
    "a lazy parameter": (
        lambda: {"l": torch.nn.parameter.UninitializedParameter()}, UnsupportedLeafError, TypeError, "'l'.*forward pass"
    ),
    "a tensor as a key": (lambda: {"a": {torch.ones(1): 1}}, UnsupportedLeafError, TypeError, "a: a tensor as a key"),
    "a name that is no text": (lambda: {"\ud800": torch.ones(1)}, UnsupportedLeafError, TypeError, "rename"),
    "a tensor that was freed": (lambda: {"w": freed()}, SourceChangedError, RuntimeError, "freed or resized"),
    "a tensor whose memory shrank": (lambda: {"w": shrunk()}, SourceChangedError, RuntimeError, "400 bytes.*has 40"),
}  # fmt: skip


def everything(root: Path) -> Tree:
    """Every path below with size and time of its last change; of the engine's own directories only that they exist."""
    found: Tree = {}
    for place, directories, files in os.walk(root):
        is_own = os.path.basename(place) == ENGINE_DIR
        found |= {os.path.join(place, name): (0, 0) for name in directories if is_own}
        for path in (os.path.join(place, name) for name in (files if is_own else directories + files)):
            status = os.stat(path)
            found[path] = (status.st_size, status.st_mtime_ns)
    return {os.path.relpath(path, root): found[path] for path in sorted(found)}


@contextlib.contextmanager
def refused(root: Path, kind: type[AioCkptError], builtin: type[Exception], message: str) -> Iterator[None]:
    before = everything(root)
    with pytest.raises(kind, match=rf"(?s){message}") as caught:
        yield
    assert isinstance(caught.value, builtin)
    assert not caught.value.target_modified
    assert everything(root) == before, "something was touched before the input was refused"


@pytest.mark.parametrize("has_checkpoint", [False, True], ids=["new root", "after a save"])
@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_anything_is_touched(
    root: Path, case: str, has_checkpoint: bool
) -> None:
    make, kind, builtin, message = BAD_STATES[case]
    with SyncCheckpointEngine(root) as engine:
        if has_checkpoint:
            engine.save({"w": torch.ones(2)}).result(TIMEOUT)
        with refused(root, kind, builtin, message):
            engine.save(make())
        # The engine is none the worse for it: same step, right data.
        ticket = engine.save({"w": torch.full((2,), 7.0)})
        assert ticket.result(TIMEOUT).step == 1 + has_checkpoint
        assert torch.equal(engine.read()["w"], torch.full((2,), 7.0))


def test_a_bad_leaf_under_a_cached_plan_is_refused(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(100), "lr": 0.1}).result(TIMEOUT)
        for state in ({"w": freed(), "lr": 0.1}, {"w": torch.ones(100), "lr": lambda: 1}):
            with refused(root, AioCkptError, Exception, "freed|pickled"):
                engine.save(state)
        engine.save({"w": torch.ones(100), "lr": 0.1}).result(TIMEOUT)


class Resizes:
    """While it is encoded, that is after the tensors were resolved, another one moves to new memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.tensor.untyped_storage().resize_(64 << 20)
        return dict, ()


def test_a_tensor_that_moves_while_it_is_captured_fails_the_save_and_leaves_nothing(root: Path) -> None:
    tensor = torch.ones(1 << 20)
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        engine.save({"w": torch.ones(1)}).result(TIMEOUT)
        with refused(root, SourceChangedError, RuntimeError, "keep the state still until save"):
            engine.save({"w": tensor, "o": Resizes(tensor)})
        assert engine.steps() == [1]
        assert engine.lifetime.leases == 0
        engine.save({"w": tensor}).result(TIMEOUT)


@pytest.mark.parametrize(
    ("step", "message"),
    [(-1, "from 0 to"), (True, "whole number"), ("5", "whole number"), (3, "overwrite"), (2, "rollback")],
)
def test_a_step_that_is_not_the_newest_is_refused_before_anything_is_touched(
    root: Path, step: Any, message: str
) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(2)}, 3).result(TIMEOUT)
        with refused(root, StepOrderError, ValueError, message):
            engine.save({"w": torch.ones(2)}, step)


@pytest.mark.parametrize("deadline_secs", [0, -1, float("nan"), float("inf"), True, "5"])
def test_a_deadline_that_is_no_finite_time_is_refused(root: Path, deadline_secs: Any) -> None:
    with SyncCheckpointEngine(root) as engine, refused(root, ConfigError, ValueError, "deadline_secs=.*above 0"):
        engine.save({"w": torch.ones(2)}, deadline_secs=deadline_secs)


# -- settings -------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[str, Any]] = [
    *(("budget_bytes", value) for value in (float("inf"), float("nan"), 1e9, 0, -1, True, "1G")),
    *(("workers", value) for value in (0, -1, 1.5, None, True)),
    *(("max_in_flight", value) for value in (0, None)),
    *(("device_copy_bytes", value) for value in (-1, 0.5, None, False)),
    *(("gather_bytes", value) for value in (-1, 1.5, None, True, "64M")),
    *(("keep_last", value) for value in (0, -1, 1.0)),
    *(("keep_every", value) for value in (0, 2.0)),
    *(("stall_timeout_secs", value) for value in (0, -1, float("inf"), float("nan"), None, True)),
    *(("drain_timeout_secs", value) for value in (0, float("inf"))),
    *(("stale_after_secs", value) for value in (0, float("nan"))),
    *(("when_busy", value) for value in ("drop", None)),
    *(("staging", value) for value in ("gpu", None)),
    *(("direct_io", value) for value in ("yes", True)),
    *(("verify", value) for value in ("always", False)),
    *(("on_failure", value) for value in ("ignore", None)),
    *((name, value) for name in ("on_commit", "on_error") for value in (asyncio.sleep, "print", Path)),
    *(("step_dir", value) for value in ("step", "{step}/x", ".{step}", "{step}-{step}", "{stop}", "{}")),
    *(("step_dir", value) for value in ("x" * 251 + "{step}", "x" * 217 + "{step}", "\u00e9" * 109 + "{step:d}")),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"{name}={shown(value)}: ")
    assert "give" in str(caught.value) or "allowed are" in str(caught.value)


def test_pinned_staging_without_a_device_is_refused(root: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: pinned staging is allowed here")
    with pytest.raises(ConfigError, match=r'staging="pinned": no CUDA device.*"pageable"'):
        CheckpointEngine(root, EngineConfig(staging="pinned"))
    assert not root.exists()


# -- the root -------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "sub/ckpt"])
def test_a_root_that_is_a_file_or_below_one_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with refused(tmp_path, RootError, OSError, "the root cannot be used.*give a directory") as _:
        CheckpointEngine(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory on which nothing can be written, for the superuser either."""
    root = tmp_path / "read-only"
    root.mkdir()
    if os.geteuid():
        root.chmod(0o555)
        yield root
        root.chmod(0o755)
        return
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(root)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"the superuser may write anywhere and no read-only mount can be had here: {mount.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize("root", ["", "a\0b", "a\ud800b"], ids=["empty", "NUL", "surrogate"])
def test_a_root_that_is_no_name_is_refused(tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RootError):
        SyncCheckpointEngine(root)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_begins_with_a_tilde_is_refused_with_expanduser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for opens in (CheckpointEngine, SyncCheckpointEngine, Writer, Reader):
        with pytest.raises(RootError, match=r"begins with ~.*give os\.path\.expanduser"):
            opens("~/runs/ckpt")
    with pytest.raises(ConfigError, match=r"begins with ~.*give os\.path\.expanduser"):
        aio_ckpt.read(Path("~/runs/ckpt"))
    assert os.listdir(tmp_path) == []
    SyncCheckpointEngine("./~").close()


@pytest.mark.parametrize("url", ["hf://org/x", "https://host/x", Path("hf://org/x")])
def test_a_url_of_no_object_store_is_refused_as_a_root_and_as_a_path(
    tmp_path: Path, url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = r"a URL \(\w+:\), and only local file systems.*mount it"
    for opens in (CheckpointEngine, SyncCheckpointEngine, Writer, Reader):
        with pytest.raises(RootError, match=remedy):
            opens(url)
    with SyncCheckpointEngine("root") as engine, pytest.raises(ConfigError, match=remedy):
        engine.save({"w": torch.ones(2)}, path=url)
    assert os.listdir() == []


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", Path("s3://bucket/x")])
def test_a_place_in_an_object_store_is_refused_where_none_can_be_used(
    tmp_path: Path, url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SyncCheckpointEngine("root") as engine:
        with pytest.raises(ConfigError, match=r"it is in (s3|gs)://bucket, and .* is on a disk: open an"):
            engine.save({"w": torch.ones(2)}, path=url)
        with pytest.raises(ConfigError, match="it is in"):
            engine.remove(url)
        with pytest.raises(ConfigError, match=r"a URL \(\w+:\), and only local file systems"):
            engine.save_file({"w": torch.ones(2)}, url)
    assert os.listdir() == ["root"] or os.listdir() == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket", "the root is a whole bucket: give a place in it"),
        ("s3://", "no place in a bucket"),
        ("s3://bucket/a/../run", r"a URL with \. or \.\. in it"),
        ("s3://key:secret@bucket/run", "a URL with credentials: give them by the environment"),
    ],
)
def test_a_url_that_names_no_place_is_refused_as_a_root(url: str, words: str) -> None:
    for opens in (SyncCheckpointEngine, *([] if url == "s3://bucket" else [Writer, Reader])):
        with pytest.raises((ConfigError, RootError), match=words) as refused:
            opens(url)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"shm_path": "/dev/shm/x"}, {"direct_io": "on"}])
def test_a_setting_that_means_a_disk_is_refused_for_a_root_in_a_store(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}=.*leave it out"):
        SyncCheckpointEngine("s3://bucket/run", EngineConfig(**{"staging": "shm"} | settings))


def test_a_root_in_a_store_without_obstore_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"object stores need obstore: pip install 'aio-ckpt\[remote\]'"):
        SyncCheckpointEngine("s3://bucket/run")


@pytest.mark.parametrize("url", ["hf://org/x", "https://host/x"])
def test_a_url_of_no_object_store_is_refused_as_a_checkpoint(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SyncCheckpointEngine("root") as engine:
        for use in (
            lambda: engine.load({}, path=url),
            lambda: engine.read(path=url),
            lambda: aio_ckpt.read(url),
            lambda: aio_ckpt.load(url, {}),
        ):
            with pytest.raises(ConfigError, match=r"a URL \(\w+:\), and only local file systems"):
                use()


async def test_a_file_url_is_taken_as_a_root_and_as_a_checkpoint(tmp_path: Path) -> None:
    root, state = tmp_path / "a root", {"w": torch.ones(2)}
    async with CheckpointEngine(root.as_uri()) as engine:
        assert engine.root == root
        report = await engine.save(state)
        assert (await engine.load(state, path=report.path.as_uri())).step == 1
        assert torch.equal((await engine.read(path=report.path.as_uri()))["w"], state["w"])
    assert aio_ckpt.load(report.path.as_uri(), state).path == report.path
    aside = (tmp_path / "of dcp").as_uri()
    with warnings.catch_warnings(action="ignore"):  # no_dist warns of itself
        dcp.save(state, storage_writer=Writer(aside), no_dist=True)
        dcp.load(state, storage_reader=Reader(aside), no_dist=True)
    assert sorted(os.listdir(tmp_path)) == ["a root", "of dcp"]
    assert Writer.validate_checkpoint_id(aside)
    assert Reader.validate_checkpoint_id(aside)
    assert Writer.validate_checkpoint_id("s3://bucket/x")
    assert not Writer.validate_checkpoint_id("s3://key:secret@bucket/x")
    assert not Reader.validate_checkpoint_id("hf://org/x")


def test_a_root_that_cannot_be_written_is_refused_at_the_first_save(read_only: Path) -> None:
    with SyncCheckpointEngine(read_only) as engine:
        assert engine.steps() == []
        with refused(read_only, RootError, OSError, "lock file.*give a writable root"):
            engine.save({"w": torch.ones(2)})
        with pytest.raises(CheckpointNotFoundError):
            engine.load({"w": torch.ones(2)})


def test_a_root_that_cannot_be_made_is_refused(read_only: Path) -> None:
    with refused(read_only, RootError, OSError, "the root cannot be used.*give a directory that can be made"):
        CheckpointEngine(read_only / "sub" / "ckpt")


def test_a_root_that_is_a_link_to_nothing_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("scratch")
    with pytest.raises(RootError, match=r"the symbolic link .*/runs leads nowhere"):
        CheckpointEngine(tmp_path / "runs")


def test_a_second_writer_is_refused_and_reading_is_not(root: Path) -> None:
    with SyncCheckpointEngine(root) as first, SyncCheckpointEngine(root) as second:
        first.save({"w": torch.ones(2)}).result(TIMEOUT)
        with refused(root, RootError, OSError, "another engine of this process writes here"):
            second.save({"w": torch.ones(2)})
        assert second.steps() == [1]
        assert torch.equal(second.read()["w"], torch.ones(2))


# -- templates ------------------------------------------------------------------------------------


def template(**changes: object) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "w": torch.zeros(4, 3),
        "n": np.zeros(5, np.int32),
        "lr": 0.5,
        "sub": {"b": torch.zeros(2)},
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not ...}


BAD_TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, bool], type[AioCkptError], type[Exception], str]] = {
    "another shape": ({"w": torch.zeros(3, 4)}, {}, TemplateMismatchError, ValueError, r"w.*\(3, 4\)|w.*\[3, 4\]"),
    "more dimensions": ({"w": torch.zeros(4, 3, 1)}, {}, TemplateMismatchError, ValueError, "w"),
    "another dtype": ({"w": torch.zeros(4, 3, dtype=torch.half)}, {}, TemplateMismatchError, ValueError, "w.*float16"),
    "another dtype of array": ({"n": np.zeros(5, np.int64)}, {}, TemplateMismatchError, ValueError, "n.*int64"),
    "a tensor for an object": ({"lr": torch.zeros(1)}, {}, TemplateMismatchError, ValueError, "lr"),
    "a meta tensor": ({"w": torch.zeros(4, 3, device="meta")}, {}, TemplateMismatchError, ValueError, "w.*meta"),
    "a name that is not stored": ({"new": torch.zeros(1)}, {}, MissingNameError, KeyError, "new.*allow_missing=True"),
    "a name that it lacks": ({"lr": ...}, {"strict": True}, UnexpectedNameError, ValueError, "lacks.*lr"),
    "two leaves of one name": ({"sub.b": torch.zeros(2)}, {}, DuplicateNameError, ValueError, "'sub.b'.*2 values"),
}  # fmt: skip


@pytest.mark.parametrize("step", [None, 1], ids=["newest", "step 1"])
@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_template_that_does_not_match_is_refused_and_left_as_it_was(root: Path, case: str, step: int | None) -> None:
    changes, options, kind, builtin, message = BAD_TEMPLATES[case]
    stored = {"w": torch.ones(4, 3), "n": np.ones(5, np.int32), "lr": 0.1, "sub": {"b": torch.ones(2)}}
    with SyncCheckpointEngine(root) as engine:
        engine.save(stored).result(TIMEOUT)
        target = template(**changes)
        with refused(root, kind, builtin, message):
            engine.load(target, step, **options)
        assert str(target) == str(template(**changes)), "the template was changed although the load was refused"
        report = engine.load(good := template())
        assert report.verified
        assert torch.equal(good["w"], stored["w"])


@pytest.mark.parametrize("only", [5, [5], b"w", ["w", None]])
def test_a_selection_that_is_no_name_is_refused(root: Path, only: Any) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(3)}).result()
        with pytest.raises(ConfigError, match="only="):
            engine.read(only=only)
        assert engine.read(only=(name for name in ["w"]))["w"].sum() == 3


def test_loading_a_step_that_is_not_there_says_which_are(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(2)}, 4).result(TIMEOUT)
        with refused(root, CheckpointNotFoundError, FileNotFoundError, r"step 9 under .*\[4\]"):
            engine.load({"w": torch.zeros(2)}, 9)
        with refused(root, CheckpointNotFoundError, FileNotFoundError, r"step 9 under .*\[4\]"):
            engine.read(9)
        with refused(root, MissingNameError, KeyError, "nothing"):
            engine.read(4, only=["nothing"])


# -- nested tensors: torch's guards end the process where they are given one --------------------------------


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def test_a_nested_tensor_is_refused_behind_a_plain_one_of_its_name(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(2)}).result(TIMEOUT)
        with pytest.raises(UnsupportedLeafError, match="'w': a nested tensor"):
            engine.save({"w": nested_tensor()})


@pytest.mark.parametrize("name", ["v", "w"])
def test_a_nested_tensor_is_no_target(name: str, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"v": torch.ones(2), "w": torch.ones(2)}).result(TIMEOUT)
        target = {"v": torch.zeros(2), "w": torch.zeros(2), name: nested_tensor()}
        with pytest.raises(TemplateMismatchError, match=f"'{name}' is a nested tensor"):
            engine.load(target)
        assert not target["w" if name == "v" else "v"].any()


# -- a module where one leaf is ---------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [torch.ones(2), 5])
def test_a_module_in_the_place_of_a_leaf_is_a_mismatch(leaf: object, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"a": torch.ones(2), "w": leaf}).result(TIMEOUT)
        target = {"a": torch.zeros(2), "w": torch.nn.Linear(1, 1)}
        with pytest.raises(TemplateMismatchError, match="'w' is a Linear") as failure:
            engine.load(target)
        assert not failure.value.target_modified
        assert not target["a"].any()  # type: ignore[operator]


# -- PerRank here, none there -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "given", "remedy"),
    [
        (torch.ones(2), PerRank(torch.zeros(2)), "it holds 'w' of all ranks: give that without PerRank"),
        (PerRank(torch.ones(2)), torch.zeros(2), r"it holds 'w' of each rank by itself: give it as PerRank\(...\)"),
        (PerRank(5), 0, r"give it as PerRank\(...\)"),
    ],
)
def test_where_per_rank_is_all_that_differs_the_error_says_so(
    saved: object, given: object, remedy: str, tmp_path: Path
) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"a": torch.ones(2), "w": saved}).result(TIMEOUT)
        with pytest.raises(MissingNameError, match=remedy):
            engine.load({"a": torch.zeros(2), "w": given})
