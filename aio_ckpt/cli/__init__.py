"""The command line, ``aio-ckpt`` and ``python -m aio_ckpt``. In: arguments. Out: lines on the console, an exit code.

``commands`` is the group, with errors and exit codes. ``arguments``, ``console`` and ``texts`` are shared.
A module whose name ends in -ing holds a few commands: options, work and output:

- ``listing``: ls, du
- ``inspecting``: inspect
- ``verifying``: verify
- ``comparing``: diff
- ``changing``: protect, unprotect, rm, prune, rollback
- ``copying``: cp
- ``converting``: export, import, convert
- ``rescuing``: rescue
- ``probing``: probe
- ``demonstrating``: demo

Such a module imports what takes long inside of its functions, because torch takes seconds to import: ``--help`` and the
completion of a shell import little but click, and ``ls`` and ``du`` import no torch. Three modules are imported there
as a whole: ``access`` (a loop, the newest checkpoint, the lock), ``root_rows`` (a root, for ls, du and prune), and
``sources`` (what a conversion reads). Imports everything below.
"""
