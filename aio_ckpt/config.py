"""``EngineConfig``: every setting of the engine, its default and its range."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from aio_ckpt.errors import ConfigError

__all__ = [
    "GATHER_BYTES",
    "MAX_SECS",
    "MAX_WORKERS",
    "BusyPolicy",
    "DirectIO",
    "EngineConfig",
    "FailurePolicy",
    "KeepBest",
    "MetricMode",
    "Staging",
    "VerifyPolicy",
    "check_seconds",
]

Staging = Literal["auto", "pinned", "shm", "pageable"]
DirectIO = Literal["auto", "on", "off"]
BusyPolicy = Literal["wait", "skip", "raise"]
VerifyPolicy = Literal["load", "never"]
FailurePolicy = Literal["raise", "log"]
MetricMode = Literal["min", "max"]

MAX_SECS = 1e9
"""Longest time that every wait of the system takes."""
MAX_WORKERS = 256
GATHER_BYTES = 64 << 20
"""Default of ``EngineConfig.gather_bytes``."""
_STEP_DIR = re.compile(r"(?!\.)[^{}/\x00\ud800-\udfff]*\{step(:d|:0[1-9]\d?d)?\}[^{}/\x00\ud800-\udfff]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """Keep the steps with the best values of one metric, as given to ``save(metrics=)``.

    A step without the metric, or whose value was not finite, is never among the best. Of equal values the newer step
    is the better one.

    Raises:
        ConfigError: a value is out of range.
    """

    metric: str
    """Its name in ``metrics``."""

    mode: MetricMode = "min"
    """Whether the smallest or the largest value is the best."""

    count: int = 1
    """Steps to keep."""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"KeepBest(metric={self.metric!r}): give the name of a metric")
        if self.mode not in get_args(MetricMode):
            raise ConfigError(f"KeepBest(mode={self.mode!r}): allowed are 'min', 'max'")
        if type(self.count) is not int or self.count < 1:
            raise ConfigError(f"KeepBest(count={self.count!r}): give a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; checked when made, never changed afterwards.

    Raises:
        ConfigError: a value is out of range; the message names the field and what is allowed.
    """

    workers: int = 4
    """Writes (and, at load, reads) in flight at once."""

    staging: Staging = "auto"
    """Where the image is staged: ``pinned`` (registered with CUDA), ``shm`` (one memfd), ``pageable``.
    ``auto`` is ``pageable`` for a state in host memory; for one with CUDA tensors it is measured once."""

    shm_path: str | Path | None = None
    """Directory of a tmpfs, such as ``/dev/shm``: the shared segments get names there, and a snapshot that was whole
    when the trainer was killed can be committed by ``aio-ckpt rescue``. Needs ``staging`` ``shm`` or ``auto``."""

    direct_io: DirectIO = "auto"
    """O_DIRECT: ``auto`` probes each file with a real aligned write and falls back, ``on`` refuses to
    fall back, ``off`` never tries."""

    budget_bytes: int | None = None
    """Most host memory for images. None: the smaller of half of what is available and the cgroup's headroom."""

    gather_bytes: int = GATHER_BYTES
    """Memory of each GPU in which its small tensors are gathered before they are moved, at most; kept from save to
    save. 0: every tensor is moved by itself."""

    max_in_flight: int = 1
    """Saves captured and not yet settled, at most."""

    when_busy: BusyPolicy = "wait"
    """What ``save()`` does when ``max_in_flight`` saves are pending."""

    stall_timeout_secs: float = 600.0
    """A save without one byte or message of progress for so long fails; never a limit on the total."""

    keep_last: int | None = None
    """Newest committed steps to keep; None deletes nothing."""

    keep_every: int | None = None
    """Steps divisible by this are kept for ever, beside ``keep_last``."""

    keep_best: KeepBest | None = None
    """The best steps by a metric are kept, beside ``keep_last``, which it needs."""

    verify: VerifyPolicy = "load"
    """Check the sums of every byte that a load reads, or never."""

    on_failure: FailurePolicy = "raise"
    """A save that failed unawaited: raised once by the next ``save()`` or ``close()``, or only logged."""

    step_dir: str = "step_{step:09d}"
    """Name of a committed directory; must contain ``{step}`` once."""

    stale_after_secs: float = 600.0
    """A pending directory without a sign of life for so long, by the file system's clock, is taken for dead; six signs
    are given in that time. On a network file system at least a few minutes: it caches times."""

    drain_timeout_secs: float = 60.0
    """How long interpreter exit waits for pending saves (``close()`` waits until each has settled)."""

    trusted_objects: bool = False
    """Allow objects that only unpickling with code can read back. Loading such a checkpoint runs its code."""

    debug: bool = False
    """Poison released arena bytes with 0xCB, so that a use after release shows in the data."""

    def __post_init__(self) -> None:
        for name in ("workers", "max_in_flight", "budget_bytes", "keep_last", "keep_every"):
            self._check_count(name)
        for name in ("stall_timeout_secs", "stale_after_secs", "drain_timeout_secs"):
            check_seconds(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        self._check_shm_path()
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            raise ConfigError(f"keep_best={self.keep_best!r}: give a KeepBest")
        if self.keep_best is not None and self.keep_last is None:
            raise ConfigError("keep_best without keep_last: nothing would ever be deleted; give keep_last=1 or more")
        for name in ("trusted_objects", "debug"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        if type(self.gather_bytes) is not int or self.gather_bytes < 0:
            raise ConfigError(f"gather_bytes={self.gather_bytes!r}: give a whole number of bytes, 0 to gather nothing")
        if self.workers > MAX_WORKERS:
            raise ConfigError(f"workers={self.workers}: each is a thread; give at most {MAX_WORKERS}")
        if not isinstance(self.step_dir, str) or not _STEP_DIR.fullmatch(self.step_dir):
            raise ConfigError(
                f"step_dir={self.step_dir!r}: give one path component with one {{step}} or {{step:09d}} field, "
                "no other braces and no dot in front"
            )

    def _check_shm_path(self) -> None:
        if self.shm_path is None:
            return
        if not isinstance(self.shm_path, (str, Path)) or not str(self.shm_path):
            raise ConfigError(f"shm_path={self.shm_path!r}: give a directory of a tmpfs, such as '/dev/shm'")
        if self.staging not in ("auto", "shm"):
            raise ConfigError(
                f'shm_path= with staging={self.staging!r}: only shared memory has a name; give staging="shm"'
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name not in ("workers", "max_in_flight"):
            return
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is a number of seconds above 0 and at most ``MAX_SECS``."""
    # Comparisons alone: a nan fails them, and an int of a thousand digits has no float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECS:
        shown = "so large a number" if isinstance(value, int) and value > MAX_SECS else repr(value)
        raise ConfigError(f"{name}={shown}: give a finite number of seconds above 0")


_CHOICES: dict[str, tuple[str, ...]] = {
    "staging": get_args(Staging),
    "direct_io": get_args(DirectIO),
    "when_busy": get_args(BusyPolicy),
    "verify": get_args(VerifyPolicy),
    "on_failure": get_args(FailurePolicy),
}
