"""Preemption, agreed: after a signal to one rank, the same poll of ``preempted`` returns True on every rank."""

from __future__ import annotations

import logging

from aio_ckpt.errors import AioCkptError
from aio_ckpt.ranks.agreed_poll import AgreedPoll
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.signals import Preemption

__all__ = ["AgreedPreemption"]

_log = logging.getLogger("aio_ckpt")


class AgreedPreemption:
    """Whether the process is to end. The n-th :meth:`poll` returns the same on every rank; see :class:`AgreedPoll`."""

    def __init__(self, members: Membership, portal: Portal) -> None:
        self.local = Preemption()
        """The signals of this process."""
        self._members = members
        self._agreed = AgreedPoll(
            members,
            portal,
            flag="preempted",
            topic="the preemption",
            has_come=lambda: self.local.is_requested,
            on_error=_tell,
        )
        self._is_watching = False

    @property
    def is_on(self) -> bool:
        """Whether a poll has returned True. Reading this is no poll."""
        return self._agreed.is_found if self._is_watching else self.local.is_requested

    def poll(self) -> bool:
        """Count a poll; return whether the process is to end. Once True, it stays True.

        Raises:
            StallError: another rank does not answer.
        """
        is_found = self._agreed.poll()
        return is_found if self._is_watching else self.local.is_requested  # one rank, or signals are not handled

    def watch(self) -> None:
        """Begin to watch for signals to other ranks. If there is one rank, its signal counts at once."""
        if self._members.are_several and not self._is_watching:
            self._is_watching = True
            self._agreed.watch()


def _tell(error: AioCkptError) -> None:
    _log.error("preemption is not agreed, this rank goes by its own signal: %s", error)
