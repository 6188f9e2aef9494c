"""``python -m bench.report``: the pages of bench/pages, rendered from the JSON files in bench/results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import tables as common_tables
from bench.common.results import BENCH, RESULTS
from bench.gpu import tables as gpu_tables

__all__ = ["PAGES", "main", "render_page"]

FOLDER = BENCH / "pages"
NOTE = "<!-- Rendered by `python -m bench.report` from bench/results. Do not edit. -->"
ONE, TWO, FOUR, CPU = "1x-nvidia-h200", "2x-nvidia-h200", "4x-nvidia-h200", "2-cores"
H100 = "1x-nvidia-h100-80gb-hbm3"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, what its figures are, and the results below it."""

    title: str
    about: str
    results: Sequence[str]
    """Paths below bench/results, without ``.json``."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of docs/benchmarks."""

    title: str
    about: str
    """Paragraphs in Markdown."""
    sections: Sequence[Section]


FILES = "`save_file()` beside the rival of each format, whose file is fsynced, too. *x limit* is the ratio to it."

METHOD = "[Method and commands](../../docs/benchmarks/index.md) are the same for all. Each table comes from one run."

CPU_PAGE = Page(
    "CPU",
    f"""{METHOD}

- *x limit* is the ratio of the medians to the limit of that state.
- *first ms* is the first operation. It maps buffers and plans, and does not count in the other columns.
- *Beside it*: a ticker of 1 ms runs on the caller's asyncio loop. The table shows how late its ticks were, from the
  call until done (*whole*), and without the ticks that the call itself held up. A loop in pure Python runs on the
  caller's thread from the return of the call until done. *keeps* is its rate as a share of its rate alone.
- `save()` copies host tensors before it returns, so it blocks for one copy of the state. Tensors on a GPU are not
  copied so.""",
    (
        Section("Save", "", (f"{CPU}/save",)),
        Section("Save, a GPT-like state too", "Seven rounds, one day earlier.", (f"{CPU}/save-all-shapes",)),
        Section("Load", "", (f"{CPU}/load",)),
        Section("A resume in live objects", "GPT-2 small with AdamW.", (f"{CPU}/live",)),
        Section("Files", f"{FILES} A file is planned anew in each call.", (f"{CPU}/files",)),
        Section("Plan", "What an unchanged state costs the caller at each save.", (f"{CPU}/plan",)),
        Section("Memory", "Memory, files and threads over 100 saves.", (f"{CPU}/memory",)),
        Section(
            "States larger than the budget",
            "One save each, read back and compared. The second state is 60 % of the machine's memory, "
            "the budget is the default.",
            (f"{CPU}/waves",),
        ),
        Section("io_uring", "[Why the engine writes by threads](../decisions/0007-no-io-uring.md).", (f"{CPU}/uring",)),
    ),
)

_FIRST_STEPS = (
    "What the five steps from a save on take longer than the same steps from the same rest without it, and how long\n"
    "`save()` blocks. *Together*: all ranks save. *Guarded*: the same with `guard(optimizer)`. *First rank alone*:\n"
    "the others train on. The tables are of six runs within six hours; the fourth and the\n"
    "last ran on one host. Two things are not explained yet: what the second run costs\n"
    "more, and the single pair of 108 ms in the third."
)
_BEFORE_COPIES = "In this section and below, `default` made no copies on the device: today's `device_copy_bytes=0`."

GPU_PAGE = Page(
    "GPU",
    f"""{METHOD}

- **States.** `blocks`: 12 transformer blocks in fp32 under bf16 autocast with AdamW, 432 tensors.
  `small`: 10,000 tensors of 64 KiB under SGD. `fsdp2`: a transformer under `fully_shard` with AdamW.
- **Alone**: the first save, then some more, with nothing beside them. *blocks*: the call. *staged*: until the trainer
  may change everything. *done*: by the contender's own word. *durable*: the same with fsync of every file and
  directory added if the contender does none. *commit*: from the slowest rank's data being durable until done.
- **Beside training**: a save after two steps, then steps until it is done on all ranks, and one more. *lost a save*
  is the sum of those steps less as many mean steps without a save. *steps of the drain* is their median over that of
  steps without a save. What a contender demands before the optimizer may step is done there.
- *host GB* is the growth to the peak: of the host's used memory without page cache / of the process tree.
- *of the disk* is the time of the same bytes by O_DIRECT in the same run, over *durable*.
  *of the link* is the time of one large copy to registered memory, scaled to the state, over *staged*.
- *tokens/s*: a save, n steps, a save, and so on. A save waits for the one before.
- With several ranks, each figure is the slowest rank's. *By columns*: a load fills shards of columns from shards of
  rows.
- A contender that is not installed or fails is a row with the reason.""",
    (
        Section("One GPU: saves of the present code", "", (f"{ONE}/gpu-save-blocks-default",)),
        Section(
            "One GPU and two: the first steps after a save",
            _FIRST_STEPS,
            (
                *(f"{ONE}/first-steps{run}" for run in ("", "-other-host", "-third-host", "-one-of-two")),
                *(f"{TWO}/first-steps{run}" for run in ("", "-other-host")),
            ),
        ),
        Section("One GPU: saves", _BEFORE_COPIES, (f"{ONE}/gpu-save-blocks-rivals", f"{ONE}/gpu-save-blocks")),
        Section("One GPU: saves beside steps of 250 ms", "", (f"{ONE}/gpu-save-blocks-rivals-step250",)),
        Section("One GPU: 2 GB and 34 GB", "", (f"{ONE}/gpu-save-blocks-gb2", f"{ONE}/gpu-save-blocks-gb32")),
        Section("One GPU: 10,000 small tensors", "", (f"{ONE}/gpu-save-small-16-cores",)),
        Section("One GPU: FSDP2", "", (f"{ONE}/gpu-save-fsdp2-rivals", f"{ONE}/gpu-save-fsdp2-step200")),
        Section("One GPU: loads of the present code, 4 GB", "", (f"{ONE}/gpu-load-blocks-gb4",)),
        Section("One GPU: loads", "", (f"{ONE}/gpu-load-blocks-bracketed", f"{ONE}/gpu-load-fsdp2")),
        Section("One GPU: a resume in live objects", "GPT-2 small with AdamW.", (f"{ONE}/live",)),
        Section("One GPU: files", FILES, (f"{H100}/files",)),
        Section("Two GPUs: saves", "", (f"{TWO}/gpu-save-blocks-bracketed", f"{TWO}/gpu-save-fsdp2-rivals")),
        Section("Two GPUs: loads", "", (f"{TWO}/gpu-load-fsdp2",)),
        Section("Four GPUs: saves", "", (f"{FOUR}/gpu-save-fsdp2", f"{FOUR}/gpu-save-fsdp2-every")),
        Section("Four GPUs: saves to a RAM disk", "", (f"{FOUR}/gpu-save-blocks-ram",)),
        Section("Four GPUs: loads", "", (f"{FOUR}/gpu-load-fsdp2",)),
    ),
)

RANKS_PAGE = Page(
    "Ranks",
    f"""{METHOD}

Real processes on one host of two cores, in a gloo group.""",
    (Section("Saves, loads in other layouts, planning and messages", "", (f"{CPU}/ranks",)),),
)

SCALE_PAGE = Page(
    "Scale",
    f"""{METHOD}

No processes: the leader's own code is given the messages that so many ranks would send. Every tensor of the model is
sharded by rows. Three small sizes give the cost of a rank and of an item; their sum is the model. The whole size was
measured too, and tells how far off the model is. A first save counts all that the leader does: it takes messages
apart and checks them, assigns the writes, answers the ranks, renders and fills `.metadata`, and writes the root
manifest.""",
    (Section("The leader of 10,000 ranks", "", (f"{CPU}/scale",)),),
)

ADAPTERS_PAGE = Page(
    "Adapters",
    f"""{METHOD}

Each column is a way into this package, beside the framework's own: `dcp.async_save` in a plain script with FSDP2,
without and with `aio_ckpt.dcp.install()`; torchtitan's manager in the mode `async`; `trainer.save_checkpoint` of
Lightning with DDP and with FSDP2; transformers' Trainer; Megatron's `--async-save`; and `torch.save` beside
`engine.save_file`. Both ways save the same trainer, in turns.

- *Training lost* is the time of a save and the steps behind it, less the time of as many steps without a save. Both
  begin from the same rest: nothing pending, disk and ranks idle. A figure below zero is noise.
- *The call* is the time until the save returns. Nothing runs beside it.
- *Until done* is the time until the framework says that the save is done. With our adapter, the checkpoint is durable
  then. Stock does no fsync, so that its checkpoint may still be in memory.
- With several ranks, each figure is the slowest rank's. The end of the steps waits for the current stream of a GPU.
- Without CUDA, stock Megatron does not save, and the GPT has no moments.""",
    [
        Section(path.parent.name, "", (f"{path.parent.name}/{path.stem}",))
        for path in sorted(RESULTS.glob("*/adapters*.json"))
    ],
)

REMOTE_PAGE = Page(
    "Object storage",
    f"""{METHOD}

A state on the GPU (`device=cuda`) or in host memory is saved to a bucket, and loaded into host memory. *x limit* is the
ratio to the same bytes by plain requests of the same library: one `obstore.put`, and ranged gets by 8 threads. The
server runs on the same machine, with half of the cores, which do not count. *blocked* is the call of `save()`, which
copies the state while the upload begins. *CPU-s/GB* of any upload holds the sums of its parts: SHA-256, or CRC64NVME as
the page of each store sets it.

The run beside s3fs is older than all others: its upload began beside the copy of the state, with 8 parts at once.""",
    [
        Section(path.parent.name, "", (f"{path.parent.name}/{path.stem}",))
        for path in sorted(RESULTS.glob("*/remote*.json"))
    ],
)

MIRROR_PAGE = Page(
    "Mirror",
    f"""{METHOD}

A loop of matrix products on one GPU saves three times, without a mirror and with one. The first run copies to a server
on the same machine, with half of the cores; the second one to another directory of the same disk. *last copy* begins
when the copy under way has ended, and reads each byte back.""",
    [
        Section(path.parent.name, "", (f"{path.parent.name}/{path.stem}",))
        for path in sorted(RESULTS.glob("*/mirror*.json"), reverse=True)
    ],
)

FROZEN_PAGE = Page(
    "What does not change",
    f"""{METHOD}

A LoRA run: a base stays, and adapters of 0.5 % of its size, with their AdamW moments, change before each save.
*x limit* is the ratio to a save that writes all. Each engine has saved four times before. Every tenth step has a copy
of the base of its own, which the spread shows if a round meets it.""",
    [
        Section(path.parent.name, "", (f"{path.parent.name}/{path.stem}",))
        for path in sorted(RESULTS.glob("*/frozen*.json"))
    ],
)

PAGES: Mapping[str, Page] = {
    "adapters": ADAPTERS_PAGE,
    "cpu": CPU_PAGE,
    "frozen": FROZEN_PAGE,
    "gpu": GPU_PAGE,
    "mirror": MIRROR_PAGE,
    "ranks": RANKS_PAGE,
    "remote": REMOTE_PAGE,
    "scale": SCALE_PAGE,
}


def render_page(page: Page) -> str:
    """Return the page as Markdown."""
    lines = [NOTE, "", f"# {page.title}", "", page.about]
    for section in page.sections:
        lines += ["", f"## {section.title}"] + ([] if not section.about else ["", section.about])
        for name in section.results:
            lines += ["", _tables(json.loads((RESULTS / f"{name}.json").read_text())).rstrip()]
    return "\n".join(lines) + "\n"


def _tables(document: Mapping[str, Any]) -> str:
    return gpu_tables.render(document) if document["bench"] == "gpu" else common_tables.render(document)


def main(folder: Path = FOLDER) -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(render_page(page))


if __name__ == "__main__":
    main()
