"""``python -m aio_ckpt``: the command line."""

from __future__ import annotations

from aio_ckpt.cli.commands import main

if __name__ == "__main__":
    main()
