"""Arguments and options that several commands have, and their checks. A mistyped path fails by its name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import click

from aio_ckpt.argument_checks import check_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, save_of_root_manifest
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line
from aio_ckpt.remote_path import RemotePath, check_place


class MistypedPathError(AioCkptError, ValueError):
    """The path is not what the command needs. Names the path, and what it is."""


class Directory(click.Path):
    """Directory that exists, as an absolute path. The shell completes it."""

    name = "directory"

    def __init__(
        self, *, must_exist: bool = True, may_be_remote: bool = False, of_a_file: str = "give a directory"
    ) -> None:
        """``of_a_file``: remedy if a file is given."""
        super().__init__(file_okay=False)
        self._must_exist, self._of_a_file = must_exist, of_a_file
        self._check = check_place if may_be_remote else check_path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Whether a place in an object store exists shows when it is read.

        Raises:
            MistypedPathError: it is a URL that is not taken here, a file, or does not exist.
        """
        del ctx
        try:
            path = self._check(param.human_readable_name if param else "path", value)
        except ConfigError as error:
            raise MistypedPathError(str(error)) from error
        if isinstance(path, RemotePath) or path.is_dir():
            return path
        if path.exists():
            raise MistypedPathError(f"{value}: is a file: {self._of_a_file}")
        if self._must_exist:
            raise MistypedPathError(f"{value}: no such directory{_suggestion(path)}")
        return path


def _suggestion(path: Path) -> str:
    try:
        siblings = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f": did you mean {path.parent / close[0]}?" if close else ""


def check_root(path: Path, names: StepNames) -> None:
    """Check that ``path`` is a root: it holds a step, or the directory of an engine. Creates nothing.

    Raises:
        MistypedPathError: it is a checkpoint, is empty, or holds other things.
    """
    from aio_ckpt.cli.access import call, hint_below

    if isinstance(path, RemotePath):
        from aio_ckpt.storage.local import names_in

        entries = call(lambda storage, _: names_in(storage, path))
    else:
        entries = os.listdir(path)
    if ENGINE_DIR in entries or any(names.step(name) is not None for name in entries):
        return
    if METADATA_FILE in entries or any(map(save_of_root_manifest, entries)):
        raise MistypedPathError(
            f"{path} is a checkpoint, no root: {command_line('inspect', path)} shows it, "
            f"{command_line('ls', path.parent)} lists it"
        )
    what = "holds no step and nothing of an engine" if entries else "is empty"
    hint = call(lambda storage, _: hint_below(storage, path)) or ": give the directory that an engine saves into"
    raise MistypedPathError(f"{path} {what}{hint}")


root_argument = click.argument("root", type=Directory(may_be_remote=True))
"""The argument ROOT, a directory of this host or a place in an object store."""
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
step_dir_option = click.option(
    "--step-dir",
    "names",
    default=EngineConfig().step_dir,
    show_default=True,
    callback=lambda _, __, value: StepNames(EngineConfig(step_dir=value).step_dir),
    metavar="NAME",
    help="Name of the checkpoints' directories, as in EngineConfig.",
)
