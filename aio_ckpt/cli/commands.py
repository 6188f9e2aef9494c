"""``aio-ckpt``: the group of all commands, and how each ends.

Exit codes: 0 all is well, 1 faults or differences were found or the command failed, 2 it was called the wrong way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from aio_ckpt._version import __version__
from aio_ckpt.cli.changing import protect_command, prune_command, rm_command, rollback_command, unprotect_command
from aio_ckpt.cli.comparing import diff_command
from aio_ckpt.cli.converting import convert_command, export_command, import_command
from aio_ckpt.cli.copying import cp_command
from aio_ckpt.cli.demonstrating import demo_command
from aio_ckpt.cli.inspecting import inspect_command
from aio_ckpt.cli.listing import du_command, ls_command
from aio_ckpt.cli.probing import probe_command
from aio_ckpt.cli.rescuing import rescue_command
from aio_ckpt.cli.texts import printable
from aio_ckpt.cli.verifying import verify_command
from aio_ckpt.errors import AioCkptError, ConfigError


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is one line on standard error."""
    try:
        code = commands.main(list(arguments) or ["--help"], prog_name="aio-ckpt", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        example = error.ctx.command.epilog if error.ctx else None
        message = error.format_message()
        return _complain(f"{message}{'' if message.endswith(('.', '?')) else '.'} {example or ''}", error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except click.Abort:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader (head, less) has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ConfigError as error:
        return _complain(str(error), 2)
    except (AioCkptError, OSError) as error:
        return _complain(_words(error), 1)
    except MemoryError as error:
        return _complain(f"this machine lacks the memory for it: {error}".removesuffix(": "), 1)
    return code if isinstance(code, int) else 0


def _words(error: Exception) -> str:
    """Return the message of an error; of one of the operating system without its number, and with a way out."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    from aio_ckpt.storage.os_errors import with_remedy  # here: --help must not import anyio

    text = with_remedy(error, writes=False)
    return f"{error.filename}: {text}" if error.filename else text


def _complain(message: str, code: int) -> int:
    print(f"aio-ckpt: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


class _InOrder(click.Group):
    """Group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: aio-ckpt ls runs/ckpt. A ROOT is the directory that an engine saves into, a PATH is one of its "
    "checkpoints, or a root for its newest.",
)
@click.version_option(__version__, message="aio-ckpt %(version)s")
def commands() -> None:
    """List, check, compare, copy, convert and delete checkpoints; see the engine at work."""


for _command in (
    ls_command,
    du_command,
    inspect_command,
    verify_command,
    diff_command,
    cp_command,
    export_command,
    import_command,
    convert_command,
    protect_command,
    unprotect_command,
    rm_command,
    prune_command,
    rollback_command,
    rescue_command,
    probe_command,
    demo_command,
):
    commands.add_command(_command)
