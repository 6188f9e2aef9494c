"""An engine whose root is in an object store, with a real S3 server: what works on a disk works there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import called, document
from obstore.exceptions import BaseError, GenericError, UnauthenticatedError
from obstore.store import S3Store, from_url
from other_owner import claim_of_another_host
from rank_processes import Ranks
from slow import slow
from warm_python import run_warm

import aio_ckpt
from aio_ckpt import EngineConfig, KeepBest, SyncCheckpointEngine
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    ConfigError,
    ReadError,
    RootError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.format.root_names import CLAIM_FILE
from aio_ckpt.remote_path import RemotePath, find_remote
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.object_client import _s3_options
from aio_ckpt.storage.object_errors import as_os_error, text_of
from bench.common.seaweedfs import KEY, SECRET
from tests.remote.fault_proxy import Fault
from tests.remote.test_object_store import data_of, get, keys, put

if TYPE_CHECKING:
    from obstore.store import S3Credential

TIMEOUT = 60.0


def state(value: float, size: int = 70_000) -> dict[str, Any]:
    return {"w": torch.arange(float(size)) + value, "name": f"value {float(value)}"}


def value_of(loaded: dict[str, Any]) -> float:
    value = float(loaded["w"][0])
    assert loaded["name"] == f"value {value}"
    assert torch.equal(loaded["w"], state(value, loaded["w"].numel())["w"])
    return value


def names_of(url: str) -> set[str]:
    """Names directly below a root."""
    return {key.partition("/")[0] for key in keys(url)}


@contextlib.contextmanager
def opened(url: str, **settings: Any) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(url, EngineConfig(stall_timeout_secs=TIMEOUT, **settings)) as engine:
        yield engine


# -- the loop that everybody writes ---------------------------------------------------------------------

TRAINER = """
import os, signal, sys, torch, aio_ckpt

url, last, killed_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}
with aio_ckpt.SyncCheckpointEngine(url, aio_ckpt.EngineConfig(keep_last=2)) as engine:
    begun = engine.load(state).step if engine.steps() else 0
    for step in range(begun + 1, last + 1):
        torch.manual_seed(step)
        loss = model(torch.randn(32, 50)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.save(state, step=step)
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
print(begun, loss.item().hex())
"""


def train(url: str, last: int, killed_at: int = 0) -> subprocess.CompletedProcess[str]:
    return run_warm(TRAINER, url, str(last), str(killed_at), options=(), timeout=240.0)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_equal_losses(bucket: str) -> None:
    whole = train(f"{bucket}/whole", 6)
    assert whole.returncode == 0, whole.stderr
    assert train(f"{bucket}/killed", 6, killed_at=4).returncode == -signal.SIGKILL
    resumed = train(f"{bucket}/killed", 6)
    assert resumed.returncode == 0, resumed.stderr
    begun, loss = resumed.stdout.split()
    assert 2 <= int(begun) <= 4
    assert loss == whole.stdout.split()[1]
    with opened(f"{bucket}/killed") as engine:
        assert engine.steps() == [5, 6]
    assert names_of(f"{bucket}/killed") == {".aio_ckpt", "step_000000005", "step_000000006"}
    assert keys(f"{bucket}/killed/.aio_ckpt") == {"lock"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, slow(25)])
def test_a_short_process_that_saves_to_a_store_exits_cleanly(bucket: str, count: int) -> None:
    for number in range(count):
        done = run_warm(TRAINER, f"{bucket}/exits", str(number + 1), "0", is_end_tested=True, timeout=240.0)
        assert (done.returncode, done.stderr) == (0, "")


# -- each call ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_is_loaded_read_verified_and_copied_to_a_disk_where_stock_reads_it(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(f"{bucket}/run") as engine:
        report = engine.save(state(1.0), step=1, files={"card.md": b"mine"}, metrics={"loss": 0.5}).result(TIMEOUT)
        assert report is not None
        assert (str(report.path), report.mode) == (f"{bucket}/run/step_000000001", "object")
        with pytest.raises(StepOrderError):
            engine.save(state(2.0), step=1)
        template = state(0.0)
        assert engine.load(template).step == 1
        assert value_of(template) == value_of(engine.read()) == 1.0
        assert engine.latest_step() == 1
    assert get(f"{bucket}/run/step_000000001/card.md") == b"mine"
    assert document(capsys, "verify", f"{bucket}/run")[1]["is_good"]
    table = document(capsys, "ls", f"{bucket}/run")[1]
    (row,) = table["checkpoints"]
    assert (row["step"], row["is_damaged"], table["pending"]) == (1, False, [])
    copied = aio_ckpt.copy(f"{bucket}/run/step_000000001", tmp_path / "back")
    loaded = {"w": torch.zeros(70_000)}
    dcp.load(loaded, checkpoint_id=str(copied.path))
    assert torch.equal(loaded["w"], state(1.0)["w"])


def test_an_overwrite_replaces_a_step_and_leaves_nothing_of_the_old_one(bucket: str) -> None:
    step = f"{bucket}/run/step_000000001"
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1.0), step=1, files={"card.md": b"one", "old.md": b"x"}).result(TIMEOUT)
        before = keys(step)
        engine.save(state(2.0), step=1, overwrite=True, files={"card.md": b"two"}).result(TIMEOUT)
        assert value_of(engine.read(1)) == 2.0
    assert get(f"{step}/card.md") == b"two"
    assert keys(step) & before == {".metadata", "card.md"}
    assert len(keys(step)) == len(before) - 1


def test_a_checkpoint_is_saved_by_its_path_replaced_and_removed(bucket: str) -> None:
    best = f"{bucket}/best/model"
    with opened(f"{bucket}/run") as engine:
        for value in (1.0, 2.0):
            engine.save(state(value), path=best).result(TIMEOUT)
            assert value_of(engine.read(path=best)) == value
        assert engine.steps() == []
        engine.remove(best).result(TIMEOUT)
    assert keys(best) == set()


def test_rm_deletes_the_files_of_what_was_set_aside_and_no_other(bucket: str, capsys) -> None:
    with opened(f"{bucket}/run") as engine:
        for step in (1, 2, 3):
            engine.save(state(step), step=step).result(TIMEOUT)
        engine.rollback(1)
        kept = keys(f"{bucket}/run/step_000000001")
        engine.save(state(20.0), step=2).result(TIMEOUT)
    before = {each for each in keys(f"{bucket}/run/step_000000002") if each.endswith(".distcp")}
    assert (len(before), bool(keys(f"{bucket}/run/step_000000003"))) == (2, True)
    code, out, _ = called(capsys, "rm", f"{bucket}/run", "--aside")
    assert (code, out.count("abandoned")) == (0, 2)
    assert not keys(f"{bucket}/run/step_000000003")
    assert len(before & keys(f"{bucket}/run/step_000000002")) == 1
    assert keys(f"{bucket}/run/step_000000001") == kept
    assert not [each for each in keys(f"{bucket}/run/.aio_ckpt") if "step_" in each]
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0
    assert value_of(aio_ckpt.read(f"{bucket}/run/step_000000002")) == 20.0


def test_retention_protection_rollback_and_deletion(bucket: str) -> None:
    root = f"{bucket}/run"
    with opened(root, keep_last=2, keep_best=KeepBest(metric="loss")) as engine:
        for step in range(1, 7):
            engine.save(state(step), step=step, metrics={"loss": abs(step - 2.0)}).result(TIMEOUT)
            if step == 3:
                engine.protect(3)
    with opened(root) as engine:
        assert engine.steps() == [2, 3, 5, 6]
        assert engine.protected_steps() == [3]
        assert engine.rollback(5) == [6]
        with pytest.raises(CheckpointNotFoundError, match=r"there is no \.metadata"):
            engine.read(path=f"{root}/step_000000006")
        engine.save(state(66.0), step=6).result(TIMEOUT)
        assert value_of(engine.read(6)) == 66.0
        engine.unprotect(3)
        engine.delete(3)
        assert engine.steps() == [2, 5, 6]
        assert [value_of(engine.read(step)) for step in engine.steps()] == [2.0, 5.0, 66.0]
    (abandoned,) = {key.rpartition("/")[0] for key in keys(f"{root}/.aio_ckpt/abandoned")}
    back = f"{root}/.aio_ckpt/abandoned/{abandoned}/.metadata"
    assert abandoned.endswith("step_000000006")
    assert get(back)


def test_a_damaged_step_is_set_aside_and_the_one_before_it_is_loaded(bucket: str) -> None:
    root = f"{bucket}/run"
    with opened(root) as engine:
        for step in (1, 2):
            engine.save(state(step), step=step).result(TIMEOUT)
        data = data_of(f"{root}/step_000000002")
        content = get(data)
        put(data, content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
        template = state(0.0)
        report = engine.load(template)
        assert (report.step, value_of(template)) == (1, 1.0)
        assert [skipped.step for skipped in report.skipped] == [2]
        assert engine.steps() == [1]
        engine.save(state(2.5), step=2).result(TIMEOUT)
        assert value_of(engine.read()) == 2.5
    assert get(data) != content, "what was set aside is never deleted"


# -- several ranks --------------------------------------------------------------------------------------


def save_and_load_in_store(rank: int, count: int, url: str, environment: dict[str, str]) -> list[float]:
    os.environ.update(environment)
    with opened(url, keep_last=2) as engine:
        mine = aio_ckpt.PerRank(torch.full((1000,), float(rank)))
        for step in (1, 2, 3):
            saved = {"w": state(step)["w"], "mine": mine}
            engine.save(saved, step=step, overwrite=False).result(TIMEOUT)
        engine.save({"w": state(33.0)["w"], "mine": mine}, step=3, overwrite=True).result(TIMEOUT)
        template = {"w": torch.zeros(70_000), "mine": aio_ckpt.PerRank(torch.zeros(1000))}
        assert engine.load(template).step == 3
        return [float(template["w"][0]), float(template["mine"].value[0]), *map(float, engine.steps())]


def test_ranks_save_and_load_one_checkpoint_in_a_store(two: Ranks, bucket: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = two.run(save_and_load_in_store, f"{bucket}/run", environment)
    assert found == [[33.0, rank, 2.0, 3.0] for rank in range(2)]
    assert keys(f"{bucket}/run/.aio_ckpt") == {"lock"}


# -- one writer -----------------------------------------------------------------------------------------


def take_over(url: str) -> None:
    put(f"{url}/{CLAIM_FILE}", claim_of_another_host())


def test_a_second_writer_is_refused_by_name(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"{bucket}/run"
    with opened(root) as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
    take_over(root)
    with opened(root) as engine:
        assert value_of(engine.read()) == 1.0
        with pytest.raises(RootError, match=r"process \d+ on node-7 writes here|It is dead if its heartbeat"):
            engine.save(state(2.0), step=2, deadline_secs=0.5)
    assert names_of(root) == {".aio_ckpt", "step_000000001"}


@pytest.mark.sampled
@pytest.mark.parametrize("call", ["save", "overwrite", "save_path", "rollback", "delete", "remove"])
def test_a_writer_that_was_taken_over_changes_nothing(bucket: str, call: str) -> None:
    root, best = f"{bucket}/run", f"{bucket}/best"
    with opened(root) as engine:
        for step in (1, 2, 3):
            engine.save(state(step), step=step, files={"card.md": b"mine"}).result(TIMEOUT)
        engine.save(state(5.0), path=best).result(TIMEOUT)
        take_over(root)
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: engine.save(state(9.0), step=9).result(TIMEOUT),
            "overwrite": lambda: engine.save(state(9.0), step=3, overwrite=True, files={"card.md": b"late"}).result(
                TIMEOUT
            ),
            "save_path": lambda: engine.save(state(9.0), path=best).result(TIMEOUT),
            "rollback": lambda: engine.rollback(1),
            "delete": lambda: engine.delete(1),
            "remove": lambda: engine.remove(best).result(TIMEOUT),
        }
        with pytest.raises(RootError, match="on node-7 has taken over"):
            calls[call]()
        assert engine.steps() == [1, 2, 3]
        assert value_of(engine.read(3)) == 3.0
        assert value_of(engine.read(path=best)) == 5.0
    assert get(f"{root}/step_000000003/card.md") == b"mine"


# -- faults on the way ----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("end", [".distcp", slow(".bin"), slow(".json"), ".metadata", slow("claim.json")])
def test_a_put_whose_answer_is_lost_is_found_to_be_done(bucket: str, faulty, end: str) -> None:
    faulty(lambda method, path, number: "lost" if method == "PUT" and path.endswith(end) and number == 1 else "")
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
        engine.save(state(2.0), step=1, overwrite=True).result(TIMEOUT)
        assert value_of(engine.read(1)) == 2.0
    assert keys(f"{bucket}/run/.aio_ckpt") == {"lock"}


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [{}, {"AWS_UNSIGNED_PAYLOAD": "true", "AWS_CHECKSUM_ALGORITHM": "CRC64NVME"}])
def test_a_part_that_arrives_wrong_is_refused_by_the_server_and_never_committed(
    bucket: str, faulty, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header holds the SHA-256 of the part, or its CRC64."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    wrong: list[str] = []

    def spoil(method: str, path: str, number: int) -> Fault:
        is_part = method == "PUT" and path.endswith(".distcp") and not wrong
        wrong.extend([path] if is_part else [])
        return "sent wrong" if is_part else ""

    faulty(spoil)
    with opened(f"{bucket}/run") as engine:
        with contextlib.suppress(WriteError):
            engine.save(state(1.0, size=5_000_000), step=1).result(TIMEOUT)
        engine.save(state(2.0, size=5_000_000), step=2).result(TIMEOUT)
        assert value_of(engine.read(2)) == 2.0
        assert [value_of(engine.read(step)) for step in engine.steps()] in ([2.0], [1.0, 2.0])
    assert wrong


@pytest.mark.slow
def test_a_store_that_is_busy_is_asked_again(bucket: str, faulty) -> None:
    faulty(lambda method, path, number: "busy" if number <= 2 else "")
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
        assert value_of(engine.read()) == 1.0


def test_no_message_and_no_log_line_holds_a_credential(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
        texts = [repr(engine), str(engine.stats())]
    manifests = [get(f"{bucket}/run/step_000000001/{name}") for name in keys(f"{bucket}/run/step_000000001")]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-mistyped")
    with opened(f"{bucket}/run") as engine, pytest.raises((AioCkptError, OSError)) as caught:
        engine.save(state(2.0), step=2)
    for text in (*texts, str(caught.value), repr(caught.value), caplog.text, *map(repr, manifests)):
        assert SECRET not in text
        assert "Signature" not in text.replace("SignatureDoesNotMatch", "")  # a code of S3
    assert "Permission denied" in str(caught.value)
    assert "look at the credentials" in str(caught.value)
    assert bucket in str(caught.value)


def test_credentials_of_a_profile_are_found(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text(
        f"[training]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nregion = us-east-1\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "training")
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1.0), step=1).result(TIMEOUT)
        assert value_of(engine.read()) == 1.0
        place = find_remote("root", f"{bucket}/run")
        assert place is not None
    given = _s3_options(place)["credential_provider"]()
    assert given["expires_at"] - datetime.now(UTC) <= timedelta(minutes=10), "boto3 promises no longer life"


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        (
            "unknown",
            r"cannot get the credentials .*: The config profile \(unknown\) could not be found: look at AWS_PRO",
        ),
        (
            "failing",
            r"cannot get the credentials .*: Error when retrieving credentials from custom-process: look at AWS_",
        ),
        ("expired", r"cannot get the credentials .*: Error loading SSO Token: .* by aws sso login"),
    ],
)
def test_a_profile_whose_credentials_cannot_be_had_is_refused(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, told: str
) -> None:
    (tmp_path / "config").write_text(
        "[profile failing]\ncredential_process = false\n[profile expired]\nsso_session = s\nsso_account_id = 1\n"
        "sso_role_name = r\n[sso-session s]\nsso_start_url = https://sso.invalid\nsso_region = us-east-1\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(ConfigError, match=told), opened(f"{bucket}/run"):
        pass


def test_the_region_of_the_environment_counts_before_that_of_a_profile(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nregion = eu-west-1\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    place = find_remote("root", bucket)
    assert place is not None
    assert "region" not in _s3_options(place)["credential_provider"].config
    monkeypatch.delenv("AWS_REGION")
    assert _s3_options(place)["credential_provider"].config["region"] == "eu-west-1"


def s3_error(status: str, code: str) -> GenericError:
    """What obstore raises for an answer of S3."""
    body = f"<Error><Code>{code}</Code><Message>so it is</Message></Error>"
    return GenericError(f"Generic S3 error: Server returned non-2xx status code: {status}: {body}")


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        ("400 Bad Request", "ExpiredToken", "look at the credentials; they must be valid"),
        ("403 Forbidden", "RequestTimeTooSkewed", "set the clock of this host"),
        ("403 Forbidden", "AccessDenied", "look at the credentials"),
    ],
)
def test_a_refusal_is_told_with_its_code_and_its_own_remedy(status: str, code: str, remedy: str) -> None:
    error = as_os_error(s3_error(status, code), Path("/bucket/run"))
    assert error.errno == errno.EACCES
    assert f"(so it is, {code}): {remedy}" in str(error)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Error performing HEAD https://s3/b/run: Server returned non-2xx status code: 400 Bad Request: ", "expired"),
        ("Error performing GET https://s3/b/run in 1ms - Received redirect without LOCATION, ...", "set AWS_REGION"),
        ("Error performing PUT https://s3/b/run in 30.0s - HTTP error: error sending request", "AWS_ENDPOINT_URL"),
    ],
)
def test_an_answer_without_a_reason_is_told_with_what_helps(text: str, remedy: str) -> None:
    assert remedy in text_of(GenericError(f"Generic S3 error: {text}"))


def test_missing_credentials_are_named_with_the_remedy() -> None:
    asked = GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s")
    assert text_of(asked).startswith("no credentials were found: set those of the store in the environment")


def test_why_a_caller_s_own_function_gives_no_credentials_is_told(s3_server: str) -> None:
    def refuse() -> S3Credential:
        raise PermissionError("log in first")

    store = S3Store(
        "bucket", prefix="run", endpoint=s3_server, credential_provider=refuse, client_options={"allow_http": True}
    )
    with (
        opened(store) as engine,
        pytest.raises(ReadError, match=r"\(PermissionError: log in first\): look at"),
    ):
        engine.steps()


def test_an_asynchronous_function_for_credentials_is_refused_by_name() -> None:
    asked = UnauthenticatedError("for path External AWS credential provider: RuntimeError: no running event loop")
    assert "give the store a credential_provider that is not asynchronous" in str(as_os_error(asked, Path("/a")))


def test_a_server_that_does_not_answer_is_named_with_the_cause_and_the_remedy() -> None:
    store = S3Store(
        "bucket",
        endpoint="http://127.0.0.1:1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
        retry_config={"max_retries": 100, "retry_timeout": timedelta(seconds=1)},
    )
    with pytest.raises(BaseError) as raised:
        obstore.list_with_delimiter(store, "run")
    text = text_of(raised.value)
    assert re.match(
        r"http://127\.0\.0\.1:1 did not answer for \d s \(Connection refused\): .*AWS_ENDPOINT_URL", text
    ), text


async def test_a_store_that_does_not_answer_is_asked_once() -> None:
    class Silent(Storage):
        async def list_dir(self, path: Path) -> list[str]:
            raise ReadError(errno.EIO, "no answer", str(path))

        async def exists(self, path: Path) -> bool:
            raise AssertionError(f"{path} is asked for again")

    with ThreadPoolExecutor(1) as executor, pytest.raises(ReadError, match="no answer"):
        await names_in(Silent(executor), RemotePath("s3://bucket/run"))


def test_the_bucket_of_a_root_that_does_not_exist_is_named(bucket: str) -> None:
    with opened("s3://no-such-bucket/run") as engine, pytest.raises(OSError, match="NoSuchBucket") as caught:
        engine.save(state(1.0), step=1)
    assert "s3://no-such-bucket/run" in str(caught.value)
    assert obstore.list(from_url("s3://bucket")) is not None


# -- commands -------------------------------------------------------------------------------------------


def test_commands_change_a_root_in_a_store(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"{bucket}/run"
    with opened(root) as engine:
        for step in range(1, 7):
            engine.save(state(step), step=step).result(TIMEOUT)
        code, _, err = called(capsys, "rm", root, "1")
        assert (code, "writes here" in err or "another engine of this process" in err) == (1, True)
    for arguments in (
        ("protect", root, "2"),
        ("rm", root, "1"),
        ("rollback", root, "5"),
        ("prune", root, "--keep-last", "1", "--yes"),
    ):
        code, _, err = called(capsys, *arguments)
        assert code == 0, err
    assert [row["step"] for row in document(capsys, "ls", root)[1]["checkpoints"]] == [2, 5]
    with opened(root) as engine:
        assert (engine.steps(), engine.protected_steps()) == ([2, 5], [2])
        assert [value_of(engine.read(step)) for step in (2, 5)] == [2.0, 5.0]
    assert called(capsys, "unprotect", root, "2")[0] == 0
    assert names_of(root) == {".aio_ckpt", "step_000000002", "step_000000005", "step_000000006"}
    code, _, err = called(capsys, "rm", root, "77")
    assert (code, "step 77: no such committed step" in err) == (1, True)


@pytest.mark.parametrize("command", ["ls", "du", "rm", "unprotect"])
def test_a_mistyped_root_in_a_store_is_named(bucket: str, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with opened(f"{bucket}/run") as engine:
        engine.save(state(1), step=1).result(TIMEOUT)
    arguments = ("1",) if command in ("rm", "unprotect") else ()
    for place, words in (
        ("ran", "is empty"),
        ("run/step_000000001", "is a checkpoint, no root"),
        ("", "holds no step"),
    ):
        code, out, err = called(capsys, command, f"{bucket}/{place}", *arguments)
        assert (code, out) == (1, "")
        assert words in err


# -- what did not change --------------------------------------------------------------------------------


def frozen_state(value: float) -> dict[str, Any]:
    return {"base": torch.arange(600_000.0), "trained": torch.full((100,), value)}


def test_the_store_copies_what_did_not_change_and_each_step_is_whole_by_itself(bucket: str, capsys: Any):
    with opened(f"{bucket}/run", keep_last=2) as engine:
        reports = [engine.save(frozen_state(step), step=step).result() for step in range(1, 8)]
        assert [report.cloned_bytes > 2_000_000 for report in reports] == [False] * 4 + [True] * 3
    with opened(f"{bucket}/run") as engine:
        assert engine.steps() == [6, 7]
        for step in (6, 7):
            template = {key: torch.zeros_like(tensor) for key, tensor in frozen_state(step).items()}
            assert engine.load(template, step=step).step == step
            assert all(torch.equal(template[key], tensor) for key, tensor in frozen_state(step).items())
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0


def test_what_is_trusted_is_copied_by_the_store_or_read_verified_and_put(bucket: str, capsys: Any):
    base = torch.nn.Parameter(frozen_state(0)["base"], requires_grad=False)
    with opened(f"{bucket}/run", frozen="trusted", relink_limit=2, keep_last=1) as engine:
        for step in range(1, 9):
            report = engine.save({**frozen_state(step), "base": base}, step=step).result()
            assert (report.cloned_bytes > 2_000_000) is (step in (2, 4, 6, 8)), step
    assert torch.equal(aio_ckpt.read(f"{bucket}/run/step_000000008")["base"], base)
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0


def test_an_object_that_somebody_replaced_is_not_copied(bucket: str):
    with opened(f"{bucket}/run") as engine:
        for step in range(1, 6):
            engine.save(frozen_state(step), step=step).result()
        (key,) = [key for key in keys(f"{bucket}/run/step_000000005") if key.endswith("_0_1.distcp")]
        store = from_url("s3://bucket")
        path = f"{bucket.removeprefix('s3://bucket/')}/run/step_000000005/{key}"
        data = bytearray(bytes(obstore.get(store, path).bytes()))
        data[len(data) // 2] ^= 1
        obstore.put(store, path, bytes(data))
        assert engine.save(frozen_state(6), step=6).result().cloned_bytes == 0
    assert torch.equal(aio_ckpt.read(f"{bucket}/run/step_000000006")["base"], frozen_state(6)["base"])
