"""Copies from devices: streams, events, registered host memory. The only file that names ``torch.cuda``.

Host memory has a real implementation of the same interface, not a stub: :class:`HostCopies`.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from aio_ckpt.errors import ConfigError

__all__ = [
    "Copies",
    "CopyStreams",
    "HostCopies",
    "Mark",
    "cuda_is_available",
    "register_host_memory",
    "unregister_host_memory",
]


_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


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


class Copies(Protocol):
    """The copies of one save from one device, in the order of the calls."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target`` (host memory, same dtype and shape) with the values it has now."""
        ...

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` without conj and neg bits, contiguous; made in the order of the copies."""
        ...

    def mark(self) -> Mark:
        """A mark behind all copies so far."""
        ...

    def fence(self) -> None:
        """Make later work of the caller's current stream wait for all copies so far; blocks no thread."""
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HostCopies:
    """Copies that are done when the call returns: host memory, and devices without streams of their own."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Blocks until copied, GIL released. Both are contiguous."""
        if source.device.type == "cpu" and torch.get_num_threads() < _OPENMP_PAYS_THREADS:
            _memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Allocates unless ``source`` is already plain and contiguous."""
        return source.resolve_conj().resolve_neg().contiguous()

    def mark(self) -> Mark:
        """Already reached."""
        return _Done()

    def fence(self) -> None:
        """Nothing is pending."""


class CudaCopies:
    """Copies on a side stream behind everything that the caller's current stream holds at construction."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream) -> None:
        self._caller = torch.cuda.current_stream(device)
        self._side = side
        self._side.wait_event(self._caller.record_event())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issued, not done; the source must be kept alive until a later mark is reached."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Computed on the side stream."""
        with torch.cuda.stream(self._side):
            return source.resolve_conj().resolve_neg().contiguous()

    def mark(self) -> Mark:
        """An event of the side stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def fence(self) -> None:
        """The stream that was current at construction waits for the side stream."""
        self._caller.wait_stream(self._side)


class CopyStreams:
    """One side stream a device, kept for the life of an engine."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, device: torch.device) -> Copies:
        """Start the copies of one save from ``device``."""
        if device.type != "cuda":
            return HostCopies()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return CudaCopies(device, self._streams[device])


def cuda_is_available() -> bool:
    """Whether CUDA tensors can exist here."""
    return torch.cuda.is_available()


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
