"""One fuzzer in a process: ``python -m tests.campaigns.fuzz.child TARGET SEEDS [libFuzzer options] CORPUS``."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris
import torch.distributed.checkpoint  # noqa: F401 - before the instrumentation, which would take minutes over torch

# Instrumented on import: which lines an input reaches is what guides the fuzzer.
with atheris.instrument_imports(include=["aio_ckpt", "tests.campaigns.fuzz"]):
    from tests.campaigns.fuzz.targets import TARGETS, feed

__all__ = ["main"]


def main() -> None:
    """Write the seeds to the corpus, then fuzz until libFuzzer's options say stop."""
    target, folder = sys.argv[1], Path(sys.argv[2])
    corpus = Path(sys.argv[-1])
    for number, seed in enumerate(TARGETS[target].seeds(folder)):
        (corpus / f"seed-{number}").write_bytes(seed)

    def test_one(data: bytes) -> None:
        feed(target, data)

    atheris.Setup([sys.argv[0], *sys.argv[3:]], test_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
