"""The check that each rank sees the leader's root at its own path."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from aio_ckpt.errors import RootError
from aio_ckpt.ranks.membership import Membership, with_retries
from aio_ckpt.storage.local import Storage


async def check_same_root(members: Membership, storage: Storage, root: Path, pending: Path) -> None:
    """Check that this rank sees the directory ``pending``, which the leader has made under ``root``.

    Raises:
        RootError: this rank has another root; names the hosts.
        ReadError, WriteError: the root cannot be used.
    """
    await storage.make_dirs(pending.parent)  # NFS may remember that the root was missing
    if not await with_retries(lambda: storage.exists(pending)):
        raise different_roots(members, root, members.coordinator.rank, socket.gethostname())


def different_roots(members: Membership, root: Path, blind: int, host: str) -> RootError:
    """Return the error to raise if rank ``blind`` on ``host`` does not see at its root what the leader sees."""
    return RootError(
        errno.ENOTUNIQ,
        f"the ranks have different roots: rank {blind} on {host} does not see that of rank "
        f"{members.coordinator.leader} on {members.owner.host}, {members.leader_root}: give a directory on a file "
        "system that all of them share, and open several engines in one order on all ranks",
        str(root),
    )
