"""``export``, ``import`` and ``convert``: checkpoints to files, and files to checkpoints.

The result is written by an engine within a small budget, and appears as a whole. ``sources`` has what is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aio_ckpt.argument_checks import check_path
from aio_ckpt.cli.arguments import Directory, MistypedPathError, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress
from aio_ckpt.cli.texts import printable
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import (
    BudgetExceededError,
    ConfigError,
    MissingNameError,
    StepOrderError,
    UnsupportedLeafError,
)
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import first_of
from aio_ckpt.remote_path import RemotePath, check_place
from aio_ckpt.reports import SaveReport, amount

if TYPE_CHECKING:
    import torch

    from aio_ckpt.cli.sources import Source
    from aio_ckpt.storage.local import Storage
    from aio_ckpt.sync import SyncCheckpointEngine
    from aio_ckpt.ticket import SaveTicket

_SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth", ".bin", ".ckpt")}
_ALL_SUFFIXES = tuple(suffix for found in _SUFFIXES.values() for suffix in found)
_OF_RANK_0 = re.compile(r"\.rank0(?=\.|$)")
"""What names of PerRank values hold beside their path in the state: rank 0's are read."""
_BUDGET_BYTES = 256 << 20
"""Memory in which the result is staged. A larger state passes through it in waves."""


class _FileOrStep(click.Path):
    """File or directory, as an absolute path."""

    name = "path"

    def __init__(self, *, must_exist: bool, may_be_remote: bool = False) -> None:
        super().__init__()
        self._must_exist = must_exist
        self._check = check_place if may_be_remote else check_path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raises MistypedPathError if it is none, or does not exist."""
        del ctx
        try:
            path = self._check(param.human_readable_name if param else "path", value, of="a file or a checkpoint")
        except ConfigError as error:
            raise MistypedPathError(str(error)) from error
        if isinstance(path, RemotePath):
            return path
        if self._must_exist and not path.exists():
            raise MistypedPathError(f"{value}: no such file or directory")
        if not self._must_exist and not path.parent.is_dir():
            raise MistypedPathError(f"{value}: {path.parent} does not exist: make it first")
        return path


_branch = click.option("--branch", metavar="NAME", help="Only what is below NAME, under names that begin there.")
_shards = click.option("--max-shard-bytes", type=click.IntRange(1), help="Most bytes of tensors in one .safetensors.")
_dtype = click.option("--dtype", help="Cast floating-point tensors of a .safetensors, such as bfloat16.")
_trusted = click.option(
    "--trusted", is_flag=True, help="Run code of the source where an object needs it: only if you trust its writer."
)
_step = click.option("--step", type=click.IntRange(0), help="Its step in ROOT; by default its own, or the next one.")


@click.command("export", epilog="Example: aio-ckpt export runs/ckpt --to safetensors model.safetensors --branch model")
@click.argument("path", type=Directory(may_be_remote=True, of_a_file="give a checkpoint, or take 'aio-ckpt convert'"))
@click.argument("out", type=_FileOrStep(must_exist=False))
@click.option("--to", "kind", type=click.Choice(sorted(_SUFFIXES)), help="Format; by default that of the suffix.")
@_branch
@_shards
@_dtype
@_trusted
@step_dir_option
@json_option
def export_command(path: Path, out: Path, kind: str | None, names: StepNames, **options: Any) -> None:
    """Write a checkpoint of ours or of DCP to the file OUT.

    If PATH is a root, its newest checkpoint is written. Every byte is verified. OUT appears as a whole, once it is
    durable. torch.load opens a .pt, and safetensors a .safetensors.
    """
    if kind is not None and not out.name.endswith(_SUFFIXES[kind]):
        raise ConfigError(f"--to {kind}: {out.name} should end in {' or '.join(_SUFFIXES[kind])}")
    if not out.name.endswith(_ALL_SUFFIXES):
        raise ConfigError(f"{out.name}: give the file OUT a suffix, which tells its format: {', '.join(_ALL_SUFFIXES)}")
    _to_file(path, out, names, **options)


@click.command("import", epilog="Example: aio-ckpt import model.safetensors runs/ckpt --step 100")
@click.argument("file", type=_FileOrStep(must_exist=True))
@click.argument("root", type=_FileOrStep(must_exist=False, may_be_remote=True))
@_step
@_trusted
@step_dir_option
@json_option
def import_command(file: Path, root: Path, step: int | None, names: StepNames, *, trusted: bool, as_json: bool) -> None:
    """Save the content of a FILE as a step of ROOT.

    FILE is of torch.save or safetensors, or the index of several. No code of it is run without --trusted.
    """
    _to_step(file, root, names, step=step, trusted=trusted, as_json=as_json)


@click.command("convert", epilog="Example: aio-ckpt convert pytorch_model.bin model.safetensors")
@click.argument("source", type=_FileOrStep(must_exist=True, may_be_remote=True))
@click.argument("out", type=_FileOrStep(must_exist=False, may_be_remote=True))
@_step
@_branch
@_shards
@_dtype
@_trusted
@step_dir_option
@json_option
def convert_command(
    source: Path, out: Path, step: int | None, names: StepNames, *, trusted: bool, as_json: bool, **options: Any
) -> None:
    """Convert SOURCE to OUT, each of them a file or a directory.

    SOURCE is a checkpoint of ours or of DCP, or a file of torch.save or safetensors. If OUT ends in .safetensors,
    .pt, .pth, .bin or .ckpt, it is a file. Otherwise it is a root: the result is a step in it, which DCP reads, too.
    """
    for path in (source, out):
        if isinstance(path, RemotePath) and path.name.endswith(_ALL_SUFFIXES):
            raise ConfigError(
                f"{path}: a file in an object store: give a file on a disk, and copy it by the store's tools"
            )
    if out.name.endswith(_ALL_SUFFIXES):
        if step is not None:
            raise ConfigError(f"--step is for a root, and {out.name} is a file: leave it away")
        _to_file(source, out, names, trusted=trusted, as_json=as_json, **options)
    elif close := difflib.get_close_matches(out.suffix.lower(), _ALL_SUFFIXES, n=1, cutoff=0.85):
        raise ConfigError(
            f"{out.name}: is that a file or a root? Give a file the suffix {close[0]}, and a root another"
        )
    elif given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise ConfigError(f"{given[0]} is for files, and {out.name} is a root: leave it away, or give a file as OUT")
    else:
        _to_step(source, out, names, step=step, trusted=trusted, as_json=as_json)


def _to_file(
    source: Path,
    out: Path,
    names: StepNames,
    *,
    branch: str | None,
    max_shard_bytes: int | None,
    dtype: str | None,
    trusted: bool,
    as_json: bool,
) -> None:
    """Write the state at ``source`` to the file ``out``, in the format of its suffix, verified and durable."""
    import torch

    from aio_ckpt.cli.sources import read_source
    from aio_ckpt.engine.file_save import file_target
    from aio_ckpt.integrations.lightning_layout import META

    cast = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise ConfigError(f"--dtype {dtype}: no such floating-point dtype in torch: give one such as bfloat16")
    is_safe = out.name.endswith(_SUFFIXES["safetensors"])
    if not is_safe and (dtype is not None or max_shard_bytes is not None):
        raise ConfigError(f"--dtype and --max-shard-bytes are for .safetensors files, and {out.name} is none")
    if (out.parent / METADATA_FILE).exists():
        raise ConfigError(f"{out}: lies in a checkpoint: give OUT in another directory")
    _check_source_stays(source, file_target(str(out)))

    async def check(_: Storage, __: int | None, objects: Mapping[str, object]) -> None:
        if META in objects and branch is None:
            raise UnsupportedLeafError(
                f"{source}: is a checkpoint of Lightning, whose file this command cannot make: give --branch "
                f"state_dict for the weights, or make it in Python: torch.save(AioCheckpointIO().load_checkpoint("
                f"{str(source)!r}, weights_only=False), {str(out)!r})"
            )
        if is_safe:
            _flat_tensors(objects, branch)

    screen, only = Screen(as_json=as_json), None if branch is None else [branch]
    with bytes_progress(screen, "read") as on_progress:
        found = read_source(source, out, names, on_progress, only=only, check=check, trusted=trusted)
        state = found.state if branch is None else _value_below(found, branch)
        if is_safe:  # a branch may be one tensor, which has the last part of its name
            below = {branch.rpartition(".")[2]: state} if branch and isinstance(state, torch.Tensor) else state
            state = _flat_tensors(below, branch)
        report = _written(
            out.parent,
            names,
            lambda engine: engine.save_file(
                state, out, metadata=found.metadata if is_safe else None, max_shard_bytes=max_shard_bytes, dtype=cast
            ),
        )
    _print(screen, found, report, step=found.step)


def _check_source_stays(source: Path, target: Path) -> None:
    """Raise ConfigError if the file ``target`` would replace a file of the source, or remove one."""
    from aio_ckpt.cli.sources import files_of
    from aio_ckpt.format.safetensors_file import index_name, replaced_names

    if isinstance(source, RemotePath) or source.is_dir():
        return
    index = target.with_name(index_name(target.name))
    names = replaced_names(target.name, index.read_bytes() if index.is_file() else None)
    replaced = {*map(target.with_name, names)}
    lost = [path for path in files_of(source) if replaced & {path.resolve(), path.parent.resolve() / path.name}]
    if lost:
        raise ConfigError(
            f"{target} would take the place of {lost[0].name}, a file of the source: give OUT in another directory, "
            "and remove the source yourself"
        )


def _to_step(source: Path, root: Path, names: StepNames, *, step: int | None, trusted: bool, as_json: bool) -> None:
    """Save the state at ``source`` as a step of ``root``; ``step``: None for that of the source, or the next one."""
    from aio_ckpt.cli.access import call
    from aio_ckpt.cli.sources import read_source
    from aio_ckpt.commit.discovery import discover
    from aio_ckpt.commit.step_numbers import step_after

    async def check(storage: Storage, own: int | None, _: Mapping[str, object]) -> None:
        number = own if step is None else step
        there = [found.step for found in await discover(storage, root, names)]
        if number is not None and there and number <= max(there):
            raise StepOrderError(
                f"step {number} does not exceed step {max(there)}, the newest in {root}: give --step {max(there) + 1} "
                "or a higher one, or another root"
            )

    if step is not None:  # before a file, which has none of its own, is looked at
        call(lambda storage, _: check(storage, step, {}))
    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "read") as on_progress:
        found = read_source(source, root, names, on_progress, check=check, trusted=trusted)
        state = found.state if isinstance(found.state, dict) else {"state": found.state}
        number = found.step if step is None else step
        report = _written(
            root,
            names,
            # Without a step, the engine warns of a trainer that has loaded none of the steps.
            lambda engine: engine.save(state, step_after(engine.latest_step()) if number is None else number),
        )
    _print(screen, found, report, step=report.step)


def _written(root: Path, names: StepNames, save: Callable[[SyncCheckpointEngine], SaveTicket]) -> SaveReport:
    """Return the report of what ``save`` writes by an engine at ``root``.

    Raises:
        MemoryError: the system does not give the memory in which the result is staged.
        Exception: any other error of the save.
    """
    from aio_ckpt.ranks.coordinator import SoloCoordinator
    from aio_ckpt.sync import SyncCheckpointEngine

    config = EngineConfig(budget_bytes=_BUDGET_BYTES, step_dir=names.step_dir)
    try:
        with SyncCheckpointEngine(root, config, coordinator=SoloCoordinator()) as engine:
            report = save(engine).result()
    except BudgetExceededError as error:
        raise MemoryError(
            f"a conversion stages its result in {amount(_BUDGET_BYTES)}: free memory, or raise the limit of this "
            "process (ulimit -v)"
        ) from error
    assert report is not None
    return report


def _print(screen: Screen, found: Source, report: SaveReport, *, step: int | None) -> None:
    """Show the result; ``step``: of the result, or of the source if the result is a file, None if nothing tells it."""
    path = str(report.path)
    if screen.as_json:
        screen.json({"source": str(found.path), "path": path, "nbytes": report.raw_bytes, "step": step})
    else:
        screen.line(f"{amount(report.raw_bytes)} of tensors, {printable(path)}", style="green")


def _value_below(found: Source, name: str) -> Any:
    """Return the value below the branch ``name``, as ``aio-ckpt inspect`` names it; keys may hold dots."""
    parts = _below(found.state, name) or _below(found.state, _OF_RANK_0.sub("", name))
    if not parts:
        raise MissingNameError(f"{found.path}: holds nothing named or below {name!r}{_known(found.state)}")
    if len(parts) == 1:
        return parts[0]
    merged: dict[Any, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping) or merged.keys() & part.keys():
            raise UnsupportedLeafError(
                f"{found.path}: several values lie at {name!r}: give a longer or shorter --branch"
            )
        merged |= part
    return merged


def _below(value: object, name: str) -> list[Any]:
    """Return what lies below ``name``. The keys of several parts, as of a ``state_dict()``, may begin with it."""
    parts: list[Any] = []
    for key, inner in _children(value):
        if key == name:
            parts.append(inner)
        elif name.startswith(f"{key}."):
            parts += _below(inner, name.removeprefix(f"{key}."))
        elif key.startswith(f"{name}."):
            parts.append({key.removeprefix(f"{name}."): inner})
    return parts


def _known(state: object) -> str:
    names = [key for key, _ in _children(state)]
    return f": it holds {first_of([*map(repr, names)])}" if names else ""


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    return [(str(at), inner) for at, inner in enumerate(value)] if isinstance(value, (list, tuple)) else []


def _flat_tensors(value: object, branch: str | None) -> dict[str, torch.Tensor]:
    """Return the tensors below ``value`` by name, for a safetensors file.

    Raises:
        UnsupportedLeafError: a value is no tensor, or two have one name; names the first one, and how many there are.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []

    def walk(inner: object, name: str) -> None:
        children = _children(inner)
        if isinstance(inner, torch.Tensor):
            if name in tensors:
                raise UnsupportedLeafError(f"two tensors would have the name {name!r} in the file: rename one of them")
            tensors[name] = inner
        elif children or isinstance(inner, (Mapping, list, tuple)):
            for key, child in children:
                walk(child, f"{name}.{key}" if name else key)
        else:
            others.append(name)

    walk(value, "")
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        remedy = "give --branch, such as --branch model" if branch is None else f"give a branch below {branch}"
        raise UnsupportedLeafError(
            f"{others[0]!r}{more} is no tensor, and a safetensors file holds tensors alone: {remedy}, or an OUT that "
            "ends in .pt"
        )
    return tensors
