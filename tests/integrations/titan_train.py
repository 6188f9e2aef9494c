"""``torchtitan.train``, with what this machine may lack and no test uses: a logger, data sets, a newer torch."""

from __future__ import annotations

import importlib.util
import sys

import torch.distributed

from tests.support.megatron_stubs import UnusedModule


def stub_unused() -> None:
    """Let torchtitan import what it does not need here."""
    for needed, name in (("tensorboard", "torch.utils.tensorboard"), ("datasets", "datasets")):
        if needed not in sys.modules and importlib.util.find_spec(needed) is None:
            for module in (needed, name, f"{name}.distributed"):
                sys.modules[module] = UnusedModule(module)
    if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 lacks it, and torchtitan 0.3 calls it
        torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]


def main() -> None:
    """Train as the command line says."""
    stub_unused()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
