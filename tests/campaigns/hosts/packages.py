"""Unpack a Linux that runs as an ordinary process, and the NFS tools for it, from the packages of the distribution."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "user-mode-linux",
    "nfs-common",
    "nfs-kernel-server",
    "rpcbind",
    "libtirpc3",
    "libwrap0",
    "libnfsidmap1",
    "libevent-core-2.1-7",
    "keyutils",
    "libkeyutils1",
    "kmod",
)
COMMANDS = ("apt-get", "dpkg", "gcc", "mkfs.ext4", "ip", "unshare", "mount")
XSTATE = "xstate.so"


class UnavailableError(Exception):
    """What two hosts need is missing on this machine."""


def unpacked(folder: Path) -> Path:
    """Download and unpack the packages into ``folder``; return the directory that holds their files.

    Raises:
        UnavailableError: A command or a package is missing.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise UnavailableError(f"the commands {', '.join(missing)} are missing")
    root = folder / "root"
    if (folder / "complete").exists():
        return root
    debs = folder / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, capture_output=True, text=True, check=False)
    if fetched.returncode:
        raise UnavailableError(f"the packages cannot be downloaded: {fetched.stderr.strip().splitlines()[-1:]}")
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    shutil.copytree(root / "usr/lib/uml/modules", folder / "modules/lib/modules")
    (folder / "modprobe").symlink_to(root / "bin/kmod")
    source = Path(__file__).with_name("xstate.c")
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-o", str(folder / XSTATE), str(source), "-ldl"], check=True)
    (folder / "complete").touch()
    return root
