"""The command's work: which campaigns, how many crashes, and what came of them."""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.campaigns.common import RESULTS, log
from tests.campaigns.crash.contenders import ENGINE, TRUSTED, Contender
from tests.campaigns.crash.directory import DIRECTORY
from tests.campaigns.crash.disks import EXT4, FILE_SYSTEMS, private_mounts, unmount_below, why_no_disks
from tests.campaigns.crash.forks import Child, Tell, adopt_orphans, fork, wait_for_orphans
from tests.campaigns.crash.fuse_disk import why_no_fuse
from tests.campaigns.crash.kills import named_points, points_campaign, random_campaign
from tests.campaigns.crash.paths import FILES, MODELS, PATHS
from tests.campaigns.crash.power import block_log_campaign, shutdown_campaign
from tests.campaigns.crash.summary import Summary, publish
from tests.campaigns.crash.trial import Tally

__all__ = ["crash", "main", "parse"]

OURS = (ENGINE, TRUSTED, DIRECTORY, PATHS, FILES, MODELS)
KINDS = ("kill", "shutdown", "blocklog")
KILLS_PER_POINT = 50
RANDOM_KILLS = 300
NAMED_SHARE = 0.7
"""Of the kills with ``--kills``; the others come at random instants."""
SHUTDOWN_TRIALS = 20
REORDERINGS = 300
MEMORY_FOLDER = Path("/dev/shm")
"""Images lie in memory where there is this folder: hundreds of them are written whole."""

Campaign = Callable[[Path], Iterator[Tally]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command line."""

    folder: Path
    """Where trainers are killed."""
    images: Path
    """Where images of disks go."""
    kills: int | None
    """Kills in all; None: 50 at each named point, and random ones."""
    trials: int
    """Shutdowns of each way."""
    samples: int
    """Reorderings of the block log."""
    secs: float | None
    """Limit for all campaigns together; each gets an even share of what is left."""
    only: tuple[str, ...]
    """Kinds of campaigns."""
    contenders: Sequence[Contender]
    """Ways to save that are crashed."""
    jobs: int
    """Campaigns at once."""
    seed: int
    """Of everything that is drawn."""
    out: Path | None
    """Where the JSON goes; None: nowhere."""


def parse(command: str, contenders: Sequence[Contender], results: Callable[[Path], Path]) -> Options:
    """Parse ``sys.argv``. ``results`` returns where the figures of a folder are kept with ``--write``."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}", description="Crash points tried and survived.")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where trainers are killed")
    parser.add_argument("--images", type=Path, help="where images of disks go (default: in memory)")
    parser.add_argument("--kills", type=int, help="kills in all (default: 50 at each point, and more)")
    parser.add_argument("--trials", type=int, default=SHUTDOWN_TRIALS, help="shutdowns of each way")
    parser.add_argument("--samples", type=int, default=REORDERINGS, help="reorderings of the block log")
    parser.add_argument("--secs", type=float, help="stop by then: each campaign gets an even share of what is left")
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {','.join(KINDS)}")
    named = {_name(contender): contender for contender in contenders}
    parser.add_argument("--contenders", default=",".join(named), help=f"of {','.join(named)}")
    parser.add_argument("--jobs", type=int, default=2, help="campaigns at once: mostly they wait for the disk")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--out", type=Path, help="folder of the JSON")
    parser.add_argument("--write", action="store_true", help="keep the JSON among the results")
    given = parser.parse_args()
    only = tuple(given.only.split(","))
    if set(only) - set(KINDS):
        parser.error(f"no such campaigns: {', '.join(sorted(set(only) - set(KINDS)))}")
    chosen = given.contenders.split(",")
    if set(chosen) - set(named):
        parser.error(f"no such contenders: {', '.join(sorted(set(chosen) - set(named)))}")
    return Options(
        folder=given.dir.absolute(),
        images=(given.images or (MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else given.dir)).absolute(),
        kills=given.kills,
        trials=given.trials,
        samples=given.samples,
        secs=given.secs,
        only=only,
        contenders=[named[name] for name in chosen],
        jobs=given.jobs,
        seed=given.seed,
        out=given.out or (results(given.dir.absolute()) if given.write else None),
    )


def _name(contender: Contender) -> str:
    """Without spaces and commas, for the command line."""
    return contender.name.replace(", ", ":").replace(" + ", "+").replace(" ", "-")


def main() -> None:
    """Run the campaigns of this engine; exit code 1 if it did not survive every crash, or there was none."""
    options = parse("tests.campaigns.crash", OURS, lambda _: RESULTS)
    summary = crash(options)
    publish(summary, options.folder, out=options.out)
    sys.exit(0 if summary.is_survived else 1)


def crash(options: Options) -> Summary:
    """Run the campaigns and remove what they left."""
    logging.getLogger("aio_ckpt").setLevel(logging.ERROR)
    adopt_orphans()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="aio_ckpt-crash-", dir=options.folder))
    images = Path(tempfile.mkdtemp(prefix="aio_ckpt-crash-", dir=options.images))
    try:
        skipped: list[str] = []
        campaigns = [*(_kills(options, folder)), *(_power(options, images, skipped))]
        tallies, failures = _run(campaigns, jobs=options.jobs, secs=options.secs)
    finally:
        unmount_below(images)
        shutil.rmtree(images, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    return Summary(
        settings={"seed": options.seed, "secs": round(time.monotonic() - started), "only": ",".join(options.only)},
        tallies=tallies,
        skipped=skipped,
        failures=failures,
    )


def _kills(options: Options, folder: Path) -> Iterator[tuple[Campaign, Path]]:
    if "kill" not in options.only:
        return
    counts = {
        contender: len(named_points(contender, folder / contender.name / "rehearsal"))
        for contender in options.contenders
    }
    for contender, count in counts.items():
        named, at_random = KILLS_PER_POINT * count, RANDOM_KILLS
        if options.kills is not None:
            named = round(options.kills * NAMED_SHARE * count / max(sum(counts.values()), 1))
            at_random = round(options.kills * (1 - NAMED_SHARE) / len(counts))
        where = folder / contender.name
        yield partial(points_campaign, contender, kills=named, seed=options.seed), where / "points"
        yield partial(random_campaign, contender, kills=at_random, seed=options.seed), where / "random"


def _power(options: Options, images: Path, skipped: list[str]) -> Iterator[tuple[Campaign, Path]]:
    kinds = [kind for kind in ("shutdown", "blocklog") if kind in options.only]
    if not kinds:
        return
    try:
        private_mounts()
    except OSError as error:
        skipped.append(f"{', '.join(kinds)}: {error}")
        return
    reasons = {kind: why_no_disks(kind, images) for kind in FILE_SYSTEMS}
    skipped += [f"{kind.name}: {reason}" for kind, reason in reasons.items() if reason is not None]
    usable = [kind for kind, reason in reasons.items() if reason is None]
    if "shutdown" in kinds:
        for contender in options.contenders:
            for kind in usable:
                for flags in (0, 1, 2):
                    for at_random in (False, True):
                        campaign = partial(
                            shutdown_campaign,
                            contender,
                            kind,
                            flags=flags,
                            at_random=at_random,
                            trials=options.trials,
                            seed=options.seed,
                        )
                        yield campaign, images / contender.name / f"{kind.name}-{flags}-{at_random}"
    if "blocklog" in kinds and EXT4 in usable:
        reason = why_no_fuse(images)
        if reason is not None:
            skipped.append(f"blocklog: {reason}")
            return
        for contender in options.contenders:
            campaign = partial(block_log_campaign, contender, samples=options.samples, seed=options.seed)
            yield campaign, images / contender.name / "log"


def _run(campaigns: Sequence[tuple[Campaign, Path]], *, jobs: int, secs: float | None) -> tuple[list[Tally], list[str]]:
    """Each campaign in a process of its own, ``jobs`` at once; the tallies in the order of the campaigns, and how
    campaigns failed, of which no figure counts.

    With a limit each gets an even share of the time that is left.
    """
    end = None if secs is None else time.monotonic() + secs
    waiting, running = list(enumerate(campaigns)), dict[int, Child]()
    tallies: dict[int, list[Tally]] = {}
    failures: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                rounds = math.ceil(len(waiting) / jobs)
                share = None if end is None else (end - time.monotonic()) / rounds
                number, (campaign, folder) = waiting.pop(0)
                log(f"campaign {number + 1} of {len(campaigns)} begins")
                running[number] = fork(partial(_one, campaign, folder, share))
            for number, child in list(running.items()):
                if not child.listen(1.0 / len(running)):
                    tallies[number] = list(_heard(running.pop(number), failures))
    finally:  # after a failure, or Ctrl-C: their trainers end with them
        for child in running.values():
            child.kill()
            child.wait()
        wait_for_orphans()
    return [tally for number in sorted(tallies) for tally in tallies[number]], failures


def _one(campaign: Campaign, folder: Path, secs: float | None, tell: Tell) -> None:
    """One campaign, until it ends or its time is up."""
    folder.parent.mkdir(exist_ok=True)
    begun, tallies = time.monotonic(), dict[str, Tally]()
    for tally in campaign(folder):
        tallies[tally.campaign] = tally
        if secs is not None and time.monotonic() - begun > secs:
            break
    for tally in tallies.values():
        tell(json.dumps(asdict(tally)))
    shutil.rmtree(folder, ignore_errors=True)


def _heard(child: Child, failures: list[str]) -> Iterator[Tally]:
    """The tallies of a campaign that has ended."""
    if child.wait() != 0:
        failures += child.lines[-1:] or ["failed: without a word"]
        log(failures[-1])
        return
    for line in child.lines:
        tally = Tally(**json.loads(line))
        log(f"{tally.contender}: {tally.campaign}: {tally.survived} of {tally.tried}")
        yield tally
