"""``python -m bench.live``: resume a GPT-2 under AdamW in live objects, beside a dict and the rivals, warm and cold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt import SyncCheckpointEngine
from bench.common.measure import DONE, Contender, Waitable, interleave
from bench.common.options import Options, log, parse, work_folder
from bench.common.pagecache import fsync_tree, make_cold
from bench.common.results import Goal, Report, Row, make_row, publish
from bench.common.states import gpt

__all__ = ["bench_live", "goals", "main"]

DICT, OBJECTS, NEW = "aio_ckpt, dict", "aio_ckpt, objects", "aio_ckpt, new optimizer"
TORCH, DCP = "torch.load", "dcp.load"
SEED = 1


def main() -> None:
    """Run the bench."""
    options = parse("live", __doc__ or "")
    with work_folder(options) as folder:
        shapes = bench_live(folder, options)
    report = Report(bench="live", settings=options.settings(), shapes=shapes, goals=goals(shapes))
    path = publish(report, options.folder, out=options.out)
    log(f"wrote {path}")


class Training:
    """A model with its optimizer, and ways to load them."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(SEED)
        shapes = {name: tensor for name, tensor in gpt(options.sizes, options.device).items() if "optim." not in name}
        named = {name.replace(".", "_"): torch.nn.Parameter(tensor) for name, tensor in shapes.items()}
        self.model = torch.nn.ParameterDict(named)
        self.optimizer = self.new_optimizer()
        for parameter in self.model.values():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def new_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the model, not stepped yet."""
        return torch.optim.AdamW(self.model.parameters())

    def objects(self) -> dict[str, Any]:
        """The state as users pass it."""
        return {"model": self.model, "optimizer": self.optimizer, "step": 100}

    def dicts(self) -> dict[str, Any]:
        """The state as plain dicts over the same tensors."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 100}

    def take(self, state: Mapping[str, Any]) -> None:
        """Call every ``load_state_dict``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tensors(self) -> list[torch.Tensor]:
        """All that is loaded."""
        states = self.optimizer.state.values()
        return [*self.model.parameters(), *(tensor for state in states for tensor in state.values())]


class Load(Contender):
    """One way to resume, from files that are in the page cache (warm) or not."""

    durability = "-"

    def __init__(self, name: str, training: Training, folder: Path, load: Callable[[], object], *, cold: bool) -> None:
        self.name, self.is_cold = f"{name}, {'cold' if cold else 'warm'}", cold
        self.training, self.folder, self.load = training, folder, load

    def before(self) -> None:
        """Drop the files from the page cache, or read them into it; break every value."""
        if self.is_cold:
            make_cold(self.folder)
        else:
            for path in filter(Path.is_file, self.folder.rglob("*")):
                with path.open("rb", buffering=1 << 24) as file:
                    while file.read(1 << 24):
                        pass
        with torch.no_grad():
            for tensor in self.training.tensors():
                tensor.zero_()

    def start(self) -> Waitable:
        """Load."""
        self.load()
        return DONE


def bench_live(folder: Path, options: Options) -> dict[str, list[Row]]:
    """Rows by title, warm and cold. Every load is compared with what was saved."""
    training = Training(options)
    wanted = [tensor.detach().clone() for tensor in training.tensors()]
    nbytes = sum(tensor.nbytes for tensor in wanted)
    engine = SyncCheckpointEngine(folder / "engine", options.config)
    torch_file, stock = folder / "torch" / "state.pt", folder / "stock"
    torch_file.parent.mkdir()
    engine.save(training.objects()).result()
    torch.save(training.dicts(), torch_file)
    dcp_save(training.dicts(), checkpoint_id=stock, no_dist=True)
    fsync_tree(folder)

    def by_dict() -> None:
        state = training.dicts()
        engine.load(state)
        training.take(state)

    def into_new_optimizer() -> None:
        training.optimizer = training.new_optimizer()
        engine.load(training.objects())

    def by_stock() -> None:
        state = training.dicts()
        dcp_load(state, checkpoint_id=stock, no_dist=True)
        training.take(state)

    ways: dict[str, tuple[Path, Callable[[], object]]] = {
        DICT: (folder / "engine", by_dict),
        OBJECTS: (folder / "engine", lambda: engine.load(training.objects())),
        NEW: (folder / "engine", into_new_optimizer),
        TORCH: (torch_file.parent, lambda: training.take(torch.load(torch_file, weights_only=True))),
        DCP: (stock, by_stock),
    }
    shapes = {}
    with engine:
        for cold in (False, True):
            contenders = [Load(name, training, where, load, cold=cold) for name, (where, load) in ways.items()]
            first, samples = interleave(contenders, options.rounds, log=log)
            for contender in contenders:
                contender.before()
                contender.start()
                if not all(map(torch.equal, training.tensors(), wanted)):
                    raise AssertionError(f"{contender.name}: what was loaded is not what was saved")
            limits = samples[contenders[0].name]
            shapes[f"{'cold' if cold else 'warm'}: {len(wanted)} tensors, {nbytes / 1e6:.1f} MB"] = [
                make_row(contender, first[contender.name], samples[contender.name], limits, nbytes, None)
                for contender in contenders
            ]
    return shapes


def goals(shapes: Mapping[str, list[Row]]) -> list[Goal]:
    """What was promised: as fast as by way of a dict, faster than torch.load."""
    found = []
    for rows in shapes.values():
        by_name = {row.name.rpartition(", ")[0]: row for row in rows}
        when = rows[0].name.rpartition(", ")[2]
        objects, torch_load = by_name[OBJECTS], by_name[TORCH]
        found.append(Goal(text=f"{when}: objects / dict + load_state_dict", figure=objects.ratio, bound=1.1))
        for name in (OBJECTS, NEW):
            figure = by_name[name].total.median / torch_load.total.median
            found.append(Goal(text=f"{when}: {name} / torch.load + load_state_dict", figure=figure, bound=1.0))
    return found


if __name__ == "__main__":
    main()
