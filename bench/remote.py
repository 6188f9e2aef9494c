"""``python -m bench.remote``: saves to a bucket and loads from it, beside plain requests of the same library.

Without ``--url``, a server is started on this machine, with half of its cores. With ``--url``, the environment leads to
your bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from aio_ckpt import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.object_client import open_store
from bench.common import seaweedfs
from bench.common.limits import pack
from bench.common.measure import DONE, Contender, Spread, Waitable, interleave
from bench.common.options import log
from bench.common.results import FigureRow, Goal, Report, Row, make_row, out_folder, publish

__all__ = ["main"]

_TENSORS, _WORKERS = 16, 8
_MIB = 1 << 20
_RANGE_BYTES, _READERS = 16 << 20, 8
_REST_SECS = 0.5
State = dict[str, torch.Tensor]


class _Watched(Contender):
    """Keeps by how much the resident memory of the process rises in each operation."""

    durability = "acknowledged by the store"

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def before(self) -> None:
        """Begin to watch, from rest: the step before is deleted behind its save."""
        time.sleep(_REST_SECS)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._begun = _resident("VmRSS")

    def after(self) -> None:
        """Note the rise."""
        self.peaks.append(_resident("VmHWM") - self._begun)

    @property
    def rise(self) -> Spread:
        """Rise of the resident memory in the timed rounds, in MiB."""
        return Spread.of([peak / _MIB for peak in self.peaks[1:]])


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class PlainPut(_Watched):
    """One ``obstore.put`` of the packed bytes, with its defaults."""

    name = "obstore.put"

    def __init__(self, packed: mmap.mmap, place: RemotePath) -> None:
        super().__init__()
        self._data, self._store, self._key = memoryview(packed), open_store(place), (place / "plain").key

    def start(self) -> Waitable:
        """Put the object."""
        import obstore

        obstore.put(self._store, self._key, self._data)
        return DONE


class EngineSave(_Watched):
    """``engine.save(state)``; done when committed."""

    is_async = True

    def __init__(self, name: str, state: State, root: str) -> None:
        super().__init__()
        self.name = name
        self._state = state
        self.engine = CheckpointEngine(root, EngineConfig(keep_last=1, workers=_WORKERS))

    def start(self) -> Waitable:
        """Return the ticket's milestone."""
        return self.engine.save(self._state).committed

    def close(self) -> None:
        """Close the engine."""
        self.engine.close_blocking()


class DcpSave(_Watched):
    """``dcp.save`` by fsspec and s3fs."""

    name = "dcp.save, s3fs"

    def __init__(self, state: State, url: str) -> None:
        super().__init__()
        self._state, self._url = state, url

    def start(self) -> Waitable:
        """Save."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(dict(self._state), storage_writer=self._writer(), no_dist=True)
        return DONE

    def _writer(self) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(self._url)


class S3TorchSave(DcpSave):
    """``dcp.save`` by s3torchconnector."""

    name = "dcp.save, s3torchconnector"

    def _writer(self) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        return S3StorageWriter(region=os.environ["AWS_REGION"], path=self._url, s3client_config=config)


class PlainGet(_Watched):
    """Ranged GETs of one object by several threads, into memory that is there."""

    name = "ranged gets"

    def __init__(self, packed: mmap.mmap, place: RemotePath) -> None:
        super().__init__()
        import obstore

        self._store, self._key, self._into = open_store(place), (place / "plain").key, memoryview(packed)
        obstore.put(self._store, self._key, self._into)
        self._pool = ThreadPoolExecutor(_READERS)

    def start(self) -> Waitable:
        """Read the object."""
        import obstore

        def read(start: int) -> None:
            end = min(start + _RANGE_BYTES, len(self._into))
            self._into[start:end] = memoryview(obstore.get_range(self._store, self._key, start=start, end=end))

        list(self._pool.map(read, range(0, len(self._into), _RANGE_BYTES)))
        return DONE

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class EngineLoad(_Watched):
    """``engine.load(template)``: each block is verified."""

    name = "aio_ckpt"

    def __init__(self, state: State, root: str) -> None:
        super().__init__()
        self._template = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.engine = CheckpointEngine(root, EngineConfig(workers=_WORKERS))
        self.engine.save(state).result()
        self._state = state

    def start(self) -> Waitable:
        """Load."""
        self.engine.load(self._template).result()
        return DONE

    def close(self) -> None:
        """Compare, and close the engine."""
        assert all(torch.equal(self._template[name], tensor) for name, tensor in self._state.items())
        self.engine.close_blocking()


class DcpLoad(_Watched):
    """``dcp.load`` by fsspec and s3fs."""

    name = "dcp.load, s3fs"

    def __init__(self, state: State, url: str) -> None:
        super().__init__()
        self._template, self._url = {name: torch.zeros_like(tensor) for name, tensor in state.items()}, url

    def start(self) -> Waitable:
        """Load."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self._template, storage_reader=FsspecReader(self._url), no_dist=True)
        return DONE


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.remote", description=__doc__)
    parser.add_argument("--url", help="place in your bucket, which is left empty; else a server is started here")
    parser.add_argument("--mb", type=int, default=512, help="size of the state")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="where the saved state is; loads fill host memory")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk for the local save")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 64 MB, 2 rounds")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    nbytes, rounds = (64 << 20, 2) if given.quick else (given.mb * 1_000_000, given.rounds)
    with _place(given.url, given.dir) as place, tempfile.TemporaryDirectory(dir=given.dir) as folder:
        torch.manual_seed(0)
        held = {f"w{number}": torch.randn(nbytes // 4 // _TENSORS) for number in range(_TENSORS)}
        state = {name: tensor.to(given.device) for name, tensor in held.items()}
        title = f"{_TENSORS} tensors, {nbytes / 1e6:.0f} MB"
        log(title)
        packed = pack(held)
        savers: list[_Watched] = [
            PlainPut(packed, place),
            EngineSave("aio_ckpt", state, str(place / "aio")),
            EngineSave("aio_ckpt, to a disk", state, folder),
            *_rivals("s3fs", functools.partial(DcpSave, state, str(place / "s3fs"))),
            *_rivals("s3torchconnector", functools.partial(S3TorchSave, state, str(place / "s3torch"))),
        ]
        saved = _rows(savers, rounds, nbytes)
        loaders: list[_Watched] = [
            PlainGet(packed, place),
            EngineLoad(held, str(place / "load")),
            *_rivals("s3fs", functools.partial(DcpLoad, held, str(place / "s3fs"))),
        ]
        loaded = _rows(loaders, rounds, nbytes)
    server = "a bucket" if given.url else "SeaweedFS on the other half of the cores"
    settings = {
        "rounds": rounds,
        "workers": _WORKERS,
        "megabytes": nbytes / 1e6,
        "device": given.device,
        "sums": os.environ.get("AWS_CHECKSUM_ALGORITHM", "SHA256"),
        "server": server,
        "quick": given.quick,
    }
    shapes = {f"save to a bucket: {title}": saved, f"load from it: {title}": loaded}
    report = Report(
        bench="remote",
        settings=settings,
        shapes=shapes,
        figures=[*_memory_rows("save", savers), *_memory_rows("load", loaders)],
        goals=_goals({row.name: row for row in saved}, {row.name: row for row in loaded}, savers),
    )
    out = out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=given.quick)
    log(f"wrote {publish(report, given.dir.absolute(), out=out)}")


@contextlib.contextmanager
def _place(url: str | None, folder: Path) -> Iterator[RemotePath]:
    """Yield an empty place in a bucket, which is emptied at the end."""
    import obstore

    with contextlib.ExitStack() as stack:
        if url is None:
            stack.enter_context(seaweedfs.on_half_of_the_cores(folder))
        place = RemotePath.of(f"{url or 's3://bucket/bench'}/{uuid.uuid4().hex[:8]}")
        assert place is not None, "give the URL of a place in a bucket"
        store = open_store(place)
        obstore.put(store, (place / "first").key, b"")
        try:
            yield place
        finally:
            for batch in obstore.list(store, place.key):
                obstore.delete(store, [each["path"] for each in batch])


def _rivals(package: str, make: Any) -> list[_Watched]:
    if importlib.util.find_spec(package) is None:
        log(f"    {package} is not installed")
        return []
    return [make()]


def _rows(contenders: Sequence[_Watched], rounds: int, nbytes: int) -> list[Row]:
    """Return a row for each contender; the first is the limit."""
    try:
        first, samples = interleave(contenders, rounds, log=log)
        limits = samples[contenders[0].name]
        return [make_row(each, first[each.name], samples[each.name], limits, nbytes, None) for each in contenders]
    finally:
        for each in contenders:
            each.close()


def _memory_rows(what: str, contenders: Sequence[_Watched]) -> list[FigureRow]:
    about = "rise of resident memory"
    return [FigureRow(text=f"{what}: {each.name}: {about}", values=each.rise, unit="MiB") for each in contenders]


def _goals(saved: dict[str, Row], loaded: dict[str, Row], savers: Sequence[_Watched]) -> list[Goal]:
    remote, disk = saved["aio_ckpt"], saved["aio_ckpt, to a disk"]
    rises = {each.name: each.rise.median for each in savers}
    plain = saved["obstore.put"]
    more = (remote.cpu_secs_per_gb - disk.cpu_secs_per_gb - plain.cpu_secs_per_gb) * (1 << 30) / 1e9
    return [
        Goal(text="save: speed / obstore.put", figure=1 / remote.ratio, bound=0.9, is_floor=True),
        Goal(text="load: speed / ranged gets", figure=1 / loaded["aio_ckpt"].ratio, bound=0.9, is_floor=True),
        Goal(
            text="save: memory above a save to a disk",
            figure=rises["aio_ckpt"] - rises["aio_ckpt, to a disk"],
            bound=64.0,
            unit="MiB",
        ),
        Goal(text="save: CPU above a save to a disk and a plain put", figure=more, bound=0.35, unit="CPU-s/GiB"),
        Goal(text="save() / save() to a disk", figure=remote.blocked.median / disk.blocked.median, bound=1.1),
    ]


if __name__ == "__main__":
    main()
