"""A rank of as many as saved opens its own part of a checkpoint, and all of it where the template needs more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks, engine_on
from slow import slow
from torch import nn
from warm_python import run_warm

from aio_ckpt import PerRank, Shard
from aio_ckpt.checkpoint import open as opening
from aio_ckpt.errors import MissingNameError, TemplateMismatchError

SECS = 60.0
SCRIPT = Path(__file__).parents[1] / "support" / "many_ranks_script.py"


@pytest.mark.parametrize("ranks", [12, slow(64)])
def test_each_of_many_ranks_opens_at_most_eight_files(tmp_path: Path, ranks: int) -> None:
    """Whatever their number: ranks read one manifest more than their own."""
    run = run_warm(SCRIPT.read_text(), str(tmp_path), str(ranks), options=(), timeout=280)
    assert run.returncode == 0, run.stderr
    opens = json.loads(run.stdout)
    assert opens[".metadata"] == opens["aio_ckpt.N.json"] == ranks
    assert sum(opens.values()) <= 8 * ranks, opens


def rows(rank: int, count: int, value: float) -> Shard:
    return Shard(torch.full((2, 4), value), global_shape=(2 * count, 4), offsets=(2 * rank, 0))


def saved_state(rank: int, count: int) -> dict[str, Any]:
    """``large`` is written by rank 0 or 1, the leaves of ``mine`` are held by one rank alone."""
    return {
        "w": rows(rank, count, 1.0 + rank),
        "large": torch.full((100, 400), 7.0),
        "step": 3,
        "mine": {f"of{rank}": torch.full((3,), 10.0 + rank)},
        "own": PerRank(rank),
    }


class Opens:
    """Number of manifests of ranks that each opening of a checkpoint has read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read: list[int] = []
        self.reads_metadata: list[bool] = []
        inner = opening._read_ranks

        async def counted(*arguments: Any) -> Any:
            found = await inner(*arguments)
            self.read.append(len(found))
            return found

        patch.setattr(opening, "_read_ranks", counted)


def in_parts(
    rank: int, count: int, root: Path, template_of: Callable[[int, int], Any], options: dict[str, Any]
) -> tuple[list[int], Any]:
    """Save, load into a template; returns the manifests read by each opening, and the template or the error."""
    with pytest.MonkeyPatch.context() as patch, engine_on(root, SECS) as engine:
        engine.save(saved_state(rank, count), step=1).result(SECS)
        opens, template = Opens(patch), template_of(rank, count)
        try:
            engine.load(template, **options)
        except (MissingNameError, TemplateMismatchError) as error:
            return opens.read, f"{type(error).__name__}: {error}"
    return opens.read, {name: value.tensor if isinstance(value, Shard) else value for name, value in template.items()}


def own_state(rank: int, count: int) -> dict[str, Any]:
    state = saved_state(rank, count)
    return {**state, "w": rows(rank, count, 0.0), "large": torch.zeros(100, 400), "step": 0, "own": PerRank(-1)}


def test_a_resume_of_as_many_ranks_reads_the_manifests_of_its_state(four: Ranks, tmp_path: Path) -> None:
    for rank, (read, state) in enumerate(four.run(in_parts, tmp_path, own_state, {})):
        assert read == [2 if rank else read[0]]
        assert read[0] <= 2, "its own, and that of the rank which wrote what is replicated"
        assert torch.equal(state["w"], torch.full((2, 4), 1.0 + rank))
        assert torch.equal(state["large"], torch.full((100, 400), 7.0))
        assert (state["step"], state["own"]) == (3, PerRank(rank))


def whole_tensor(rank: int, count: int) -> dict[str, Any]:
    return {"w": torch.zeros(2 * count, 4)}


def cut_by_columns(rank: int, count: int) -> dict[str, Any]:
    return {"w": Shard(torch.zeros(2 * count, 1), global_shape=(2 * count, 4), offsets=(0, rank))}


def of_another_rank(rank: int, count: int) -> dict[str, Any]:
    return {"mine": {f"of{(rank + 1) % count}": torch.zeros(3)}}


@pytest.mark.parametrize("template", [whole_tensor, cut_by_columns, of_another_rank])
def test_a_template_that_needs_more_than_the_own_part_gets_it(
    four: Ranks, tmp_path: Path, template: Callable[[int, int], Any]
) -> None:
    of_rows = torch.arange(1.0, 5.0).repeat_interleave(2)
    for rank, (read, state) in enumerate(four.run(in_parts, tmp_path, template, {"strict": False})):
        assert read[-1] == 4
        if template is of_another_rank:
            other = (rank + 1) % 4
            assert torch.equal(state["mine"][f"of{other}"], torch.full((3,), 10.0 + other))
        else:
            columns = 4 if template is whole_tensor else 1
            assert torch.equal(state["w"], of_rows[:, None].expand(8, columns))


def a_part_as_a_whole(rank: int, count: int) -> dict[str, Any]:
    return {"w": torch.zeros(2, 4)}


def unknown_name(rank: int, count: int) -> dict[str, Any]:
    return {"step": 0, "nowhere": torch.zeros(3)}


@pytest.mark.parametrize(
    ("template", "fault"),
    [(a_part_as_a_whole, "has shape (2, 4) in the template and (8, 4)"), (unknown_name, "lacks 1 name: 'nowhere'")],
)
def test_what_does_not_fit_is_refused_as_with_all_of_the_checkpoint_open(
    four: Ranks, tmp_path: Path, template: Callable[[int, int], Any], fault: str
) -> None:
    for _, text in four.run(in_parts, tmp_path, template, {"strict": False}):
        assert fault in text


def none_for_a_branch(rank: int, count: int) -> dict[str, Any]:
    return {"mine": None}


def test_a_name_that_no_rank_has_stays_if_that_is_allowed(four: Ranks, tmp_path: Path) -> None:
    for read, state in four.run(in_parts, tmp_path, unknown_name, {"strict": False, "allow_missing": True}):
        assert read[-1] == 4, "all are asked before a name is missing"
        assert state["step"] == 3
        assert not state["nowhere"].any()


def test_a_branch_that_only_other_ranks_saved_is_found_there(four: Ranks, tmp_path: Path) -> None:
    for rank, (_, state) in enumerate(four.run(in_parts, tmp_path, none_for_a_branch, {"strict": False})):
        assert torch.equal(state["mine"][f"of{rank}"], torch.full((3,), 10.0 + rank))


def assert_equal(found: dict[str, Any], given: dict[str, Any]) -> None:
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def seeded_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Held:
    """A Stateful whose ``state_dict()`` may be empty."""

    def __init__(self, **values: int) -> None:
        self.values = values

    def state_dict(self) -> dict[str, int]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.values = {**state_dict}


def save_parts_on_rank_0(rank: int, count: int, root: Path) -> None:
    """Rank 0 holds the parts ``model`` and ``of_rank0``; the others give ``{}`` there, and a leaf beside."""
    model = seeded_linear()
    whole: dict[str, Any] = {"model": model.state_dict() if rank == 0 else {}, "lr": 0.5}
    optim = {"state": {7: 1.0} if rank == 0 else {}, "n": 1}
    held = {"of_rank0": Held(a=1, b=2) if rank == 0 else Held(), "optim": optim}
    with engine_on(root, SECS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.save(whole | held, step=1).result(SECS)
        opens, fresh, own = Opens(patch), nn.Linear(4, 4), Held(a=8)
        assert engine.load({"model": fresh, "of_rank0": own}, strict=False).missing == ()
        assert opens.read[-1] == (1 if rank == 0 else 2), "its own, and that of rank 0"
        assert_equal(fresh.state_dict(), model.state_dict())
        assert own.values == ({"a": 1, "b": 2} if rank == 0 else {}), "what rank 0 saved is another's"
        for template in ({"model": {}}, {"model": None}, {}):
            engine.load(template, strict=False)
            assert_equal(template["model"], model.state_dict())  # type: ignore[arg-type]
        found = engine.read()
        assert_equal(found["model"], model.state_dict())
        assert found["optim"] == optim, "a part with a leaf is a rank's own"
        assert_equal(engine.read(only="model")["model"], model.state_dict())
        named = whole | {"model": {} if rank else nn.Linear(4, 4).state_dict()}
        engine.load(named | {"of_rank0": own, "optim": {"state": {}, "n": 0}})
        assert_equal(named["model"], model.state_dict())
        few = ({} if rank else named) | {"lr": 0.0, "of_rank0": own, "optim": {"state": {}, "n": 0}}
        engine.load(few, strict=True)  # no rank has to name what it did not save


def stepped(lr: float) -> tuple[nn.Module, torch.optim.Adam]:
    model = seeded_linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def load_live_objects_of_rank_0(rank: int, count: int, root: Path) -> None:
    """Rank 0 alone has saved a module, an optimizer and a Stateful value: as parts, and as the whole state."""
    model, optimizer = stepped(0.5)
    parts: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict(), "held": Held(a=1)}
    others: tuple[dict[str, Any], ...] = ({name: {} for name in parts} | {"lr": 1}, {})
    with engine_on(root, SECS) as engine:
        for step, of_others in enumerate(others, 1):
            engine.save((parts | {"lr": 1}) if rank == 0 else of_others, step=step).result(SECS)
            (fresh, own), held = stepped(0.1), Held(a=8)
            engine.load({"model": fresh, "optim": own, "held": held, "lr": 0})
            assert_equal(fresh.state_dict(), model.state_dict())
            assert (own.param_groups[0]["lr"], len(own.state)) == (0.5, 2)
            assert held.values == ({"a": 1} if rank == 0 or not of_others else {})
            held = Held(a=8)
            engine.load({"kept": held}, rename={"held": "kept"}, strict=False)
            assert held.values == ({"a": 1} if rank == 0 or not of_others else {})


def test_live_objects_take_what_rank_0_alone_saved_for_them(two: Ranks, tmp_path: Path) -> None:
    two.run(load_live_objects_of_rank_0, tmp_path)


def test_a_part_that_rank_0_alone_holds_is_that_of_all_ranks(two: Ranks, tmp_path: Path) -> None:
    """``{"model": get_model_state_dict(...), "step": 3}``: other ranks save an empty dict, and values of theirs."""
    two.run(save_parts_on_rank_0, tmp_path)
