"""Agreed timer: an interval that ends at the same poll on every rank, by the leader's clock."""

from __future__ import annotations

from collections.abc import Callable

from aio_ckpt.errors import AioCkptError
from aio_ckpt.ranks.agreed_poll import AgreedPoll
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Portal

__all__ = ["AgreedTimer"]

_QUIET_SHARE = 0.5
"""Share of an interval in which the ranks do not ask whether it has ended."""


class AgreedTimer:
    """Timer of ``secs`` seconds. The n-th :meth:`poll` returns the same on every rank.

    The first poll starts the timer. Every rank polls and restarts at the same places of its program.
    """

    def __init__(
        self, members: Membership, portal: Portal, secs: float, *, name: str, now: Callable[[], float]
    ) -> None:
        """``name``: the same for this timer on every rank, and of no other timer. ``now``: a clock, in seconds."""
        self._members = members
        self._portal = portal
        self._secs = secs
        self._name = name
        self._now = now
        self._began: float | None = None
        self._periods = 0
        self._agreed: AgreedPoll | None = None
        self._errors: list[AioCkptError] = []

    def poll(self) -> bool:
        """Count a poll; return whether the time is over. The next poll begins a new agreement.

        Raises:
            PeerFailedError, StallError: another rank failed, or does not answer.
        """
        if self._began is None:
            self.restart()
        if not self._members.are_several:
            return self._is_over()
        if self._agreed is None:
            self._agreed = self._watched()
        is_over = self._agreed.poll()
        if self._errors:
            raise self._errors[0]
        if is_over:
            self._agreed = None
        return is_over

    def restart(self) -> None:
        """Start the time anew."""
        self._began = self._now()

    def _is_over(self) -> bool:
        return self._began is not None and self._now() - self._began >= self._secs

    def _watched(self) -> AgreedPoll:
        self._periods += 1
        name = f"{self._name}.{self._periods}"
        leads = self._members.is_leader
        agreed = AgreedPoll(
            self._members,
            self._portal,
            flag=name,
            topic=name,
            has_come=lambda: leads and self._is_over(),
            on_error=self._errors.append,
        )
        agreed.watch(_QUIET_SHARE * self._secs)
        return agreed
