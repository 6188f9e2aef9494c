"""``python -m tests.campaigns.simulation``: thousands of simulated runs; any failure replays by its seed."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.campaigns.common import log
from tests.campaigns.simulation.hosts import simulate_a_reader, simulate_a_takeover
from tests.campaigns.simulation.runs import simulate


def main() -> None:
    """Run; exit code 1 if anything that must hold did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=5_000, help="runs of one writer; of two hosts a tenth")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seed", type=int, help="only this one, with everything that it did")
    options = parser.parse_args()
    logging.getLogger("aio_ckpt").setLevel(logging.CRITICAL)
    if options.seed is not None:
        run = simulate(options.seed)
        log("\n".join([*run.trace, f"seed {run.seed}: {', '.join(run.outcomes)}; {run.losses} power losses"]))
        return
    seeds = range(options.first, options.first + options.runs)
    few = range(options.first, options.first + options.runs // 10)
    failures = 0
    for title, seeds_of_kind, count in (
        ("a writer", seeds, _count_outcomes),
        ("a reader on another host", few, _count_loads),
        ("a writer on another host that takes over", few, _count_takeover),
    ):
        failures += _try(title, seeds_of_kind, count)
    log(f"{failures} failed; replay one of a writer by: python -m tests.campaigns.simulation --seed N")
    sys.exit(bool(failures))


def _try(title: str, seeds: range, count: Callable[[int], Counter[str]]) -> int:
    """Run each seed and log what was counted. Returns the number of failed ones."""
    began, failures, counted = time.perf_counter(), 0, Counter[str]()
    for seed in seeds:
        try:
            counted += count(seed)
        except Exception as error:  # noqa: BLE001 - the seeds after it are worth knowing too
            failures += 1
            log(f"{title}, seed {seed}: {deepest(error)!r}")
    log(f"{title}: {len(seeds)} runs, {dict(counted)}, {time.perf_counter() - began:.0f} s")
    return failures


def _count_outcomes(seed: int) -> Counter[str]:
    run = simulate(seed)
    return Counter(run.outcomes) + Counter({"power losses": run.losses})


def _count_loads(seed: int) -> Counter[str]:
    loads, old_answers = simulate_a_reader(seed)
    return Counter({"loads": loads, "old answers": old_answers})


def _count_takeover(seed: int) -> Counter[str]:
    return Counter([simulate_a_takeover(seed)])


def deepest(error: BaseException) -> BaseException:
    """The first error in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
