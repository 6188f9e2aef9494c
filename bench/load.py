"""``python -m bench.load``: cold, verified loads into live tensors beside plain reads and the rivals."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common.limits import PlainRead, pack
from bench.common.measure import Contender, beside, interleave
from bench.common.options import Options, log, parse, work_folder
from bench.common.results import Goal, Report, Row, make_row, publish
from bench.common.rivals import check_equal, filled_by, loaders
from bench.common.states import SHAPES, Shape

__all__ = ["bench_shape", "goals", "main"]


def main() -> None:
    """Run the bench."""
    options = parse("load", __doc__ or "")
    shapes: dict[str, Sequence[Row]] = {}
    reached: list[Goal] = []
    with work_folder(options) as folder:
        for name in options.shapes:
            title, rows = bench_shape(SHAPES[name], folder / name, options)
            shapes[title] = rows
            reached += goals(SHAPES[name], {row.name: row for row in rows})
    report = Report(bench="load", settings=options.settings(), shapes=shapes, goals=reached)
    path = publish(report, options.folder, out=options.out)
    log(f"wrote {path}")


def bench_shape(shape: Shape, folder: Path, options: Options) -> tuple[str, list[Row]]:
    """Title and rows of one shape. Every contender's result is compared with what was saved."""
    state = shape.make(options.sizes, options.device)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    title = f"{shape.name}: {len(state)} tensors, {nbytes / 1e6:.1f} MB"
    log(title)
    chosen = loaders(state, folder, options.config, options.only)
    targets = [tensor for tensor in filled_by(chosen).values() if tensor.device.type == "cpu"]
    limit = PlainRead(pack(state), folder / "plain", targets)
    contenders: list[Contender] = [limit, *chosen]
    try:
        first, samples = interleave(contenders, options.rounds, log=log)
        for contender in chosen:
            check_equal(contender)
        rows = []
        for contender in contenders:
            felt = beside(contender, options.beside) if contender.is_async and options.beside else None
            name = contender.name
            rows.append(make_row(contender, first[name], samples[name], samples[limit.name], nbytes, felt))
    finally:
        for contender in contenders:
            contender.close()
        shutil.rmtree(folder)
    return title, rows


def goals(shape: Shape, rows: Mapping[str, Row]) -> list[Goal]:
    """What was promised for a shape, from its rows."""
    engine = rows.get("aio_ckpt")
    if engine is None:
        return []
    if shape.name != "small":
        return [Goal(text=f"{shape.name}: load / plain O_DIRECT preadv", figure=engine.ratio, bound=1.25)]
    if "dcp.load" not in rows:
        return []
    faster = rows["dcp.load"].total.median / engine.total.median
    return [Goal(text="small: times faster than dcp.load", figure=faster, bound=30.0, is_floor=True)]


if __name__ == "__main__":
    main()
