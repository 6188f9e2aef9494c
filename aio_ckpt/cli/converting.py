"""``export``, ``import`` and ``convert``: checkpoints to files, and files to checkpoints."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aio_ckpt.checks import check_path
from aio_ckpt.cli.arguments import Directory, MistypedPathError, example, json_option, step_dir_option
from aio_ckpt.cli.console import Screen, bytes_progress, printable
from aio_ckpt.errors import ConfigError
from aio_ckpt.format.names import StepNames
from aio_ckpt.reports import amount

if TYPE_CHECKING:
    from aio_ckpt.cli.work.conversions import Converted

_SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth", ".bin", ".ckpt")}


class _Place(click.Path):
    """File or directory, as an absolute path."""

    name = "path"

    def __init__(self, *, must_exist: bool) -> None:
        super().__init__()
        self._must_exist = must_exist

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raises MistypedPathError if it is none, or does not exist."""
        del ctx
        try:
            path = check_path(param.human_readable_name if param else "path", value, of="a file or a checkpoint")
        except ConfigError as error:
            raise MistypedPathError(str(error)) from error
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


@click.command("export", epilog=example("aio-ckpt export runs/ckpt --to safetensors model.safetensors --branch model"))
@click.argument("path", type=Directory(of_a_file="give a checkpoint, or take 'aio-ckpt convert'"))
@click.argument("out", type=_Place(must_exist=False))
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
    _to_file(path, out, names, **options)


@click.command("import", epilog=example("aio-ckpt import model.safetensors runs/ckpt --step 100"))
@click.argument("file", type=_Place(must_exist=True))
@click.argument("root", type=_Place(must_exist=False))
@_step
@_trusted
@step_dir_option
@json_option
def import_command(file: Path, root: Path, step: int | None, names: StepNames, *, trusted: bool, as_json: bool) -> None:
    """Save the content of a FILE as a step of ROOT.

    FILE is of torch.save or safetensors, or the index of several. No code of it is run without --trusted.
    """
    _to_step(file, root, names, step=step, trusted=trusted, as_json=as_json)


@click.command("convert", epilog=example("aio-ckpt convert pytorch_model.bin model.safetensors"))
@click.argument("source", type=_Place(must_exist=True))
@click.argument("out", type=_Place(must_exist=False))
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
    suffixes = tuple(suffix for found in _SUFFIXES.values() for suffix in found)
    if out.name.endswith(suffixes):
        if step is not None:
            raise ConfigError(f"--step is for a root, and {out.name} is a file: leave it away")
        _to_file(source, out, names, trusted=trusted, as_json=as_json, **options)
    elif close := difflib.get_close_matches(out.suffix.lower(), suffixes, n=1, cutoff=0.85):
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
    import torch

    from aio_ckpt.cli.work.conversions import FileOptions, convert_to_file

    cast = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise ConfigError(f"--dtype {dtype}: no such floating-point dtype in torch: give one such as bfloat16")
    is_safe = out.name.endswith(_SUFFIXES["safetensors"])
    if not is_safe and (dtype is not None or max_shard_bytes is not None):
        raise ConfigError(f"--dtype and --max-shard-bytes are for .safetensors files, and {out.name} is none")
    screen = Screen(as_json=as_json)
    options = FileOptions(branch=branch, max_shard_bytes=max_shard_bytes, dtype=cast, trusted=trusted)
    with bytes_progress(screen, "read") as on_progress:
        converted = convert_to_file(source, out, names, options, on_progress=on_progress)
    _tell(screen, converted, as_json=as_json)


def _to_step(source: Path, root: Path, names: StepNames, *, step: int | None, trusted: bool, as_json: bool) -> None:
    from aio_ckpt.cli.work.conversions import convert_to_step

    screen = Screen(as_json=as_json)
    with bytes_progress(screen, "read") as on_progress:
        converted = convert_to_step(source, root, names, step=step, trusted=trusted, on_progress=on_progress)
    _tell(screen, converted, as_json=as_json)


def _tell(screen: Screen, converted: Converted, *, as_json: bool) -> None:
    if as_json:
        screen.json(converted)
    else:
        screen.line(f"{amount(converted.nbytes)} of tensors, {printable(converted.path)}", style="green")
