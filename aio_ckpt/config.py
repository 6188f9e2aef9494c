"""``EngineConfig``: every setting of the engine, its default and its range."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from aio_ckpt.argument_checks import check_callback, check_flag, check_seconds, is_among, is_path
from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown
from aio_ckpt.remote_path import Place, check_place, place_of
from aio_ckpt.reports import SaveReport

Staging = Literal["auto", "pinned", "shm", "pageable"]
DirectIO = Literal["auto", "on", "off"]
BusyPolicy = Literal["wait", "skip", "raise"]
VerifyPolicy = Literal["load", "never"]
FrozenPolicy = Literal["compared", "trusted"]
FailurePolicy = Literal["raise", "log"]
MetricMode = Literal["min", "max"]
DifferingReplicas = Literal["refuse", "rank0"]

MAX_WORKERS = 256
MAX_BYTES_PER_SEC = 1e15
MIN_BYTES_PER_SEC = 1 << 20
"""Smallest cap. With it, a chunk of 64 MiB, which is written at once, waits a minute."""
_LEAST_MIRROR_RATE = 8 << 20
"""With it, a part of 16 MiB that each of four readers reads at once is paid for before the next heartbeat is due."""
GATHER_BYTES = 64 << 20
"""Default of ``EngineConfig.gather_bytes``."""
LEAST_BUDGET_BYTES = 64 << 10
"""Least ``EngineConfig.budget_bytes``: one chunk of a file."""
_STEP_DIR = re.compile(r"(?!\.)[^{}/\x00\ud800-\udfff]*\{step(:d|:0[1-9]\d?d)?\}[^{}/\x00\ud800-\udfff]*")
_NAME_BYTES = 255
"""Most bytes of a name on Linux file systems."""
_STEP_DIGITS = 19
"""Digits of the largest step."""
_AROUND_BYTES = len("-") + 19
"""Bytes that a rollback or the quarantine adds to the name of a step: the time in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """Keep the steps with the best values of one metric, as given to ``save(metrics=)``.

    A step without the metric, or whose value was not finite, is never among the best. Of equal values the newer step
    is the better one.

    Raises:
        ConfigError: a value is out of range.
    """

    metric: str
    """Name of the metric in ``metrics``."""

    mode: MetricMode = "min"
    """Whether the smallest or the largest value is the best."""

    count: int = 1
    """Steps to keep."""

    def __post_init__(self) -> None:
        # One that is no UTF-8 ``save(metrics=)`` refuses.
        if not isinstance(self.metric, str) or not self.metric or any("\ud800" <= c <= "\udfff" for c in self.metric):
            raise ConfigError(f"KeepBest(metric={shown(self.metric)}): give the name of a metric")
        if not is_among(self.mode, get_args(MetricMode)):
            raise ConfigError(f"KeepBest(mode={shown(self.mode)}): allowed are 'min', 'max'")
        if type(self.count) is not int or self.count < 1:
            raise ConfigError(f"KeepBest(count={shown(self.count)}): give a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second root, to which committed steps are copied in the background.

    Raises:
        ConfigError: a value is out of range.
    """

    place: Place
    """Directory, as of a shared file system, or URL of an object store (``s3://``, ``gs://``, ``az://``; needs
    ``aio-ckpt[remote]``), or a store object of obstore."""

    every: int = field(default=1, kw_only=True)
    """Steps divisible by this are copied. If a step is committed before the copy of another one has begun, that one is
    passed over."""

    keep_last: int | None = field(default=None, kw_only=True)
    """Newest steps to keep in the mirror; None deletes nothing there. Protected steps stay, too."""

    max_bytes_per_sec: float | None = field(default=None, kw_only=True)
    """Cap on copying, at least 8 MiB; None: none. Each byte counts twice, as it is copied and then read back."""

    def __post_init__(self) -> None:
        check_place("Mirror(place)", place_of("Mirror(place)", self.place), of="a mirror")
        _whole(_AT_LEAST_1, 1)("Mirror(every)", self.every)
        _whole(_AT_LEAST_1, 1, or_none=True)("Mirror(keep_last)", self.keep_last)
        _rate(_LEAST_MIRROR_RATE)("Mirror(max_bytes_per_sec)", self.max_bytes_per_sec)


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
    ``auto`` is ``pageable`` for a state in host memory; for one with CUDA tensors it is ``pinned`` unless the driver
    refuses to lock memory."""

    shm_path: str | Path | None = None
    """Directory of a tmpfs, such as ``/dev/shm``: the shared segments get names there, and a snapshot that was whole
    when the trainer was killed can be committed by ``aio-ckpt rescue``. Needs ``staging`` ``shm`` or ``auto``."""

    direct_io: DirectIO = "auto"
    """O_DIRECT: ``auto`` takes it where the file system does, and the page cache elsewhere. There, ``on`` fails the
    save or load instead. ``off`` never takes it."""

    budget_bytes: int | None = None
    """Most host memory for images, at least 64 KiB. None: half of what the machine and the limits of the
    process's cgroups leave, shared among the ranks of this host, measured when a new layout is planned. A larger state
    is saved in waves."""

    max_write_bytes_per_sec: float | None = None
    """Cap on writing data files, for this engine; at least 1 MiB. None: as fast as the disk."""

    thread_nice: int = 5
    """Niceness of the I/O threads, 0 to 19; never lowers that of the process."""

    thread_ioprio: int | None = 7
    """Best-effort I/O priority of the I/O threads, 0 (first) to 7; None: what follows from the niceness."""

    gather_bytes: int = GATHER_BYTES
    """Memory of each GPU in which its small tensors are gathered before they are moved, at most; kept from save to
    save. 0: every tensor is moved by itself."""

    device_copy_bytes: int | Literal["auto"] = "auto"
    """Memory of each GPU for copies of the large tensors there, at most; ``auto``: as much as is free, 0: none. What
    follows ``save()`` waits for that copy (8.5 GB: a few ms) and not for the transfer to the host. What does not fit is
    fenced. Training that needs the memory gets it back."""

    max_in_flight: int = 1
    """Saves whose capture has begun and that are not finished, at most."""

    when_busy: BusyPolicy = "wait"
    """What ``save()`` does when ``max_in_flight`` saves are pending."""

    stall_timeout_secs: float = 600.0
    """A save without one byte or message of progress for so long fails; never a limit on the total. A rank
    that gives no heartbeat for so long counts as lost."""

    relink_limit: int = 10
    """Most steps that share the bytes of tensors that did not change. These get a data file of their own, which a save
    clones from the step before (reflink, hard link, or copy by the object store), or else writes. 1: each save writes
    all."""

    frozen: FrozenPolicy = "compared"
    """How a save finds that tensors did not change: ``compared`` copies and sums all. ``trusted`` copies no parameter
    without ``requires_grad`` whose memory and ``_version`` are those of the last step; of these, it compares 64 random
    blocks of 1 MiB."""

    keep_last: int | None = None
    """Newest committed steps to keep; None deletes nothing."""

    keep_every: int | None = None
    """Steps divisible by this are kept for ever, beside ``keep_last``, which it needs."""

    keep_best: KeepBest | None = None
    """The best steps by a metric are kept, beside ``keep_last``, which it needs."""

    mirror: Mirror | None = None
    """A second root, to which rank 0 copies committed steps; ``load()`` takes the newest step of both. Retention keeps
    a step until its copy is there."""

    verify: VerifyPolicy = "load"
    """Check the sums of every byte that a load reads, or never."""

    on_failure: FailurePolicy = "raise"
    """A save that failed unawaited: raised once by the next ``save()``, which saves all the same, or by ``close()``; or
    only logged."""

    on_commit: Callable[[SaveReport], object] | None = None
    """Function that is called with the report of each save of this engine that is committed, on every rank. It runs on
    the engine's loop thread, after the ticket is finished, and must not block: all saves stand still meanwhile. Waits
    for this engine raise WrongThreadError there. If the function raises, the error is logged."""

    on_error: Callable[[Exception], object] | None = None
    """Function that is called with the error of each save that failed after its capture began, on every rank. A
    cancelled save counts as no failure. It runs like ``on_commit``."""

    differing_replicas: DifferingReplicas = "refuse"
    """What ``save()`` does if ranks hold different parameters, or different states of optimizers, under one name:
    ``refuse`` it on all ranks, or save the values of ``rank0`` for all. That is the lowest rank that holds them; it
    writes all replicas then. The setting of rank 0 counts. Buffers, arrays and objects may differ in any case."""

    step_dir: str = "step_{step:09d}"
    """Name of a committed directory; must contain ``{step}`` once."""

    stale_after_secs: float = 600.0
    """A writer without a heartbeat for so long by the file system's clock is taken for dead, so that another may write.
    A heartbeat comes every 10 s. At least 180 s on a shared file system, whose clients keep times for 60 s."""

    drain_timeout_secs: float = 60.0
    """How long interpreter exit waits for pending saves (``close()`` waits until each has finished)."""

    trusted_objects: bool = False
    """Read objects that only running code can bring back: loading a checkpoint that has any runs its code. A save needs
    no trust; with it, the save does not warn of such objects."""

    debug: bool = False
    """Poison released arena bytes with 0xCB, so that a use after release shows in the data."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if self.workers > MAX_WORKERS:
            raise ConfigError(f"workers={shown(self.workers)}: each is a thread; give at most {MAX_WORKERS}")
        if self.shm_path is not None and self.staging not in ("auto", "shm"):
            raise ConfigError(
                f'shm_path= with staging={self.staging!r}: only shared memory has a name; give staging="shm"'
            )
        for name in ("keep_best", "keep_every"):
            if getattr(self, name) is not None and self.keep_last is None:
                raise ConfigError(f"{name} without keep_last: nothing would ever be deleted; give keep_last=1 or more")


_Check = Callable[[str, object], None]
"""``check(name, value)`` raises ConfigError if the setting ``name`` cannot have ``value``."""


def _whole(remedy: str, least: int, most: float = math.inf, *, or_none: bool = False) -> _Check:
    """Return the check for a whole number from ``least`` to ``most``, or also None."""

    def check(name: str, value: object) -> None:
        if not (or_none and value is None) and (type(value) is not int or not least <= value <= most):
            raise ConfigError(f"{name}={shown(value)}: {remedy}")

    return check


def _one_of(allowed: tuple[str, ...]) -> _Check:
    """Return the check for one of the strings ``allowed``."""

    def check(name: str, value: object) -> None:
        if not is_among(value, allowed):
            raise ConfigError(f"{name}={shown(value)}: allowed are {', '.join(map(repr, allowed))}")

    return check


def _rate(least: int) -> _Check:
    """Return the check for bytes a second, or None."""

    def check(name: str, value: object) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_rate = is_number and least <= value <= MAX_BYTES_PER_SEC  # type: ignore[operator]
        if value is None or is_rate:
            return
        raise ConfigError(f"{name}={shown(value)}: give bytes a second from {least} to 1e15, or None")

    return check


def _check_shm_path(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, (str, Path)) or not is_path(str(value))):
        raise ConfigError(f"{name}={shown(value)}: give a directory of a tmpfs, such as '/dev/shm'")


def _a(kind: type) -> _Check:
    """Return the check for a ``kind``, or None."""

    def check(name: str, value: object) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={shown(value)}: give a {kind.__name__}")

    return check


def _check_device_copy_bytes(name: str, value: object) -> None:
    if not is_among(value, ("auto",)) and (type(value) is not int or value < 0):
        raise ConfigError(f"{name}={shown(value)}: give a whole number of bytes, 0 for none, or 'auto'")


def _check_step_dir(name: str, value: object) -> None:
    if not isinstance(value, str) or not _STEP_DIR.fullmatch(value):
        raise ConfigError(
            f"{name}={shown(value)}: give one path component with one {{step}} or {{step:09d}} field, "
            "no other braces and no dot in front"
        )
    nbytes = len(value.format(step=10 ** (_STEP_DIGITS - 1)).encode()) + _AROUND_BYTES
    if nbytes > _NAME_BYTES:
        raise ConfigError(
            f"{name}={shown(value)}: names of {nbytes} bytes, with the largest step and the "
            f"{_AROUND_BYTES} bytes that a rollback puts in front, where a file system has {_NAME_BYTES}: give a "
            "shorter one"
        )


_AT_LEAST_1 = "give a whole number of at least 1"
_BYTES = "give a whole number of bytes, 0 for none"
_CHECKS: dict[str, _Check] = {
    "workers": _whole(_AT_LEAST_1, 1),
    "max_in_flight": _whole(_AT_LEAST_1, 1),
    "budget_bytes": _whole(
        f"give a whole number of bytes from {LEAST_BUDGET_BYTES} on, or None", LEAST_BUDGET_BYTES, or_none=True
    ),
    "relink_limit": _whole(_AT_LEAST_1, 1),
    "keep_last": _whole(_AT_LEAST_1, 1, or_none=True),
    "keep_every": _whole(_AT_LEAST_1, 1, or_none=True),
    "stall_timeout_secs": check_seconds,
    "stale_after_secs": check_seconds,
    "drain_timeout_secs": check_seconds,
    "thread_nice": _whole("give a whole number from 0 to 19", 0, 19),
    "thread_ioprio": _whole("give a whole number from 0 to 7, or None", 0, 7, or_none=True),
    "max_write_bytes_per_sec": _rate(MIN_BYTES_PER_SEC),
    "staging": _one_of(get_args(Staging)),
    "direct_io": _one_of(get_args(DirectIO)),
    "when_busy": _one_of(get_args(BusyPolicy)),
    "frozen": _one_of(get_args(FrozenPolicy)),
    "verify": _one_of(get_args(VerifyPolicy)),
    "on_failure": _one_of(get_args(FailurePolicy)),
    "differing_replicas": _one_of(get_args(DifferingReplicas)),
    "on_commit": check_callback,
    "on_error": check_callback,
    "shm_path": _check_shm_path,
    "keep_best": _a(KeepBest),
    "mirror": _a(Mirror),
    "trusted_objects": check_flag,
    "debug": check_flag,
    "gather_bytes": _whole(_BYTES, 0),
    "device_copy_bytes": _check_device_copy_bytes,
    "step_dir": _check_step_dir,
}
"""The check of every setting. What two settings rule out together is checked in ``EngineConfig``."""
