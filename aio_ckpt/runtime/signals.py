"""Preemption: signals that announce the end of the process. A handler sets a flag, which loops and stages read."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from aio_ckpt.errors import ConfigError, WrongThreadError
from aio_ckpt.message_texts import shown

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that announce the end of the process, if the caller names no others."""
Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Flag that a signal sets which announces the end of the process.

    Invariant: from :meth:`install` to :meth:`restore`, each signal sets ``is_requested`` and then calls the previous
    handler if that was a function. After that, a signal does what it would have done without this class. In a forked
    child, which inherits the handlers, SIGTERM does so at once. Another signal does not end the child: a scheduler may
    send it to all processes of a job, and a worker that loads data has to live until its trainer has saved. The flag is
    never reset.

    The handler runs on the main thread between any two instructions, which may hold any lock. So the handler takes no
    lock and logs nothing. It refers to this object only, never to the engine.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """Whether a handled signal came."""
        self._previous: dict[int, Handler] = {}
        self._pid = os.getpid()
        self._is_over = False

    def install(self, signals: Iterable[int]) -> None:
        """Install the handler for ``signals``, too. A signal that already has it stays as it is.

        Raises:
            WrongThreadError: the caller is not on the main thread, the only one on which Python installs handlers.
            ConfigError: ``signals`` is empty, or a signal cannot be handled, or its handler was not installed by
            Python.
        """
        numbers = _signal_numbers(signals)
        before = dict(self._previous)
        try:
            for number in numbers:
                if number not in self._previous:
                    self._install(number)
        except BaseException:
            for number in self._previous.keys() - before.keys():
                signal.signal(number, self._previous[number])
            self._previous = before
            raise

    def restore(self) -> None:
        """Restore the previous handlers. Idempotent, from any thread.

        If another handler was installed over this one, or this is not the main thread, this handler stays and only
        passes every signal on.
        """
        self._is_over = True
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, previous)

    def _install(self, number: int) -> None:
        previous = signal.getsignal(number)
        if previous is None:
            raise ConfigError(
                f"{signal.Signals(number).name}: its handler was not installed by Python and could not be called or "
                "restored: choose another signal"
            )
        # The previous handler is stored first, because the new one reads it.
        self._previous[number] = previous
        try:
            signal.signal(number, self._handle)
        except ValueError as error:
            del self._previous[number]
            raise WrongThreadError(
                "on_preemption(): Python lets only the main thread install signal handlers: call it there"
            ) from error
        except OSError as error:
            del self._previous[number]
            raise ConfigError(f"{signal.Signals(number).name} cannot be handled: choose another signal") from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        is_child = os.getpid() != self._pid
        if not (is_child or self._is_over):
            self.is_requested = True
        if callable(previous):
            previous(number, frame)
        elif (self._is_over or (is_child and number == signal.SIGTERM)) and signal.getsignal(number) == self._handle:
            signal.signal(number, previous)
            signal.raise_signal(number)


def _signal_numbers(signals: Iterable[int]) -> list[int]:
    try:
        numbers = [_signal(number) for number in signals]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"signals={shown(signals)}: give signals like (signal.SIGTERM, signal.SIGUSR1)") from error
    if not numbers:
        raise ConfigError("signals: give at least one")
    return [int(number) for number in numbers]


def _signal(number: object) -> signal.Signals:
    if isinstance(number, bool):  # True would count as 1, which is SIGHUP
        raise TypeError("a bool is no signal")
    return signal.Signals(operator.index(number))  # type: ignore[arg-type]
