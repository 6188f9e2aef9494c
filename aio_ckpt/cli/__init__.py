"""The command line, ``aio-ckpt`` and ``python -m aio_ckpt``. In: arguments. Out: lines on the console, an exit code.

``commands`` is the group, with errors and exit codes. ``arguments``, ``advice`` and ``console`` are shared.
A module whose name ends in -ing defines the options of a few commands and prints; ``work`` holds what they do:

- ``listing``: ls, du
- ``inspecting``: inspect
- ``verifying``: verify
- ``comparing``: diff
- ``changing``: protect, unprotect, rm, prune, rollback
- ``copying``: cp
- ``converting``: export, import, convert
- ``rescuing``: rescue, recover
- ``demonstrating``: demo

A module ending in -ing imports its work inside of the command, because torch takes seconds to import: ``--help`` and
the completion of a shell import little but click, and ``ls`` and ``du`` import no torch. Imports everything below.
"""

from aio_ckpt.cli.commands import main

__all__ = ["main"]
