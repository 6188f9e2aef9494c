"""``python -m bench.save``: durable saves beside plain writes and what a user would pick instead."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common.limits import MemoryCopy, PlainWrite, SequentialWrite, pack
from bench.common.measure import Contender, Sample, beside, interleave
from bench.common.options import Options, log, parse, work_folder
from bench.common.results import Goal, Report, Row, make_row, publish
from bench.common.rivals import process_group, savers
from bench.common.states import SHAPES, Shape

__all__ = ["bench_shape", "goals", "main"]


def main() -> None:
    """Run the bench."""
    options = parse("save", __doc__ or "")
    shapes: dict[str, Sequence[Row]] = {}
    reached: list[Goal] = []
    with work_folder(options) as folder, process_group():
        for name in options.shapes:
            title, rows = bench_shape(SHAPES[name], folder / name, options)
            shapes[title] = rows
            reached += goals(SHAPES[name], {row.name: row for row in rows})
    report = Report(bench="save", settings=options.settings(), shapes=shapes, goals=reached)
    path = publish(report, options.folder, out=options.out)
    log(f"wrote {path}")


def bench_shape(shape: Shape, folder: Path, options: Options) -> tuple[str, list[Row]]:
    """Title and rows of one shape."""
    state = shape.make(options.sizes, options.device)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    title = f"{shape.name}: {len(state)} tensors, {nbytes / 1e6:.1f} MB"
    log(title)
    packed = pack(state)
    limits: list[Contender] = [PlainWrite(packed, folder / "plain"), SequentialWrite(packed, folder / "sequential")]
    rivals = savers(state, folder, options.config)
    chosen = [rival for rival in rivals if not options.only or rival.name in options.only]
    contenders = [*limits, MemoryCopy(state), *chosen]
    try:
        first, samples = interleave(contenders, options.rounds, log=log)
        rows = [_row(contender, first, samples, shape, nbytes, options) for contender in contenders]
    finally:
        for contender in (*limits, *rivals):
            contender.close()
        shutil.rmtree(folder)
    return title, rows


def _row(
    contender: Contender,
    first: Mapping[str, Sample],
    samples: Mapping[str, Sequence[Sample]],
    shape: Shape,
    nbytes: int,
    options: Options,
) -> Row:
    felt = None
    if contender.is_async and options.beside:
        log(f"    beside {contender.name}")
        felt = beside(contender, options.beside)
    name = contender.name
    return make_row(contender, first[name], samples[name], samples[shape.limit], nbytes, felt)


def goals(shape: Shape, rows: Mapping[str, Row]) -> list[Goal]:
    """What was promised for a shape, from its rows."""
    engine = rows.get("aio_ckpt")
    if engine is None:
        return []
    found: list[Goal] = []
    if shape.name == "small":
        found.append(Goal(text="small: save / one plain write + fsync", figure=engine.ratio, bound=2.0))
        if "dcp.save" in rows:
            faster = rows["dcp.save"].total.median / engine.total.median
            found.append(Goal(text="small: times faster than dcp.save", figure=faster, bound=25.0, is_floor=True))
    else:
        found.append(Goal(text=f"{shape.name}: durable save / plain O_DIRECT", figure=engine.ratio, bound=1.10))
        beyond = engine.cpu_secs_per_gb - rows["memory copy alone"].cpu_secs_per_gb
        text = f"{shape.name}: CPU beyond the capture's copy, checksums included"
        found.append(Goal(text=text, figure=beyond, bound=0.15, unit="CPU-s/GB"))
    if (felt := engine.beside) is not None:
        name = shape.name
        p99, worst = felt.lag_p99_secs * 1e3, felt.lag_max_after_call_secs * 1e3
        found += [
            Goal(text=f"{name}: ticker p99, save() included", figure=p99, bound=5.0, unit="ms"),
            Goal(text=f"{name}: ticker max, after save() returned", figure=worst, bound=50.0, unit="ms"),
            Goal(
                text=f"{name}: ticker max, save() included (it copies host state)",
                figure=felt.lag_max_secs * 1e3,
                bound=50.0,
                unit="ms",
            ),
            Goal(
                text=f"{name}: Python loop keeps of its rate",
                figure=felt.python_rate.median * 100,
                bound=85.0,
                unit="%",
                is_floor=True,
            ),
        ]
    return found


if __name__ == "__main__":
    main()
