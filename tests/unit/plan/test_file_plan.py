"""Plans of files that are kept for the next call."""

from __future__ import annotations

import torch

from aio_ckpt.plan.file_plan import FilePlans
from aio_ckpt.plan.safetensors_plan import SafetensorsOptions, safetensors_content


def test_plans_of_files_that_the_newest_call_does_not_have_are_forgotten() -> None:
    plans = FilePlans(gather_bytes=0, budget_bytes=lambda: 1 << 30)
    state = {f"t{number}": torch.ones(100) for number in range(4)}

    def hits(max_shard_bytes: int | None) -> list[bool]:
        options = SafetensorsOptions(max_shard_bytes=max_shard_bytes)
        content = safetensors_content(state, "m.safetensors", options, plans)
        return [part().plan_hit for part in content.parts]

    assert hits(400) == [False] * 4
    assert hits(400) == [True] * 4
    assert hits(None) == [False]
    assert len(plans._kept) == 1
    assert hits(400) == [False] * 4
