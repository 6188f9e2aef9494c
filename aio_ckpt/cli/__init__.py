"""The command line, ``aio-ckpt`` and ``python -m aio_ckpt``. In: arguments. Out: lines on the console, an exit code.

``commands`` is the group, with errors and exit codes. A module whose name ends in -ing defines the options of a few
commands and prints; the modules beside it do their work:

- ``listing``: ls, du (``root_table``, ``quick_check``)
- ``inspecting``: inspect (``contents``)
- ``verifying``: verify
- ``comparing``: diff (``differences``)
- ``changing``: protect, unprotect, rm, prune, rollback (``root_changes``)
- ``copying``: cp (``copies``)
- ``rescuing``: rescue, recover
- ``demonstrating``: demo

A module ending in -ing imports its work inside of the command, because torch takes seconds to import: ``--help`` and
the completion of a shell import little but click, and ``ls`` and ``du`` import no torch. Imports everything below.
"""

from aio_ckpt.cli.commands import main

__all__ = ["main"]
