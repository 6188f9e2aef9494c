"""``python -m aio_ckpt.cli``: the same as ``python -m aio_ckpt``."""

from __future__ import annotations

from aio_ckpt.cli.commands import main

if __name__ == "__main__":
    main()
