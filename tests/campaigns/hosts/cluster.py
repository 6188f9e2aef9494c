"""Hosts of the cluster: a network, a name, a boot and a mount of the same NFS directory for each of them."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXPORTED = Path("/mnt/exported")
"""The directory that the server exports, as the server sees it."""
SHARED = Path("/mnt/shared")
"""Where each host mounts the exported directory."""

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MS_PRIVATE_RECURSIVE = (1 << 18) | (1 << 14)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Mount:
    """How the hosts mount the exported directory."""

    name: str
    """Name of the variant: "v3", "v4.2", "v3 nolock"."""
    options: str

    @property
    def source(self) -> str:
        """The exported path in the terms of the protocol."""
        return str(EXPORTED) if "vers=3" in self.options else "/"


MOUNTS = (Mount("v4.2", "vers=4.2"), Mount("v3", "vers=3"), Mount("v3 nolock", "vers=3,nolock"))


@dataclass(frozen=True)
class Outcome:
    """How a call on a host ended."""

    value: object = None
    error: str = ""
    """Type and text of the exception, and those of its causes."""
    killed: bool = False


class Call:
    """A function that runs on a host, in a process of its own."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        """Process of the function, as the machine counts."""
        self._reader = reader

    def outcome(self, timeout: float = 120.0) -> Outcome:
        """Wait for the end of the function.

        Raises:
            TimeoutError: The function runs for more than ``timeout`` seconds. It is killed.
        """
        deadline = time.monotonic() + timeout
        data = b""
        while True:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise TimeoutError(f"a call on a host ran for more than {timeout:.0f} s")
            part = os.read(self._reader, 1 << 20)
            if not part:
                break
            data += part
        os.close(self._reader)
        os.waitpid(self.pid, 0)
        return pickle.loads(data) if data else Outcome(killed=True)

    def is_running(self) -> bool:
        """Whether nothing has come back yet."""
        return not select.select([self._reader], [], [], 0)[0]

    def kill(self) -> None:
        """Kill the function, as a lost machine does."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the function until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped function run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)


class Host:
    """One machine of the cluster."""

    def __init__(self, index: int, mount: Mount, *, name: str | None = None) -> None:
        self.index = index
        self.name = name or f"host{index}"
        self.address = f"10.9.{index}.2"
        self._server = f"10.9.{index}.1"
        self._net = f"net{index}"
        self._link = f"link{index}"
        self._files = Path("/run") / self._net
        self._files.mkdir()
        (self._files / "boot_id").write_text(f"00000000-0000-4000-8000-{index:012d}\n")
        (self._files / "machine-id").write_text(f"{index:032x}\n")
        self.directory = Path(f"/mnt/of_host{index}")
        self.directory.mkdir()
        inner = f"inner{index}"
        for command in (
            f"ip netns add {self._net}",
            f"ip link add {self._link} type veth peer name {inner}",
            f"ip link set {inner} netns {self._net}",
            f"ip addr add {self._server}/24 dev {self._link}",
            f"ip link set {self._link} up",
            f"ip netns exec {self._net} ip addr add {self.address}/24 dev {inner}",
            f"ip netns exec {self._net} ip link set {inner} up",
            f"ip netns exec {self._net} ip link set lo up",
            f"ip netns exec {self._net} ip route add default via {self._server}",
        ):
            subprocess.run(command.split(), check=True)
        # mount.nfs asks for rpc.statd on the host. It ends with the mount: locks of NFS v3 then fail with ENOLCK,
        # as on hosts whose firewall stops it.
        daemons = f"mount --bind {self._files} /run; rpcbind -f & sleep 0.5; exec rpc.statd -F --no-notify"
        mounting = f"hostname {self.name}; mount.nfs {self._server}:{mount.source} {self.directory} -o {mount.options}"
        running = subprocess.Popen([*self._entered("-um"), daemons], start_new_session=True)
        time.sleep(2.0)
        subprocess.run([*self._entered("-u"), mounting], check=True)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()

    def _entered(self, namespaces: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._net}", "unshare", namespaces, "sh", "-c"]

    def named(self, name: str) -> Host:
        """Return this host under another name, with the machine id of the first host: two copies of one image."""
        twin = copy.copy(self)
        twin.name = name
        twin._files = Path("/run") / f"twin{self.index}"
        twin._files.mkdir()
        (twin._files / "boot_id").write_text((self._files / "boot_id").read_text())
        (twin._files / "machine-id").write_text(f"{1:032x}\n")
        return twin

    def start(self, function: Callable[..., object], *args: object, mounted_at: Path = SHARED) -> Call:
        """Run ``function(*args)`` on this host; the exported directory lies at ``mounted_at``."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            os.close(writer)
            return Call(pid, reader)
        try:
            os.close(reader)
            self._enter(mounted_at)
            child = os.fork()
            if child:
                # A process that is the parent of the first process of a PID namespace waits for it.
                os.close(writer)
                os.waitpid(child, 0)
                os._exit(0)
            _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
            self._bind(self._files / "boot_id", Path("/proc/sys/kernel/random/boot_id"))
            try:
                outcome = Outcome(value=function(*args))
            except BaseException as error:  # noqa: BLE001 - it is the outcome of the call
                traceback.print_exc()
                outcome = Outcome(error=_described(error))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(outcome))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def call(self, function: Callable[..., object], *args: object, timeout: float = 120.0) -> Outcome:
        """Run ``function(*args)`` on this host and wait for its end."""
        return self.start(function, *args).outcome(timeout)

    def cut_off(self) -> None:
        """Take the host off the network."""
        subprocess.run(["ip", "link", "set", self._link, "down"], check=True)

    def connect(self) -> None:
        """Put the host on the network again."""
        subprocess.run(["ip", "link", "set", self._link, "up"], check=True)

    def _enter(self, mounted_at: Path) -> None:
        handle = os.open(f"/run/netns/{self._net}", os.O_RDONLY)
        _check(_libc.setns(handle, _CLONE_NEWNET))
        _check(_libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS | _CLONE_NEWPID))
        name = self.name.encode()
        _check(_libc.sethostname(name, len(name)))
        _check(_libc.mount(None, b"/", None, _MS_PRIVATE_RECURSIVE, None))
        mounted_at.mkdir(parents=True, exist_ok=True)
        self._bind(self.directory, mounted_at)
        self._bind(self._files / "machine-id", Path("/etc/machine-id"))

    @staticmethod
    def _bind(source: Path, target: Path) -> None:
        _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None))


def remote_calls(directory: Path = SHARED) -> dict[str, int]:
    """Count the remote procedure calls of the mount at ``directory`` so far, by kind."""
    counts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/mountstats").read_text().splitlines():
        if line.startswith("device "):
            inside = f" mounted on {directory} with" in line
        words = line.split()
        if inside and len(words) > 2 and words[0].endswith(":") and words[0][:-1].isupper() and words[1].isdigit():
            counts[words[0][:-1]] = int(words[1])
    return counts


def calls_between(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was called between two counts."""
    return {kind: after[kind] - before.get(kind, 0) for kind in after if after[kind] != before.get(kind, 0)}


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _described(error: BaseException) -> str:
    parts = []
    cause: BaseException | None = error
    while cause is not None:
        parts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return " <- ".join(parts)
