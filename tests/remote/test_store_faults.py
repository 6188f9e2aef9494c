"""A root in an object store whose calls fail, lose their answers or end with the process: nothing is lost or wrong."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import obstore
import pytest
import torch
from memory_bucket import Fault, MemoryBucket
from other_owner import claim_of_another_host
from slow import slow

import aio_ckpt
from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit import leftovers
from aio_ckpt.commit import root_claim as claims
from aio_ckpt.errors import AioCkptError, RootError, WriteError
from aio_ckpt.format.checkpoint_files import save_of_file, save_of_metadata
from aio_ckpt.format.root_manifest import decode_root
from aio_ckpt.remote_path import RemotePath, check_place
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage import object_client
from aio_ckpt.storage.mounts import OBJECT_STORE
from aio_ckpt.storage.object_store import ObjectStorage

ROOT, BEST = "s3://bucket/run", "s3://bucket/best"
TIMEOUT = 30.0
Model = dict[str, float]
"""Value of each checkpoint, by the name of its directory."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    monkeypatch.setattr(claims, "_STORE_SILENCE_SECS", -1.0)  # a dead writer is followed at once
    monkeypatch.setattr(leftovers, "owner_by_name", lambda *_: None)  # it was another process
    return MemoryBucket(monkeypatch)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3000,), value), "name": f"value {value}"}


def step_name(step: int) -> str:
    return f"run/step_{step:09d}"


def save(step: int, value: float, **options: Any) -> Operation:
    return lambda engine: engine.save(state(value), step=step, **options).result(TIMEOUT), {step_name(step): value}


def save_best(value: float) -> Operation:
    return lambda engine: engine.save(state(value), path=BEST).result(TIMEOUT), {"best": value}


def gone(call: Callable[[SyncCheckpointEngine], Any], *names: str) -> Operation:
    return call, dict.fromkeys(names)


Operation = tuple[Callable[[SyncCheckpointEngine], Any], dict[str, float | None]]
"""A call, and what it makes of the checkpoints: values, or None for one that is gone."""
OPERATIONS: list[Operation] = [
    save(1, 1.0),
    save(2, 2.0, files={"card.md": b"two"}),
    save(2, 2.5, overwrite=True, files={"card.md": b"two and a half", "more.md": b"x"}),
    save_best(9.0),
    save_best(9.5),
    save(3, 3.0),
    save(4, 4.0),
    gone(lambda engine: engine.rollback(3), step_name(4)),
    save(4, 4.5),
    gone(lambda engine: engine.delete(1), step_name(1)),
    save(2, 2.75, overwrite=True),
    gone(lambda engine: engine.remove(BEST).result(TIMEOUT), "best"),
]


def run(engine: SyncCheckpointEngine, errors: list[Exception]) -> list[Model]:
    """Do the operations until one fails, and keep its error. Return what may be there afterwards."""
    model: Model = {}
    for call, changes in OPERATIONS:
        after = {name: value for name, value in (model | changes).items() if value is not None}
        try:
            call(engine)
        except (AioCkptError, OSError) as error:
            errors.append(error)
            return [model, after]
        model = after
    return [model]


def observed(bucket: MemoryBucket) -> Model:
    """Value of each checkpoint in the bucket, verified."""
    found = {}
    for key in sorted(bucket.keys()):
        directory, _, name = key.rpartition("/")
        if name == ".metadata" and ".aio_ckpt" not in key:
            loaded = aio_ckpt.read(f"s3://bucket/{directory}")
            assert loaded["name"] == f"value {float(loaded['w'][0])}"
            assert {f"{directory}/{each}" for each in files_of(bucket, directory)} <= bucket.keys()
            found[directory] = float(loaded["w"][0])
    return found


def files_of(bucket: MemoryBucket, directory: str) -> Iterable[str]:
    """Names of the caller's files of a checkpoint."""
    manifest = f"aio_ckpt.{save_of_metadata(bucket.get(f'{directory}/.metadata'))}.json"
    return decode_root(bucket.get(f"{directory}/{manifest}"), name=manifest).files


def leaked(bucket: MemoryBucket) -> set[str]:
    """Objects that belong to no checkpoint, seen or set aside, but for records of moves that were not completed."""
    keys = bucket.keys()
    owned = {key for key in keys if key in ("run/.aio_ckpt/lock", "run/.aio_ckpt/claim.json") or "/protected/" in key}
    for key in keys:
        directory, _, name = key.rpartition("/")
        if name != ".metadata":
            continue
        save_id = save_of_metadata(bucket.get(key))
        assert save_id is not None
        place = directory
        owned.add(key)
        if f"{directory}/.metadata.files" in keys:
            record = json.loads(bucket.get(f"{directory}/.metadata.files"))
            place, files = record["place"], record["files"]
            owned.add(f"{directory}/.metadata.files")
        else:
            files = files_of(bucket, directory)
        owned.update(
            each for each in keys if each.startswith(f"{place}/") and save_of_file(each.rpartition("/")[2]) == save_id
        )
        owned.update(f"{place}/{each}" for each in files)
    set_aside = [key for key in keys if "/abandoned/" in key or "/corrupt/" in key]
    return keys - owned - {key for key in set_aside if key.endswith("/.metadata.files")}


@contextlib.contextmanager
def opened() -> Iterator[SyncCheckpointEngine]:
    engine = SyncCheckpointEngine(ROOT, EngineConfig(stall_timeout_secs=TIMEOUT))
    try:
        yield engine
    finally:
        with contextlib.suppress(AioCkptError, OSError):
            engine.terminate()


def test_without_faults_all_operations_do_what_they_say_and_leave_nothing(bucket: MemoryBucket) -> None:
    errors: list[Exception] = []
    with opened() as engine:
        model, *_ = run(engine, errors)
        engine.close()
    assert errors == []
    assert observed(bucket) == model == {step_name(2): 2.75, step_name(3): 3.0, step_name(4): 4.5}
    assert leaked(bucket) == set()
    assert len(bucket.changes) < 200


def test_a_save_is_committed_though_nothing_may_be_deleted(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as engine:
        bucket.choose = lambda name, key, _: "failed" if name == "delete" and "/pending/" in key else ""
        for step in (1, 2):
            engine.save(state(step), step=step).result(TIMEOUT)
        assert "the next writer deletes it" in caplog.text
        engine.rollback(1)
    bucket.revive()
    before = bucket.keys()
    aside = {key for key in before if key.startswith(f"{step_name(2)}/")}
    with opened() as engine:
        engine.save(state(3.0), step=3).result(TIMEOUT)
        engine.close()
    assert aside, "the files of a step that was set aside stay where they are"
    after = bucket.keys()
    assert aside <= after, "what is pending is deleted, and not what was set aside since"
    assert not any("/pending/" in key for key in after)


async def test_of_two_engines_that_set_a_dead_claim_aside_one_gets_it(bucket: MemoryBucket) -> None:
    executor = Executor("claims", 2)
    storage, claim = ObjectStorage(executor, bucket.store), check_place("path", f"{ROOT}/.aio_ckpt/claim.json")
    try:
        await storage.write_file(claim, b"dead")
        await storage.rename(claim, claim.parent / "trash/claim-dead")
        await storage.write_file(claim, b"dead")
        with pytest.raises(WriteError, match="exists"):
            await storage.rename(claim, claim.parent / "trash/claim-dead")
        await storage.write_file(claim.parent / "protected/1", b"")
        with pytest.raises(WriteError, match="exists"):
            await storage.write_file(claim.parent / "protected/1", b"")
    finally:
        executor.shutdown()


def test_a_request_that_hangs_ends_before_its_writer_counts_as_dead() -> None:
    place = RemotePath.of("s3://bucket/run")
    assert place is not None
    store, limits = object_client.open_store(place), object_client.COMMITS
    assert store.retry_config["retry_timeout"].total_seconds() == limits.retry_secs
    assert store.client_options["timeout"] == f"{limits.try_secs}s"
    longest = limits.retry_secs + limits.try_secs
    assert claims.longest_silence(OBJECT_STORE) > longest + 2 * claims.HEARTBEAT_SECS


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_commit_that_comes_after_the_takeover_is_no_success(bucket: MemoryBucket, is_overwrite: bool) -> None:
    """Its request may hang, and the next writer has cleared the files."""
    with opened() as engine:
        if is_overwrite:
            engine.save(state(1.0), step=1).result(TIMEOUT)

        def hang(name: str, key: str, _: int) -> Fault:
            if (name, key) == ("put", f"{step_name(1)}/.metadata"):
                bucket.replace("run/.aio_ckpt/claim.json", claim_of_another_host())
            return ""

        bucket.choose = hang
        with pytest.raises(RootError, match="on node-7 has taken over") as caught:
            engine.save(state(2.0), step=1, overwrite=is_overwrite).result(TIMEOUT)
    assert caught.value.in_doubt


def test_an_overwrite_replaces_no_checkpoint_but_the_one_that_it_has_seen(bucket: MemoryBucket) -> None:
    """A writer that stands still between the look at its claim and the commit finds the next writer's step there."""
    with opened() as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
        key, others = f"{step_name(1)}/.metadata", b"the next writer's"

        records = []

        def stand_still(name: str, changed: str, _: int) -> Fault:
            if name == "put" and changed.endswith("/.metadata.files"):
                records.append(changed)
                if len(records) == 2:  # that of what is to be replaced: the commit follows
                    bucket.replace(key, others)
            return ""

        bucket.choose = stand_still
        with pytest.raises(WriteError, match="changed this object"):
            engine.save(state(2.0), step=1, overwrite=True).result(TIMEOUT)
    assert bucket.get(key) == others


def test_a_store_that_ignores_conditions_is_refused_before_the_first_save(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put

    def put_anyway(*args: Any, **options: Any) -> Any:
        return put(*args, **(options | {"mode": "overwrite"}))

    monkeypatch.setattr(obstore, "put", put_anyway)
    with opened() as engine, pytest.raises(RootError, match=r"ignores the condition of a put \(If-None-Match\)"):
        engine.save(state(1.0), step=1)
    assert bucket.keys() == {"run/.aio_ckpt/lock"}


@pytest.mark.parametrize("fails", [0, 1])
def test_a_store_that_fails_at_the_first_save_is_an_error_of_the_root(bucket: MemoryBucket, fails: int) -> None:
    with opened() as engine:
        bucket.choose = lambda name, key, number: "failed" if number == fails else ""
        with pytest.raises(RootError, match=r"connection refused.*s3://bucket/run/\.aio_ckpt/lock"):
            engine.save(state(1.0), step=1)
        engine.save(state(1.0), step=1).result(TIMEOUT)


def test_the_requests_of_a_save_and_of_a_load_are_those_of_the_documentation(bucket: MemoryBucket) -> None:
    with opened() as engine:
        for step in range(1, 4):
            engine.save(state(step), step=step).result(TIMEOUT)
        begun = len(bucket.calls)
        engine.save(state(4.0), step=4).result(TIMEOUT)
        saved = len(bucket.calls)
        engine.load(state(0.0))
        loaded = len(bucket.calls)
    assert Counter(bucket.calls[begun:saved]) == {"put": 6, "get": 4, "delete": 2}
    assert Counter(bucket.calls[saved:loaded]) == {"list_with_delimiter": 1, "head": 4 + 1, "get": 5}


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_commit_whose_answer_is_lost_is_read_back(bucket: MemoryBucket, is_overwrite: bool) -> None:
    with opened() as engine:
        if is_overwrite:
            engine.save(state(1.0), step=1).result(TIMEOUT)
        bucket.choose = lambda name, key, _: "lost" if (name, key) == ("put", f"{step_name(1)}/.metadata") else ""
        engine.save(state(2.0), step=1, overwrite=is_overwrite).result(TIMEOUT)
        engine.close()
    assert observed(bucket) == {step_name(1): 2.0}
    assert leaked(bucket) == set()


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["dead", "failed", "lost"])
@pytest.mark.parametrize("stride", [13, slow(1)])
def test_a_fault_at_any_change_loses_nothing_and_the_next_writer_clears_what_is_left(
    bucket: MemoryBucket, fault: Fault, stride: int
) -> None:
    with opened() as engine:
        run(engine, [])
    for at in range(0, len(bucket.changes), stride):
        bucket.empty()
        bucket.choose = functools.partial(_fault_at, at, fault)
        with opened() as engine:
            allowed = run(engine, errors := [])
        call = f"{fault} at {at}: {bucket.changes[at]}"
        bucket.revive()
        found = observed(bucket)
        assert found in allowed, f"{call}: {found}, not one of {allowed}, after {errors}"
        with opened() as engine:
            assert {step_name(step): found[step_name(step)] for step in engine.steps()} == {
                name: value for name, value in found.items() if name != "best"
            }
            engine.save(state(7.0), step=7).result(TIMEOUT)
            engine.close()
        assert observed(bucket) == found | {step_name(7): 7.0}, call
        assert leaked(bucket) == set(), call


def _fault_at(at: int, fault: Fault, name: str, key: str, number: int) -> Fault:
    del name, key
    return fault if number == at else ""
