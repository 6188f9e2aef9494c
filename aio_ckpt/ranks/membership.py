"""Membership: the ranks of one engine, how they meet, and the checks that they have the same root and settings."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from aio_ckpt.commit.owner import Owner, pending_path
from aio_ckpt.errors import AioCkptError, ConfigError, RootError
from aio_ckpt.memory.lifetime import ranks_on_host
from aio_ckpt.ranks.coordinator import Coordinator, Exchange
from aio_ckpt.ranks.save_ledger import Ledger, SentExtents
from aio_ckpt.runtime.futures import follow
from aio_ckpt.storage.local import Storage

__all__ = ["Membership"]

T = TypeVar("T")

_log = logging.getLogger("aio_ckpt")
_OPEN = "the opening"
_ROOT = "the root"
_MAX_TRIES, _RETRY_SECS = 3, 0.2
"""Tries to read the root, and the pause between them, before the ranks fail to meet."""


class _OpeningReply(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader once all ranks have come."""

    owner: Owner
    """The leader's owner record, by which pending directories are named."""
    newest: int | None
    """Newest committed step; None if there is none."""
    is_marked: bool
    """Whether the leader has made a marker directory under the root, which every rank must see."""


class _RootCheck(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank: whether it has the same root, and its settings."""

    host: str
    """Host name, for errors."""
    sees: bool
    """Whether the rank sees the marker directory; True if there is none."""
    rules: Mapping[str, str]
    """Settings that must be the same on all ranks, as text by name."""


class _OpeningFaults(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader: why no rank opens its engine. Both texts are empty if all open."""

    blind: str
    """Ranks and hosts that do not see the marker directory."""
    differing: str
    """A setting that differs between ranks, with its values."""


_OPENING: Exchange[None, _OpeningReply] = Exchange(None, _OpeningReply, stage="open")
_SAME_ROOT: Exchange[_RootCheck, _OpeningFaults] = Exchange(_RootCheck, _OpeningFaults, stage="open")


class Membership:
    """All ranks of one engine, with this one.

    Invariant: only the leader renames, clears or deletes anything under the root. Every rank writes its own two files
    into the pending directory, whose name and owner record are the leader's.
    """

    def __init__(
        self, coordinator: Coordinator, owner: Owner, *, stall_secs: float, rules: Mapping[str, str] | None = None
    ) -> None:
        """``rules``: settings that must be the same on all ranks."""
        self._rules = rules or {}
        self.stall_secs = stall_secs
        """Time without a heartbeat after which a rank is lost."""
        self.coordinator = coordinator
        self.owner = owner
        """Owner record by which pending directories are named: the leader's, once all ranks have met."""
        self.newest: int | None = None
        """Newest committed step when all ranks had met, for the ranks that do not lead; None if there was none."""
        self.ledger = Ledger(coordinator.world_size)
        """The leader's ledger; unused on other ranks."""
        self.sent = SentExtents()
        """Places of objects that this rank has told the leader."""
        self._loads = 0
        self.opened: Future[None] = Future()
        """Done when all ranks have met; its exception says why they have not."""
        if coordinator.world_size == 1:
            self.opened.set_result(None)

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits."""
        return self.coordinator.rank == self.coordinator.leader

    @property
    def are_several(self) -> bool:
        """Whether there are other ranks."""
        return self.coordinator.world_size > 1

    @property
    def on_host(self) -> int:
        """Number of ranks on this host, which share its memory and disk."""
        return ranks_on_host(self.coordinator.world_size)

    def next_load(self) -> str:
        """Count a call of ``load()`` and return its name, the same on every rank for the same call."""
        self._loads += 1
        name = f"load {self._loads}"
        self.coordinator.begin_call(name)
        return name

    async def met(self) -> None:
        """Wait until all ranks have met; raise the error if they have not."""
        if not self.opened.done():
            await asyncio.wrap_future(follow(self.opened))
        self.opened.result()

    async def meet(self, storage: Storage, root: Path, read_steps: Callable[[], Awaitable[Iterable[int]]]) -> None:
        """Wait for all ranks, take over the leader's owner record, and check that all have the same root and settings.

        Raises:
            PeerFailedError: a rank did not come in time.
            ConfigError: a setting differs that must be the same on all ranks; names the setting and the rank.
            RootError: a rank does not see the directory that the leader made under the root; names the hosts.
        """
        coordinator = self.coordinator
        mark = pending_path(root, self.owner, 0)

        async def lead(_: Sequence[None]) -> _OpeningReply:
            newest = max(await _with_retries(read_steps), default=None)
            return _OpeningReply(self.owner, newest, await _mark(storage, mark))

        async def compare(ranks: Sequence[_RootCheck]) -> _OpeningFaults:
            blind = [f"rank {rank} on {seen.host}" for rank, seen in enumerate(ranks) if not seen.sees]
            return _OpeningFaults(
                ", ".join(blind), _differing_setting([seen.rules for seen in ranks], coordinator.leader)
            )

        try:
            await coordinator.open(str(root), stall_secs=self.stall_secs)
            met = await _OPENING.run(coordinator, _OPEN, None, lead)
            self.owner, self.newest = met.owner, met.newest
            sees = not met.is_marked or await self._sees(storage, pending_path(root, met.owner, 0))
            seen = _RootCheck(socket.gethostname(), sees, self._rules)
            faults = await _SAME_ROOT.run(coordinator, _ROOT, seen, compare)
        except BaseException as error:
            error.add_note("the ranks have not met: close their engines and open them anew, on all ranks")
            with anyio.CancelScope(shield=True):
                await coordinator.leave()  # every later call of this engine fails
            raise
        finally:
            if self.is_leader:
                with anyio.CancelScope(shield=True):
                    await _unmark(storage, mark)
        if faults.differing:
            raise ConfigError(
                f"the settings of the ranks differ: {faults.differing}: give all of them the same, and open anew"
            )
        if faults.blind:
            raise RootError(
                errno.ENOTUNIQ,
                f"the ranks have different roots, {faults.blind} does not see that of rank {coordinator.leader} on "
                f"{met.owner.host}: give a directory on a file system that all of them share",
                str(root),
            )

    async def _sees(self, storage: Storage, mark: Path) -> bool:
        try:
            return await _with_retries(lambda: storage.exists(mark))
        except Exception as error:
            with anyio.CancelScope(shield=True):
                await self.coordinator.abort(_ROOT, error, stage="open")
            raise


def _differing_setting(rules: Sequence[Mapping[str, str]], leader: int) -> str:
    """Describe the first setting in which a rank differs from the leader; '' if there is none."""
    for rank, own in enumerate(rules):
        for name, value in rules[leader].items():
            if own.get(name) != value:
                return f"{name} is {value} on rank {leader} and {own.get(name)} on rank {rank}"
    return ""


async def _with_retries(look: Callable[[], Awaitable[T]]) -> T:
    """Call ``look`` until it succeeds, ``_MAX_TRIES`` times at most: ranks that fail to meet never meet later."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return await look()
        except (AioCkptError, OSError) as error:
            _log.warning("tried again: %s", error)
            await anyio.sleep(_RETRY_SECS)
    return await look()


async def _mark(storage: Storage, path: Path) -> bool:
    """Make the marker directory that every rank must see; False if the root cannot be written and is only read."""
    try:
        await storage.make_dir(path, parents=True)
    except (AioCkptError, OSError):
        return False
    return True


async def _unmark(storage: Storage, path: Path) -> None:
    try:
        if await storage.exists(path):
            await storage.remove_tree(path)
    except (AioCkptError, OSError):
        return  # a later writer clears the directory once this process is dead
