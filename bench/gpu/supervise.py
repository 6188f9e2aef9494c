"""Trials in processes of their own, one a rank: started together, measured from outside, killed when they hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bench.common.results import BENCH
from bench.gpu.options import Trial

__all__ = ["EventReader", "Outcome", "Processes", "Ranks", "free_port"]

LOOK_SECS = 0.1
GRACE_SECS = 5.0
"""For a rank whose peer has failed, and for a process that has reported its end."""
STORE_SECS = 60.0
"""For words between the supervisors, beyond what a trial may take."""

Event = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one trial on one rank."""

    status: str
    """``ok``, ``not run`` or ``failed``."""
    error: str = ""
    """Why the contender has no result; empty if it has one."""
    events: list[Event] = field(default_factory=list)
    """What it reported, in order; phases before a failure are kept."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Growth in bytes from ``ready`` to the largest seen: ``tree``, ``system``, ``device``."""


class Ranks:
    """The supervisors of one run: one plain process, or torchrun's, which agree through a store."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._trials = 0
        self._store: Store | None = None
        if self.world > 1:
            # torchrun's agent serves the store; its clients find it where a master would be.
            is_master = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, None, is_master, timedelta(seconds=STORE_SECS))
            self._store = PrefixStore("bench.gpu", store)

    def decide(self, decision: Mapping[str, object] | None, wait_secs: float) -> dict[str, Any]:
        """What the first rank decided, on every rank."""
        self._trials += 1
        if self._store is None:
            return dict(decision or {})
        key = f"{self._trials}/decision"
        if decision is not None:
            self._store.set(key, json.dumps(decision))
        self._store.wait([key], timedelta(seconds=wait_secs + STORE_SECS))
        decided: dict[str, Any] = json.loads(self._store.get(key))
        return decided

    def tell_failure(self) -> None:
        """Of the current trial, to the other ranks, whose processes may wait for this one's for ever."""
        if self._store is not None:
            self._store.set(f"{self._trials}/failure", str(self.rank))

    def has_failure(self) -> bool:
        """Whether a rank told one."""
        return self._store is not None and self._store.check([f"{self._trials}/failure"])

    def gather(self, outcome: Outcome) -> list[Outcome]:
        """Every rank's, on the first rank; elsewhere nothing."""
        if self._store is None:
            return [outcome]
        self._store.set(f"{self._trials}/outcome/{self.rank}", json.dumps(asdict(outcome)))
        if self.rank:
            return []
        keys = [f"{self._trials}/outcome/{rank}" for rank in range(self.world)]
        self._store.wait(keys, timedelta(seconds=STORE_SECS))
        return [Outcome(**json.loads(self._store.get(key))) for key in keys]


def free_port() -> int:
    """On this host, now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Processes:
    """This rank's processes of the trials, one after the other.

    Invariant: while one trial runs, the process of the next has started, imports (several seconds, while the one that
    runs builds its trainer) and waits to be told its trial. When that is over, it and all it started are gone.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._spare: Process | None = None

    def run(self, trial: Trial, port: int, limit_secs: float, *, has_next: bool) -> Outcome:
        """From start to end; what takes longer than ``limit_secs`` is killed."""
        process, self._spare = self._spare or Process(self._ranks), None
        if has_next:
            self._spare = Process(self._ranks)
        folder = Path(trial.folder)
        events = folder.with_name(f"{folder.name}-events-{self._ranks.rank}.jsonl")
        try:
            process.tell(trial, events, port)
            outcome = _watch(process.popen, events, self._ranks, limit_secs)
        finally:
            process.end()
        if outcome.status == "failed":
            self._ranks.tell_failure()
            outcome.error = outcome.error or process.last_words
        return outcome

    def close(self) -> None:
        """End the one that waits."""
        if self._spare is not None:
            self._spare.end()


class Process:
    """``python -m bench.gpu.trial`` in a session of its own, so that its workers can be killed with it."""

    def __init__(self, ranks: Ranks) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
        environment |= {
            "RANK": str(ranks.rank),
            "LOCAL_RANK": str(ranks.local_rank),
            "WORLD_SIZE": str(ranks.world),
            "MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1"),
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end(), which every process comes to
        self.last_words = ""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.trial"],
            cwd=BENCH.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def tell(self, trial: Trial, events: Path, port: int) -> None:
        """What to do; it begins once its imports are done."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; its last words say why
            self.popen.stdin.write(f"{trial.to_json()}\n{events}\n{port}\n".encode())
            self.popen.stdin.close()

    def end(self) -> None:
        """Kill it and its workers, and see them gone: memory of theirs is measured as the next trial's otherwise."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        deadline = time.monotonic() + GRACE_SECS
        while _has_living(self.popen.pid) and time.monotonic() < deadline:
            time.sleep(LOOK_SECS / 10)
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        code: int | str = "unknown: it does not die"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.popen.wait(GRACE_SECS)
        with self._log as log:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        self.last_words = f"exit code {code}: {lines[-1][:300] if lines else 'no output'}"


def _has_living(group: int) -> bool:
    """Whether a process of a process group has not been killed yet."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _watch(process: subprocess.Popen[bytes], path: Path, ranks: Ranks, limit_secs: float) -> Outcome:
    begin = time.monotonic()
    deadline = begin + limit_secs
    meter, reader, error = Meter(process.pid), EventReader(path), ""
    while process.poll() is None:
        time.sleep(LOOK_SECS)
        for event in reader.read():
            if event["event"] == "ready":
                meter.begin(event["device"])
            if event["event"] in ("end", "failed", "absent"):
                deadline = min(deadline, time.monotonic() + GRACE_SECS)
        meter.look()
        if not error and ranks.has_failure():
            error, deadline = "another rank failed", min(deadline, time.monotonic() + GRACE_SECS)
        if time.monotonic() > deadline:
            error = error or f"killed after {time.monotonic() - begin:.0f} s"
            break
    reader.read()
    return _judge(reader.events, error, meter.peaks)


def _judge(events: Sequence[Event], error: str, peaks: dict[str, int]) -> Outcome:
    """From the last word of the process."""
    last = events[-1] if events else {"event": "nothing"}
    status = {"end": "ok", "absent": "not run"}.get(last["event"], "failed")
    told = str(last.get("error", ""))
    return Outcome(status=status, error=told or ("" if status == "ok" else error), events=list(events), peaks=peaks)


class EventReader:
    """Lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """New events; a line that is not whole yet is left."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new: list[Event] = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new


class Meter:
    """Memory of a process tree, of the host and of its device, and how far each rose since :meth:`begin`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._base: dict[str, int] = {}
        self._device: DeviceMemory | None = None
        self.peaks: dict[str, int] = {}

    def begin(self, device: str | None) -> None:
        """What is used now is the trainer's own."""
        self._device = DeviceMemory(device) if device else None
        self._base = self._read()
        self.peaks = dict.fromkeys(self._base, 0)

    def look(self) -> None:
        """Take a sample."""
        if self._base:
            for name, value in self._read().items():
                self.peaks[name] = max(self.peaks.get(name, 0), value - self._base.get(name, value))

    def _read(self) -> dict[str, int]:
        memory = psutil.virtual_memory()
        # Of the page cache only shared memory counts. What the driver has allocated is in no process's resident size.
        used = memory.total - memory.free - memory.buffers - memory.cached + memory.shared
        read = {"tree": self._tree(), "system": used}
        if self._device is not None and (on_device := self._device.used()) is not None:
            read["device"] = on_device
        return read

    def _tree(self) -> int:
        """Private memory of each process and the largest share of common memory, which several of them map."""
        private, common = 0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._process, *self._process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    info = process.memory_info()
                    private += info.rss - info.shared
                    common = max(common, info.shared)
        return private + common


class DeviceMemory:
    """Used bytes of one device by NVML, which needs no CUDA context; None where it is missing."""

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # noqa: BLE001 - an optional figure; NVML has an error tree of its own
            self._nvml = None

    def used(self) -> int | None:
        """Bytes, of all processes."""
        return None if self._nvml is None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
