"""Records of the logger ``aio_ckpt`` that a test waits for, from any thread; and waits that are told of early."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aio_ckpt.runtime import waiting

TIMEOUT = 20.0


class LogLines(logging.Handler):
    """Handler that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._came:
            self.records.append(record)
            self._came.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> logging.LogRecord:
        """Until ``count`` messages match ``pattern`` as a whole; the last of them."""

        def found() -> list[logging.LogRecord]:
            return [record for record in self.records if re.fullmatch(pattern, record.getMessage())]

        with self._came:
            assert self._came.wait_for(lambda: len(found()) >= count, TIMEOUT), (pattern, self.messages)
            return found()[count - 1]

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextmanager
def kept_lines(level: int | None = None) -> Iterator[LogLines]:
    """The records of a block; from ``level`` on, if it is given."""
    lines, logger = LogLines(), logging.getLogger("aio_ckpt")
    usual = logger.level
    logger.setLevel(usual if level is None else level)
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(usual)


@contextmanager
def early_lines(first_secs: float = 0.05) -> Iterator[LogLines]:
    """The records of a block in which a wait is told of after ``first_secs``."""
    usual, waiting.FIRST_LINE_SECS = waiting.FIRST_LINE_SECS, first_secs
    try:
        with kept_lines() as lines:
            yield lines
    finally:
        waiting.FIRST_LINE_SECS = usual
