"""Megatron on a machine without triton, which ``megatron.core`` imports: no test here runs a kernel."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import typing
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy
import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode


class UnusedModule(ModuleType):
    """Module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def stub_triton() -> None:
    """Let ``import triton`` succeed, and ``torch.compile`` compile nothing, unless triton is installed.

    ``megatron.training`` is made for Python 3.12, and its modules for checkpoints import on 3.11 too.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
        return
    importlib.import_module("torch._dynamo")  # its first import looks for more of triton than the stub has

    for name in ("triton", "triton.language"):
        module = UnusedModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["triton"].__version__ = "3.0.0"  # type: ignore[attr-defined]
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    _compile_nothing()


def _compile_nothing() -> None:
    torch.compile = lambda fn=None, **_: fn or (lambda inner: inner)  # type: ignore[assignment]


def has_training() -> bool:
    """Whether the installed package contains ``megatron.training``, as wheels from 0.19 on do."""
    if importlib.util.find_spec("megatron") is None:
        return False
    return importlib.util.find_spec("megatron.training") is not None


def stub_dataset_helpers() -> None:
    """Let ``megatron.core.datasets`` index documents, unless its compiled helpers fit this Python."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return
    helpers = UnusedModule(name)
    helpers.__dict__.update(build_sample_idx_int32=_sample_index, build_sample_idx_int64=_sample_index)
    helpers.__dict__["__all__"] = ["build_sample_idx_int32", "build_sample_idx_int64"]
    sys.modules[name] = helpers


def _sample_index(
    sizes: Any, documents: Any, length: int, epochs: int, tokens: int, drop_last: bool = True, extra: int = 1
) -> Any:
    """Return where each sample begins: the document, as an index into ``documents``, and the offset in it."""
    starts = numpy.arange((epochs * tokens - extra) // length + 1) * length
    ends = numpy.cumsum(sizes[documents], dtype=numpy.int64)
    found = numpy.searchsorted(ends, starts, side="right")
    return numpy.stack([found, starts - (ends - sizes[documents])[found]], axis=1).astype(documents.dtype)


class _CudaOnCpu(TorchFunctionMode):
    """Mode in which tensors for CUDA are made in host memory, and say that they are on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_on_host, args), **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


def _on_host(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if is_device else value


def stub_cuda() -> None:
    """Let Megatron train on the CPU: what it asks of CUDA is done there, or not at all.

    To others than Megatron there is no CUDA. Does not end.
    """
    importlib.import_module("torch._dynamo")  # its first import lists the functions that are replaced here
    _compile_nothing()
    is_available, count = torch.cuda.is_available, torch.cuda.device_count

    def asks() -> bool:
        return str(sys._getframe(2).f_globals["__name__"]).startswith("megatron.")

    def nothing(*args: Any, **options: Any) -> None:
        pass

    cuda: Any = torch.cuda
    cuda.is_available = lambda: asks() or is_available()
    cuda.device_count = lambda: 1 if asks() else count()
    cuda.current_device = lambda: "cpu"
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, name, nothing)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, MagicMock(name=f"torch.cuda.{name}"))
    cuda.stream = lambda stream: contextlib.nullcontext()
    _keep_random_state(torch.utils.data.dataloader._BaseDataLoaderIter)
    _CudaOnCpu().__enter__()
    tracker = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _keep_random_state(loader: Any) -> None:
    """Let a data loader that begins draw its seed without effect on the one generator that stands for two."""
    init = loader.__init__

    def begin(self: Any, *args: Any, **options: Any) -> None:
        state = torch.get_rng_state()
        init(self, *args, **options)
        torch.set_rng_state(state)

    loader.__init__ = begin
