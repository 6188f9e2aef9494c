"""The command line, ``aio-ckpt`` and ``python -m aio_ckpt``: list, inspect, verify, protect, rescue, demo.

In: arguments. Out: lines on the console and an exit code. ``listing`` makes the titles and rows of the tables;
``commands`` holds commands and options, and prints. Imports everything below.
"""

from aio_ckpt.cli.commands import main

__all__ = ["main"]
