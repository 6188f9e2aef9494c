"""Copies from devices: streams, events, registered host memory. The only file that names ``torch.cuda``.

Host memory has a real implementation of the same interface, not a stub: :class:`HostCopies`.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from aio_ckpt.batch import batch_copy
from aio_ckpt.errors import ConfigError

__all__ = [
    "Copies",
    "CopyStreams",
    "HostCopies",
    "Mark",
    "copies_by_address",
    "copy_secs",
    "cuda_is_available",
    "gathers_small",
    "is_capturing_graph",
    "pci_address",
    "register_host_memory",
    "unregister_host_memory",
]


_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_memmove_held = ctypes.PyDLL(None).memmove
_memmove_held.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_held.restype = ctypes.c_void_p

_OPENMP_PAYS_THREADS = 8
"""From so many threads on torch copies faster than one memmove (16 threads: 41 against 12 GB/s). With two, its
barriers fight with the threads that write (240 to 440 ms a GiB beside them, against 120 to 260)."""


class Mark(Protocol):
    """A point in a sequence of copies."""

    def query(self) -> bool:
        """Whether every copy before it is done."""
        ...

    def synchronize(self) -> None:
        """Block the thread (GIL released) until every copy before it is done."""
        ...

    def fence(self, stream: object = None) -> None:
        """Make later work of ``stream`` (None: the current one) wait for the copies before it; blocks no thread."""
        ...


class Copies(Protocol):
    """The copies of one save from one device, in the order of the calls."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target`` (host memory, same dtype and shape) with the values it has now."""
        ...

    def issue(self, base: int, moves: Iterable[tuple[int, int, int]]) -> None:
        """Copy by address: (offset from ``base``, source address, bytes) each."""
        ...

    def gather(
        self,
        target: torch.Tensor,
        line: torch.Tensor,
        groups: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    ) -> None:
        """Copy (targets, sources), which lie in ``line`` on the device, group by group, then ``line`` to ``target``."""
        ...

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` without conj and neg bits, contiguous; made in the order of the copies."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """Bytes on the device for :meth:`gather`; None if they cannot be had."""
        ...

    def mark(self) -> Mark:
        """A mark behind all copies so far."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def fence(self, stream: object = None) -> None:
        return None


class HostCopies:
    """Copies that are done when the call returns: host memory, and devices without streams of their own."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Blocks until copied, GIL released. Both are contiguous."""
        if source.device.type == "cpu" and torch.get_num_threads() < _OPENMP_PAYS_THREADS:
            _memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def issue(self, base: int, moves: Iterable[tuple[int, int, int]]) -> None:
        """Blocks until copied, GIL held: for a few KiB that is cheaper than to give it up and win it back."""
        for start, address, nbytes in moves:
            _memmove_held(base + start, address, nbytes)

    def gather(
        self,
        target: torch.Tensor,
        line: torch.Tensor,
        groups: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    ) -> None:
        """Blocks until copied."""
        _foreach_copy(groups)
        target.copy_(line)

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Allocates unless ``source`` is already plain and contiguous."""
        return source.resolve_conj().resolve_neg().contiguous()

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """Host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        """Already reached."""
        return _Done()


class _CudaMark:
    """An event of a side stream."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(side)
        self._device = side.device

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def fence(self, stream: object = None) -> None:
        waiting = stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.current_stream(self._device)
        waiting.wait_event(self._event)


class CudaCopies:
    """Copies on a side stream behind everything that the caller's current stream holds at construction."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream, *, is_registered: bool) -> None:
        """``is_registered``: the targets are page-locked, so that to issue a copy takes a microsecond."""
        self._device = device
        self._side = side
        self._driver_copy = _driver_copy(holds_gil=is_registered)
        self._batch = batch_copy() if is_registered else None
        self._side.wait_event(torch.cuda.current_stream(device).record_event())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issued, not done; the source must be kept alive until a later mark is reached."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def issue(self, base: int, moves: Iterable[tuple[int, int, int]]) -> None:
        """Issued, not done, as :meth:`copy`.

        Raises:
            RuntimeError: the driver refused; tells its error number.
        """
        copy, side, rows = self._driver_copy, self._side.cuda_stream, list(moves)
        with torch.cuda.device(self._device):
            if self._batch is not None and len(rows) > 1 and not self._batch(rows, base, side):
                return  # else one by one, which says what is wrong
            for start, address, nbytes in rows:
                code = copy(base + start, address, nbytes, side)
                if code:
                    raise RuntimeError(f"cuMemcpyDtoHAsync of {nbytes} bytes from {self._device}: CUDA error {code}")

    def gather(
        self,
        target: torch.Tensor,
        line: torch.Tensor,
        groups: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    ) -> None:
        """Issued, not done, as :meth:`copy`."""
        with torch.cuda.stream(self._side):
            _foreach_copy(groups)
            target.copy_(line, non_blocking=True)

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Computed on the side stream."""
        with torch.cuda.stream(self._side):
            return source.resolve_conj().resolve_neg().contiguous()

    def buffer(self, nbytes: int) -> torch.Tensor | None:
        """Memory of the side stream's pool."""
        try:
            with torch.cuda.stream(self._side):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def mark(self) -> Mark:
        """An event of the side stream."""
        return _CudaMark(self._side)


def _foreach_copy(groups: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
    with torch.no_grad():
        for targets, sources in groups:
            torch._foreach_copy_(list(targets), list(sources))


class CopyStreams:
    """One side stream a device, kept for the life of an engine."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, device: torch.device, *, is_registered: bool) -> Copies:
        """Start the copies of one save from ``device``; ``is_registered`` if the targets are page-locked."""
        if device.type != "cuda":
            return HostCopies()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return CudaCopies(device, self._streams[device], is_registered=is_registered)


def copies_by_address(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be copied by their address alone (CUDA: by the driver's own call)."""
    return device.type == "cpu" or (device.type == "cuda" and _driver_is_there())


def gathers_small(device: torch.device) -> bool:
    """Whether many small tensors on ``device`` are put together there before they are moved."""
    return device.type == "cuda"


@functools.cache
def _driver_is_there() -> bool:
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyDtoHAsync_v2")
    except OSError:  # ROCm: torch copies
        return False


@functools.cache
def _driver_copy(*, holds_gil: bool) -> Callable[[int, int, int, int], int]:
    """``cuMemcpyDtoHAsync(target, source, nbytes, stream)``; with the GIL held where it returns at once."""
    if not _driver_is_there():
        return lambda *_: 801  # CUDA_ERROR_NOT_SUPPORTED: see copies_by_address
    copy = (ctypes.PyDLL if holds_gil else ctypes.CDLL)("libcuda.so.1").cuMemcpyDtoHAsync_v2
    copy.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    return copy


def copy_secs(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds that one copy to host memory takes, on a stream that waits for nothing of the caller's."""
    if source.device.type != "cuda":
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    with torch.cuda.stream(torch.cuda.Stream(source.device)):  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(source.device).synchronize()
        return time.perf_counter() - began


def pci_address(device: torch.device) -> str | None:
    """PCI address of a CUDA device (``0000:3b:00.0``); None where the driver does not tell."""
    if device.type != "cuda" or not _driver_is_there():
        return None
    driver, found, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    # Not torch's properties: they have no PCI domain before 2.8. The driver counts visible devices as torch does.
    index = torch.cuda.current_device() if device.index is None else device.index
    if driver.cuDeviceGet(ctypes.byref(found), index) or driver.cuDeviceGetPCIBusId(text, len(text), found):
        return None
    return text.value.decode().lower()


def cuda_is_available() -> bool:
    """Whether CUDA tensors can exist here."""
    return torch.cuda.is_available()


def is_capturing_graph() -> bool:
    """Whether the current stream records a CUDA graph instead of running."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def register_host_memory(address: int, nbytes: int) -> None:
    """Page-lock host memory for the driver (``cudaHostRegister``), so that copies to it can be asynchronous.

    Raises:
        ConfigError: no CUDA device is present.
        RuntimeError: the driver refused.
    """
    if not cuda_is_available():
        raise ConfigError('staging="pinned": no CUDA device is present; use staging="auto" or "pageable"')
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))


def unregister_host_memory(address: int) -> None:
    """Undo :func:`register_host_memory`."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))
