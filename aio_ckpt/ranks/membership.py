"""Membership: the ranks of one engine, how they meet, and the checks that they have the same root and settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import torch.distributed as dist

from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import DifferingReplicas
from aio_ckpt.errors import AioCkptError, ConfigError, PeerFailedError, StallError
from aio_ckpt.ranks.coordinator import CallEnd, Coordinator
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.on_host import ranks_on_host
from aio_ckpt.ranks.save_ledger import Ledger, SentExtents
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.futures import follow

T = TypeVar("T")

_log = logging.getLogger("aio_ckpt")
CALL_STAGE = "capture"
"""Stage of the errors that a call itself raises, before it is pending."""
_OPEN = Topic("the opening of the engines")
_MAX_TRIES, _RETRY_SECS = 3, 0.2
"""Tries to read the root, and the pause between them, before the ranks fail to meet."""


class _OpeningReply(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader once all ranks have come."""

    owner: Owner
    """The leader's owner record, by which pending directories are named."""
    root: str
    newest: int | None
    """Newest committed step; None if there is none."""
    differing: str
    """A setting that differs between ranks, with its values; empty if there is none."""


_OPENING: Exchange[Mapping[str, str], _OpeningReply] = Exchange(Mapping[str, str], _OpeningReply, stage="open")
"""A rank sends the settings that must be the same on all ranks, as text by name."""


class Membership:
    """All ranks of one engine, with this one.

    Invariant: only the leader renames, clears or deletes anything under the root. Every rank writes its own files
    into the pending directory, whose name and owner record are the leader's.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        owner: Owner,
        *,
        stall_secs: float,
        rules: Mapping[str, str] | None = None,
        differing: DifferingReplicas = "refuse",
        is_solo_by_default: bool = False,
    ) -> None:
        """``rules``: settings that must be the same on all ranks. ``differing``: see :class:`Ledger`.

        ``is_solo_by_default``: there is one rank because neither a coordinator nor a process group was given.
        """
        self._rules = rules or {}
        self._is_solo_by_default = is_solo_by_default
        self.stall_secs = stall_secs
        """Time without a heartbeat after which a rank is lost."""
        self.coordinator = coordinator
        self.is_leader = coordinator.rank == coordinator.leader
        """Whether this rank commits."""
        self.are_several = coordinator.world_size > 1
        """Whether there are other ranks."""
        self.owner = owner
        """Owner record by which pending directories are named: the leader's, once all ranks have met."""
        self.leader_root: str = ""
        """Path of the root on the leader, once all ranks have met."""
        self.newest_step: int | None = None
        """Newest committed step that all ranks know: when they had met, and after each agreed change since; or None."""
        self.ledger = Ledger(coordinator.world_size, differing=differing)
        """The leader's ledger; unused on other ranks."""
        self.is_comparison_due = False
        """Whether this rank sends checksums of tensors in its next save, as the leader said."""
        self.sent = SentExtents()
        self._loads = 0
        self.opened: Future[None] = new_future()
        """Done when all ranks have met; its exception says why they have not."""
        if not self.are_several:
            self.opened.set_result(None)

    @property
    def on_host(self) -> int:
        """Number of ranks on this host, which share its memory and disk."""
        return ranks_on_host(self.coordinator.world_size, self.coordinator.rank, os.environ)

    @property
    def reply_limit_secs(self) -> float:
        """Longest wait of one call for the other ranks. A rank that is lost ends it earlier, by its silence."""
        return min(2 * self.stall_secs, MAX_SECS)

    def check_group(self) -> None:
        """Raise ConfigError if this engine was opened before the process group of its ranks.

        Each rank would be alone, and the first one would commit its part as a whole checkpoint.
        """
        group_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
        started = _processes_started(group_size, os.environ) if self._is_solo_by_default else ""
        if started:
            raise ConfigError(
                "this engine was opened before init_process_group, so that it serves this process alone, and "
                f"{started}: open it after init_process_group; for an engine of this process alone, with a root of "
                "its own, give coordinator=SoloCoordinator()"
            )

    def next_load(self) -> Topic:
        """Count a call of ``load()`` and return its topic, the same on every rank for the same call."""
        self._loads += 1
        topic = Topic("load", self._loads)
        self.coordinator.begin_call(topic)
        return topic

    async def met(self) -> None:
        """Wait until all ranks have met; raise the error if they have not."""
        if not self.opened.done():
            await asyncio.wrap_future(follow(self.opened))
        self.check_met()

    def await_met(self, deadline: Deadline) -> None:
        """Block until all ranks have opened their engines.

        Raises:
            StallError: a rank did not come in time.
            PeerFailedError, RootError: see :meth:`meet`.
        """
        try:
            self.opened.exception(deadline.left_secs(self.reply_limit_secs))
        except TimeoutError:
            deadline.check(None, "waiting for the other ranks to open their engines")
            raise StallError("the other ranks did not open their engines in time") from None
        self.check_met()

    def check_met(self) -> None:
        """Raise the error with which :attr:`opened` ended, if any."""
        error = self.opened.exception()
        if error is not None:
            raise error.with_traceback(None)  # by every later call: a traceback that grows would keep their frames

    async def abort(
        self, topic: Topic, error: BaseException, *, stage: str, limit_secs: float | None = None
    ) -> CallEnd:
        """Do :meth:`Coordinator.abort` once the ranks have met. If they never meet, no rank waits."""
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(AioCkptError):
                await self.met()
                return await self.coordinator.abort(topic, error, stage=stage, limit_secs=limit_secs)
        return CallEnd()

    async def refuse(self, topic: Topic, error: BaseException) -> None:
        """Tell the other ranks that the call of ``topic`` raises ``error`` here, so that they do not wait for it."""
        await self.abort(topic, self.call_error(error), stage=CALL_STAGE)

    def call_error(self, error: BaseException) -> PeerFailedError:
        """Return the error by which a call fails on the other ranks if it raises ``error`` here."""
        if isinstance(error, PeerFailedError):  # the first rank that failed is named
            return PeerFailedError(str(error), rank=error.rank, stage=CALL_STAGE, cause=error.cause)
        return PeerFailedError(named(error), rank=self.coordinator.rank, stage=CALL_STAGE)

    async def meet(self, root: Path, read_steps: Callable[[], Awaitable[Iterable[int]]]) -> None:
        """Wait for all ranks, take over the leader's owner record, and check that all have the same settings.

        Nothing is made on the disk. The first save and each load show whether all ranks have the same root.

        Raises:
            PeerFailedError: a rank did not come in time.
            ConfigError: a setting differs that must be the same on all ranks; names the setting and the rank.
        """
        coordinator = self.coordinator

        async def lead(rules: Sequence[Mapping[str, str]]) -> _OpeningReply:
            newest = max(await with_retries(read_steps), default=None)
            return _OpeningReply(self.owner, str(root), newest, _differing_setting(rules, coordinator.leader))

        try:
            await coordinator.open(str(root), stall_secs=self.stall_secs)
            met = await _OPENING.run(coordinator, _OPEN, self._rules, lead)
        except BaseException as error:
            error.add_note("the ranks have not met: close their engines and open them anew, on all ranks")
            with anyio.CancelScope(shield=True):
                await coordinator.leave()  # every later call of this engine fails
            raise
        self.owner, self.leader_root, self.newest_step = met.owner, met.root, met.newest
        if met.root != str(root):
            _log.warning(
                "the root of this rank is %s, and that of rank %d is %s: if these are no two paths of one directory, "
                "give all ranks one root, and open several engines in one order on all ranks",
                root,
                coordinator.leader,
                met.root,
            )
        if met.differing:
            raise ConfigError(
                f"the settings of the ranks differ: {met.differing}: give all of them the same, and open anew"
            )


def _processes_started(group_size: int | None, environment: Mapping[str, str]) -> str:
    """Return how it is known that this process is one of several; '' if it is alone.

    ``group_size``: number of ranks of the default process group; None if there is no group. Then the variables count
    that launchers such as torchrun set for each process. ``WORLD_SIZE`` alone may stand in an interactive shell.
    """
    if group_size is not None:
        return f"the process group has {group_size} ranks" if group_size > 1 else ""
    size = environment.get("WORLD_SIZE", "")
    is_one_of_several = "RANK" in environment and size.isdecimal() and int(size) > 1
    return f"WORLD_SIZE={size} processes were started" if is_one_of_several else ""


def _differing_setting(rules: Sequence[Mapping[str, str]], leader: int) -> str:
    """Describe the first setting in which a rank differs from the leader; '' if there is none."""
    for rank, settings in enumerate(rules):
        for name, value in rules[leader].items():
            if settings.get(name) != value:
                return f"{name} is {value} on rank {leader} and {settings.get(name)} on rank {rank}"
    return ""


async def with_retries(look: Callable[[], Awaitable[T]]) -> T:
    """Call ``look`` until it succeeds, ``_MAX_TRIES`` times at most: ranks that fail to meet never meet later."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return await look()
        except (AioCkptError, OSError) as error:
            _log.warning("tried again: %s", error)
            await anyio.sleep(_RETRY_SECS)
    return await look()
