"""The ranks of one engine: how they meet, and what every call of the engine may ask of them."""

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
_LOOKS, _AGAIN_SECS = 3, 0.2
"""How often a root is looked at before the ranks give up to meet, and how long between."""


class _Met(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells when all have come."""

    owner: Owner
    """In whose name pending directories are made."""
    newest: int | None
    """Newest committed step."""
    is_marked: bool
    """Whether there is a mark under the root that all must see."""


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells then."""

    host: str
    """Where it runs."""
    sees: bool
    """Whether it sees the mark."""
    rules: Mapping[str, str]
    """Settings that all must have alike."""


class _Faults(msgspec.Struct, frozen=True, array_like=True):
    """Why the engine of no rank opens; empty texts if all open."""

    blind: str
    """Ranks that do not see the mark."""
    odd: str
    """A setting that differs."""


_OPENING: Exchange[None, _Met] = Exchange(None, _Met, stage="open")
_SAME_ROOT: Exchange[_Seen, _Faults] = Exchange(_Seen, _Faults, stage="open")


class Membership:
    """All ranks of one engine, this one included.

    Invariant: only the leader renames, clears or deletes anything under the root; every rank writes its own two files
    into the pending directory, which is made in the leader's name.
    """

    def __init__(
        self, coordinator: Coordinator, owner: Owner, *, stall_secs: float, rules: Mapping[str, str] | None = None
    ) -> None:
        """``rules``: settings that must be the same on all ranks."""
        self._rules = rules or {}
        self.stall_secs = stall_secs
        """How long a rank may give no sign of life."""
        self.coordinator = coordinator
        """The way to them."""
        self.owner = owner
        """In whose name pending directories are made: the leader's, once all have met."""
        self.newest: int | None = None
        """Newest committed step when all had met; for those who do not lead."""
        self.ledger = Ledger(coordinator.world_size)
        """What the leader knows."""
        self.sent = SentExtents()
        """What the leader was told last."""
        self._loads = 0
        self.opened: Future[None] = Future()
        """All have met, or why not."""
        if coordinator.world_size == 1:
            self.opened.set_result(None)

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits."""
        return self.coordinator.rank == self.coordinator.leader

    @property
    def are_several(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.coordinator.world_size > 1

    @property
    def on_host(self) -> int:
        """Ranks of this host, which share its memory and disk."""
        return ranks_on_host(self.coordinator.world_size)

    def next_load(self) -> str:
        """Name of this call of ``load()``, the same on every rank for the same call."""
        self._loads += 1
        name = f"load {self._loads}"
        self.coordinator.begin_call(name)
        return name

    async def met(self) -> None:
        """Return when all have met; raise why they did not."""
        if not self.opened.done():
            await asyncio.wrap_future(follow(self.opened))
        self.opened.result()

    async def meet(self, storage: Storage, root: Path, read_steps: Callable[[], Awaitable[Iterable[int]]]) -> None:
        """Wait for all ranks, learn who leads, and see that all have one root.

        Raises:
            PeerFailedError: a rank did not come in time.
            ConfigError: a setting of a rank differs that all must have alike; names it and the rank.
            RootError: a rank does not see what the leader wrote under the root; names the hosts.
        """
        coordinator = self.coordinator
        mark = pending_path(root, self.owner, 0)

        async def lead(_: Sequence[None]) -> _Met:
            newest = max(await _persistently(read_steps), default=None)
            return _Met(self.owner, newest, await _mark(storage, mark))

        async def compare(ranks: Sequence[_Seen]) -> _Faults:
            blind = [f"rank {rank} on {seen.host}" for rank, seen in enumerate(ranks) if not seen.sees]
            return _Faults(", ".join(blind), _odd_rules([seen.rules for seen in ranks], coordinator.leader))

        try:
            await coordinator.open(str(root), stall_secs=self.stall_secs)
            met = await _OPENING.run(coordinator, _OPEN, None, lead)
            self.owner, self.newest = met.owner, met.newest
            sees = not met.is_marked or await self._sees(storage, pending_path(root, met.owner, 0))
            seen = _Seen(socket.gethostname(), sees, self._rules)
            faults = await _SAME_ROOT.run(coordinator, _ROOT, seen, compare)
        except BaseException as error:
            error.add_note("the ranks have not met: close their engines and open them anew, on all ranks")
            with anyio.CancelScope(shield=True):
                await coordinator.leave()  # no call will come to anything
            raise
        finally:
            if self.is_leader:
                with anyio.CancelScope(shield=True):
                    await _unmark(storage, mark)
        if faults.odd:
            raise ConfigError(
                f"the settings of the ranks differ: {faults.odd}: give all of them the same, and open anew"
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
            return await _persistently(lambda: storage.exists(mark))
        except Exception as error:
            with anyio.CancelScope(shield=True):
                await self.coordinator.abort(_ROOT, error, stage="open")
            raise


def _odd_rules(rules: Sequence[Mapping[str, str]], leader: int) -> str:
    """The first setting that a rank has otherwise than the leader, or ''."""
    for rank, own in enumerate(rules):
        for name, value in rules[leader].items():
            if own.get(name) != value:
                return f"{name} is {value} on rank {leader} and {own.get(name)} on rank {rank}"
    return ""


async def _persistently(look: Callable[[], Awaitable[T]]) -> T:
    """What ``look`` gives, tried again where it fails: ranks that have not met will not meet later."""
    for _ in range(_LOOKS - 1):
        try:
            return await look()
        except (AioCkptError, OSError) as error:
            _log.warning("tried again: %s", error)
            await anyio.sleep(_AGAIN_SECS)
    return await look()


async def _mark(storage: Storage, path: Path) -> bool:
    """Make a directory that all must see; False where nothing can be written: such a root is only read."""
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
        return  # cleared when the process is dead
