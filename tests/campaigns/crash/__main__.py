"""``python -m tests.campaigns.crash``."""

from __future__ import annotations

import os

__all__ = ["main"]


def main() -> None:
    """Run the campaigns."""
    # Every trainer is forked from this process, which must have one thread: OpenBLAS starts more at its import.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    from tests.campaigns.crash import command

    command.main()


if __name__ == "__main__":
    main()
