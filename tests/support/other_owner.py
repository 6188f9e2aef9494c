"""The owner record of an engine on another host, which no look at this host's processes can judge."""

from __future__ import annotations

import msgspec

from aio_ckpt.commit.owner import Owner, encoded_owner


def owner_elsewhere() -> Owner:
    """An engine in a process of the same pid on the host node-7."""
    return msgspec.structs.replace(Owner.of_this_process(), host="node-7", machine_id="m", boot_id="b")


def claim_of_another_host() -> bytes:
    """The claim of that engine, as one on a mount without locks of a server writes it."""
    return encoded_owner(owner_elsewhere())
