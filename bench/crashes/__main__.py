"""``python -m bench.crashes``."""

from __future__ import annotations

import os

__all__ = ["main"]


def main() -> None:
    """Crash the rivals and print what they lost."""
    # Every trainer is forked from this process, which must have one thread: OpenBLAS starts more at its import.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    from bench.common.results import kept_in
    from bench.crashes.rivals import RIVALS
    from tests.campaigns.crash.command import crash, parse
    from tests.campaigns.crash.summary import publish

    options = parse("bench.crashes", RIVALS, kept_in)
    publish(crash(options), options.folder, out=options.out)


if __name__ == "__main__":
    main()
