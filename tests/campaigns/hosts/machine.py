"""Boot the Linux of the campaign on the file system of this machine, with a disk of its own for the NFS server."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.hosts.packages import XSTATE

_INIT = Path(__file__).with_name("init.sh")
_DISK_BYTES = 2 << 30


def boot(folder: Path, command: Sequence[str], *, log: Path, timeout: float) -> None:
    """Run ``command`` in a fresh Linux with an empty disk; its output goes to ``log``.

    Args:
        folder: Where `packages.unpacked` put the packages.
        command: Program and arguments. The working directory is that of this process.
        log: Receives the console.
        timeout: Seconds until the machine is switched off.

    Raises:
        subprocess.TimeoutExpired: The command did not end in time.
    """
    disk = folder / "disk.img"
    disk.unlink(missing_ok=True)
    with open(disk, "wb") as file:
        file.truncate(_DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
    script = folder / "command.sh"
    script.write_text("\n".join([f"export HOSTS={folder}", f"cd {Path.cwd()}", "exec " + shlex.join(command), ""]))
    init = folder / "init"
    init.write_text(f"#!/bin/bash\nHOSTS={folder}\nPYTHON={sys.executable}\n" + _INIT.read_text())
    init.chmod(0o755)
    linux = [
        str(folder / "root/usr/bin/linux.uml"),
        "mem=3500M",
        "rootfstype=hostfs",
        "rootflags=/",
        "rw",
        f"init={init}",
        f"ubd0={disk}",
        "con0=null,fd:1",
        "con=null",
        "quiet",
    ]
    with open(log, "wb") as console:
        environment = os.environ | {"LD_PRELOAD": str(folder / XSTATE)}
        subprocess.run(linux, stdout=console, stderr=console, timeout=timeout, check=False, env=environment)
