"""CUDA: copies from and to devices, streams, events and registered host memory. No other file names ``torch.cuda``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch

from aio_ckpt.errors import ConfigError
from aio_ckpt.memory.copies import Copies, CopyEvent, Groups
from aio_ckpt.memory.cuda_driver import batch_copy
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.message_texts import shown

_CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class _CudaEvent(CopyEvent):
    """An event of a side stream."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._device = side.device
        with on_device(self._device):
            # Without blocking=True, synchronize() would spin on a core.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(side)

    def query(self) -> bool:
        with on_device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with on_device(self._device):
            self._event.synchronize()

    def fence(self, stream: object = None) -> None:
        waiting = torch.cuda.current_stream(self._device) if stream is None else stream
        if not isinstance(waiting, torch.cuda.Stream):  # a stream of another kind of device, or a bare handle
            raise ConfigError(f"fence(stream={shown(stream)}): give a torch.cuda.Stream")
        waiting.wait_event(self._event)


class CudaCopies(Copies):
    """Copies on a side stream, after all work that the caller's current stream holds at construction."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream, *, is_registered: bool) -> None:
        """Begin after the caller's work. ``is_registered``: the targets are page-locked, so issuing takes 1 us."""
        self._device = device
        self._side = side
        self._driver_copy = _driver_copy("cuMemcpyDtoHAsync_v2", holds_gil=is_registered)
        self._batch = batch_copy() if is_registered else None
        self._side.wait_event(torch.cuda.current_stream(device).record_event())

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        # The device comes first. Leaving the stream alone would select the thread's device 0, and make a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy. The caller must keep the source alive until a later event is reached."""
        with self._on_side():
            target.copy_(source, non_blocking=True)

    def copy_vectors(self, base: int, vectors: CopyVectors) -> None:
        """Issue the copies. The caller must keep the sources alive until a later event is reached.

        Raises:
            RuntimeError: the driver refused a copy; the message holds the driver's error number.
        """
        copy, side = self._driver_copy, self._side.cuda_stream
        with torch.cuda.device(self._device):
            if self._batch is not None and len(vectors) > 1 and not self._batch(vectors, base, side):
                return  # if the batch is refused, the single copies tell what is wrong
            for start, address, nbytes in vectors.tolist():
                code = copy(base + start, address, nbytes, side)
                if code:
                    raise RuntimeError(f"copy of {nbytes} bytes, host and {self._device}: CUDA error {code}")

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue the copy, and block until ``source``, if it is host memory, was read."""
        with self._on_side(), torch.no_grad():
            target.copy_(source)

    def copy_groups(self, groups: Groups) -> None:
        """Issue the copies. The caller must keep the sources alive until a later event is reached."""
        with self._on_side():
            super().copy_groups(groups)

    def contiguous(self, source: torch.Tensor) -> torch.Tensor:
        """Compute the tensor on the side stream."""
        with self._on_side():
            return super().contiguous(source)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Allocate memory of the side stream's pool; None if the device lacks it."""
        try:
            with self._on_side():
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def memory_info(self) -> tuple[int, int]:
        """Ask the driver, which takes about 0.1 ms."""
        return torch.cuda.mem_get_info(self._device)

    def releases(self) -> int:
        """Ask torch's caching allocator."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_device_free", 0))

    def record_event(self) -> CopyEvent:
        """Return an event of the side stream."""
        return _CudaEvent(self._side)


class CudaUploads(CudaCopies):
    """Copies to a device on a side stream, issued by threads that may never have used CUDA."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream) -> None:
        super().__init__(device, side, is_registered=False)
        self._driver_copy = _driver_copy("cuMemcpyHtoDAsync_v2", holds_gil=False)
        self._is_full = False

    def copy_vectors(self, base: int, vectors: CopyVectors) -> None:
        """Issue the copies. If the sources are page-locked, they must stay unchanged until a later event is reached."""
        with on_device(self._device):
            self._side.query()  # this call of the runtime gives the thread the context that the driver's call needs
            super().copy_vectors(base, vectors)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Allocate memory of the current stream's pool, which the trainer can reuse; None if the device lacks it.

        The caller drops the memory only after an event that follows its last use.
        """
        if self._is_full or not can_copy_by_address(self._device):
            return None
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:  # never ask again: before it refuses, the allocator empties its whole cache
            self._is_full = True
            return None
        self._side.wait_stream(torch.cuda.current_stream(self._device))  # earlier work there may still use the memory
        return memory


class CopyStreams:
    """Side streams of one engine, one for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, device: torch.device, *, is_registered: bool) -> Copies:
        """Begin the copies of one save from ``device``; ``is_registered`` says whether the targets are page-locked."""
        if device.type != "cuda":
            return Copies()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return CudaCopies(device, self._streams[device], is_registered=is_registered)


def begin_uploads(device: torch.device) -> Copies:
    """Begin the copies of one load to ``device``."""
    if device.type != "cuda":
        return Copies()
    with on_device(device):
        return CudaUploads(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether the host can write to the memory of ``tensor`` directly."""
    return tensor.is_cpu


def prefers_page_locked(device: torch.device) -> bool:
    """Return whether copies to ``device`` are faster from page-locked memory (:func:`register_host_memory`)."""
    return device.type == "cuda"


def can_copy_by_address(device: torch.device) -> bool:
    """Return whether tensors on ``device`` can be copied by address alone; on CUDA, the driver's own call does it."""
    return device.type == "cpu" or (device.type == "cuda" and _driver_is_there())


@functools.cache
def _driver_is_there() -> bool:
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyDtoHAsync_v2")
    except OSError:  # ROCm has no such library, so torch copies there
        return False


@functools.cache
def _driver_copy(name: str, *, holds_gil: bool) -> Callable[[int, int, int, int], int]:
    """Return the driver's function ``name(target, source, nbytes, stream)``, which returns its error number.

    ``holds_gil`` is for calls that return at once: to release the GIL would cost more than the call.
    """
    if not _driver_is_there():
        return lambda *_: 801  # CUDA_ERROR_NOT_SUPPORTED: see can_copy_by_address
    copy = getattr((ctypes.PyDLL if holds_gil else ctypes.CDLL)("libcuda.so.1"), name)
    # Device addresses and host pointers are both passed as 64 bits.
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", copy)


@functools.cache
def cuda_is_available() -> bool:
    """Return whether CUDA tensors can exist in this process. torch asks the driver each time, and this once."""
    return torch.cuda.is_available()


def is_capturing_graph() -> bool:
    """Return whether the current stream records a CUDA graph instead of running its work."""
    return cuda_is_available() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def on_device(device: torch.device | None) -> Iterator[None]:
    """Direct this thread's CUDA calls to ``device``, and allow them while another thread captures a CUDA graph.

    A thread starts on device 0, where even a query makes a context, which takes half a gigabyte for each rank.
    """
    if device is None or device.type != "cuda" or not cuda_is_available():
        yield
        return
    mode, exchange = ctypes.c_int(_CAPTURE_RELAXED), _exchange_capture_mode()
    with torch.cuda.device(device):
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[..., int]:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode if _driver_is_there() else lambda _: 0


@functools.cache
def _cuda_get_last_error() -> Callable[[], int]:
    """Return ``cudaGetLastError`` of the runtime that torch has loaded.

    It clears the last error, which torch would otherwise report for its next kernel.
    """
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    # The symbol is looked up in the library and what it is linked with: a process may hold several CUDA runtimes.
    try:
        return cast("Callable[[], int]", ctypes.CDLL(str(library)).cudaGetLastError)
    except (OSError, AttributeError):  # a build of torch of another kind
        return lambda: 0


def register_host_memory(address: int, nbytes: int) -> None:
    """Page-lock host memory with ``cudaHostRegister``, so that copies to it can be asynchronous.

    Raises:
        RuntimeError: the driver refused.
    """
    _check(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)))  # type: ignore[no-untyped-call]


def unregister_host_memory(address: int) -> None:
    """Undo :func:`register_host_memory`."""
    _check(int(torch.cuda.cudart().cudaHostUnregister(address)))  # type: ignore[no-untyped-call]


def _check(code: int) -> None:
    if code:
        _cuda_get_last_error()()
    torch.cuda.check_error(code)
