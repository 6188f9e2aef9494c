"""What the table of mounts tells: who else may use a file system, and whether its locks exclude them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aio_ckpt.storage.mounts import find_mount, is_shared

TABLE = """\
22 28 0:21 / /proc rw shared:5 - proc proc rw
28 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
90 28 0:45 / /mnt/data rw,relatime shared:50 - nfs4 server:/data rw,vers=4.2,local_lock=none
92 28 0:47 / /mnt/v3 rw,relatime shared:51 - nfs server:/data rw,vers=3,nolock,local_lock=all
91 28 0:46 / /mnt/my\\040lustre rw - lustre mgs@tcp:/fs rw,flock
93 28 0:48 / /mnt/local rw - lustre mgs@tcp:/fs rw,localflock
94 28 0:49 / /mnt/weka rw - wekafs default rw
"""


@pytest.mark.parametrize(
    ("device", "shared", "locks"),
    [
        ("0:45", True, True),
        ("0:47", True, False),
        ("0:46", True, True),
        ("0:48", True, False),
        ("0:49", True, False),
        ("254:1", False, False),
    ],
    ids=["NFS v4", "NFS v3 with nolock", "Lustre, at a name with a space", "Lustre with localflock", "unknown", "ext4"],
)
def test_a_mount_tells_who_shares_it_and_whether_locks_reach_them(device: str, shared: bool, locks: bool) -> None:
    mount = find_mount(TABLE, device)
    assert mount is not None
    assert (mount.is_shared, mount.locks_on_server) == (shared, locks)


def test_a_device_without_a_mount_is_unknown() -> None:
    assert find_mount(TABLE, "0:99") is None


def test_the_file_system_of_this_test_is_local(tmp_path: Path) -> None:
    assert not is_shared(tmp_path.stat().st_dev)
