"""Every code block of README, CONTRIBUTING and docs/ runs as it stands, in the order of its page.

The blocks of a page share one namespace and one working directory. The test gives them what their reader has:
``model``, ``optimizer``, ``scheduler``, ``state``, ``state_at(step)`` and ``train_one_step()``; a page that looks at
checkpoints finds some. Experiment trackers are stubs. A block that opens a process group runs on two ranks, each a
process of its own, unless it gives ``world_size=1``.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import tracker_stubs
from slow import slow
from warm_python import WarmPython

import aio_ckpt.dcp
import aio_ckpt.progress
from aio_ckpt.cli import commands as cli
from aio_ckpt.ticket import Milestone

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
WAIT_SECS = 120.0

NOT_RUN = {
    "pip install": "changes the environment; .ci/run runs the README's test command",
    ".ci/run": "is what runs this test",
    "python -m pytest -q -m": "is a run of the tests",
    "python -m build": "writes dist/; tests/test_distribution.py runs it",
    "from megatron.": "needs Megatron; tests/integrations/test_megatron.py",
    "integrations.megatron import": "needs Megatron; tests/integrations/test_megatron.py",
    "nvidia_resiliency_ext": "needs NVRx; tests/integrations/test_nvrx.py runs it",
    "aio-ckpt probe /mnt/shared --peer": "waits for a second host; tests/cli/test_probing.py runs it",
    "mkdocs serve": "serves until it is ended; .ci/run builds the site",
    "from transformers": "needs transformers; tests/integrations/test_huggingface.py runs it",
    "integrations.huggingface": "needs transformers; tests/integrations/test_huggingface.py runs it",
    "accelerat": "needs accelerate; tests/integrations/test_huggingface.py runs it",
    "ray.train": "needs Ray; tests/integrations/test_ray.py runs it",
    "import deepspeed": "needs DeepSpeed; tests/integrations/test_deepspeed.py runs it",
    "torchtitan": "needs torchtitan; tests/integrations/test_torchtitan.py runs it",
    "aws s3api": "needs a bucket",
    "gcloud storage": "needs a bucket",
    "gs://bucket": "needs a bucket",
    "az://container": "needs a bucket",
    "s3://bucket": "needs a bucket; tests/remote/test_object_store.py runs its like",
}
"""By a part of its text: why a block is not run here."""

FINDS_CHECKPOINTS = {"docs/cli.md", "docs/format.md", "docs/loading.md", "docs/retention.md"}
"""Pages whose blocks look at ``runs/ckpt``, which an earlier page made."""

NEEDS = {"docs/coming-from/lightning.md": "lightning.pytorch"}
"""By page: the package that its blocks need. Without it, the page is skipped."""

ALSO_GIVEN = {
    "docs/coming-from/lightning.md": """
import lightning_runs

module, batches = lightning_runs.Small(), lightning_runs.batches()
"""
}
"""By page: more of what its reader has."""

SET_UP = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(16, 16, device="cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

def train_one_step():
    optimizer.zero_grad()
    model(torch.randn(4, 16, device=model.weight.device)).square().mean().backward()
    optimizer.step()

def state_at(step):
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "step": step}

train_one_step()
state = state_at(0)
"""
"""What the reader of a page has before its first block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block."""

    page: str
    """Path of its page in the repository."""
    line: int
    """Line of its first line of code, from 1."""
    language: str
    """As the fence names it."""
    text: str
    """Without indentation."""

    @property
    def reason_not_run(self) -> str | None:
        """Why it is not run; None if it is."""
        return next((reason for part, reason in NOT_RUN.items() if part in self.text), None)


_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page that name a language, in order."""
    text = page.read_text()
    name = str(page.relative_to(REPOSITORY))
    return [
        Block(name, text.count("\n", 0, found.start("text")) + 1, found["language"], textwrap.dedent(found["text"]))
        for found in _FENCE.finditer(text)
    ]


BLOCKS = {str(page.relative_to(REPOSITORY)): blocks_of(page) for page in PAGES}
RUN = [
    name
    for name, blocks in BLOCKS.items()
    if any(block.language in ("python", "bash") and block.reason_not_run is None for block in blocks)
]
LONG = ("docs/parallelism.md", "docs/recipes.md")
"""Pages that take many seconds."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the steps 100 and 101 of ``state``."""
    root = tmp_path_factory.mktemp("made") / "ckpt"
    text = "from aio_ckpt import SyncCheckpointEngine\nwith SyncCheckpointEngine(root) as engine:\n"
    text += "    for step in (100, 101):\n        engine.save(state_at(step), step=step).result()\n"
    exec(SET_UP + text, {"root": root})
    return root


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A page may set up the log; the tests after it find it as it was."""
    logger = logging.getLogger("aio_ckpt")
    level, handlers = logger.level, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's working directory: the commands are on the path, and a trainer is there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("aio-ckpt", "-m aio_ckpt"), ("python", ""), ("python3", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    tracker_stubs.install(monkeypatch)
    return work


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own, of a process without a group
@pytest.mark.parametrize("page", [slow(page) if page in LONG else page for page in RUN])
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: str, desk: Path, checkpoints: Path) -> None:
    if page in FINDS_CHECKPOINTS:
        shutil.copytree(checkpoints, desk / "runs/ckpt")
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as quiet:
        if page in NEEDS:
            quiet.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # those of the package
            pytest.importorskip(NEEDS[page], exc_type=ImportError)
        run_page(page, desk, names)


def run_page(page: str, desk: Path, names: dict[str, Any]) -> None:
    exec(SET_UP + ALSO_GIVEN.get(page, ""), names)
    with asyncio.Runner() as loop:
        for block in BLOCKS[page]:
            if block.reason_not_run is not None:
                continue
            if block.language == "bash":
                run_in_shell(block)
            elif "init_process_group" in block.text and "world_size=1" not in block.text:
                run_on_two_ranks(block)
            elif block.language == "python":
                run_in_namespace(block, names, loop)


def test_the_examples_of_readme_continue_after_their_newest_checkpoint(desk: Path) -> None:
    examples = [block for block in BLOCKS["README.md"] if block.language == "python"][:2]
    newest = [desk / "runs/classic/step_000000100", desk / "runs/async/step_000000100"]
    names: dict[str, Any] = {}
    with asyncio.Runner() as loop:
        for _ in range(2):  # one that did not continue would save step 10 again, which is refused
            for block in examples:
                run_in_namespace(block, names, loop)
            for path in newest:
                shutil.rmtree(path)


def run_in_namespace(block: Block, names: dict[str, Any], loop: asyncio.Runner) -> None:
    """Run a Python block here; ``await`` may stand at its top level, as inside an async function."""
    padded = "\n" * (block.line - 1) + block.text  # so that a traceback names the line of the page
    code = compile(padded, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "asyncio.run(" in block.text:
        exec(code, names)
        return

    async def run() -> None:
        found = eval(code, names)
        if inspect.isawaitable(found):
            await found

    if code.co_flags & inspect.CO_COROUTINE:
        loop.run(run())
    else:
        exec(code, names)


def run_in_shell(block: Block) -> None:
    """Run a shell block as a reader would paste it; commands of aio-ckpt alone are run here, without a process."""
    commands = [command for line in block.text.splitlines() for command in line.split("; ")]
    if not any(re.match("aio-ckpt ", command) for command in commands):
        commands = [block.text]
    for command in commands:
        if re.fullmatch(r"aio-ckpt [^;|&<>$]*", command):
            code, said = cli.run(shlex.split(command)[1:]), ""
        else:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, timeout=WAIT_SECS)
            code, said = done.returncode, done.stdout.decode() + done.stderr.decode()
        assert code == 0, f"{block.page}:{block.line} {command}\n{said}"


def run_on_two_ranks(block: Block) -> None:
    """Run a Python block as torchrun does: the rank and the place to meet stand in the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    place["CUDA_VISIBLE_DEVICES"] = ""  # there may be fewer GPUs than ranks
    ranks = [
        WarmPython(
            block.text,
            options=(),
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=WAIT_SECS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], f"{block.page}:{block.line}\n" + "\n".join(said)


def test_every_reason_not_to_run_a_block_is_of_a_block() -> None:
    texts = [block.text for blocks in BLOCKS.values() for block in blocks]
    assert [part for part in NOT_RUN if not any(part in text for text in texts)] == []


def test_every_block_is_run_or_is_no_code() -> None:
    languages = {block.language for blocks in BLOCKS.values() for block in blocks}
    assert languages <= {"python", "bash", "text"}


# -- what the pages name ----------------------------------------------------------------------------


def _inline_code() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in re.finditer(r"`([^`\n]+)`", page.read_text()):
            yield str(page.relative_to(REPOSITORY)), found[1]


def test_every_test_that_a_page_names_exists() -> None:
    named = [(page, code) for page, code in _inline_code() if re.fullmatch(r"tests/\S+\.py", code)]
    assert named
    assert [(page, path) for page, path in named if not (REPOSITORY / path).is_file()] == []


def test_every_module_that_a_page_runs_exists() -> None:
    named = [
        (page, found[1])
        for page, code in _inline_code()
        if (found := re.match(r"python -m ((?:bench|tests)\S*)", code))
    ]
    assert [(page, module) for page, module in named if importlib.util.find_spec(module) is None] == []


def test_every_link_of_readme_and_contributing_leads_to_a_page() -> None:
    for page in PAGES[:2]:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert targets
        assert [target for target in targets if not (page.parent / target).is_file()] == []


def test_the_page_of_the_command_line_names_every_command_and_option() -> None:
    text = (REPOSITORY / "docs/cli.md").read_text()
    for name, command in cli.commands.commands.items():
        assert f"`aio-ckpt {name}" in text
        for option in (each for each in command.params if isinstance(each, click.Option)):
            assert f"`{option.opts[0]}" in text, f"{name} {option.opts[0]}"


def test_the_output_on_the_page_of_the_command_line_is_real(
    desk: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoints, desk / "runs/ckpt")
    cli.run(["protect", "runs/ckpt", "100"])
    shown = [block.text.splitlines() for block in BLOCKS["docs/cli.md"] if block.language == "text"]
    assert len(shown) >= 4
    for first, *lines in shown:
        capsys.readouterr()
        cli.run(shlex.split(first.removeprefix("$ aio-ckpt ")))
        assert [*map(_shape_of_line, capsys.readouterr().out.splitlines())] == [*map(_shape_of_line, lines)], first


def _shape_of_line(line: str) -> str:
    """A line without what differs between two runs: numbers, units, versions and where the root is."""
    line = re.sub(r"/\S*/(?=runs/)", "", line)
    line = re.sub(r"\d\S*( ([kMGT]?B|s|min|h|d)\b)?", "#", line)
    return re.sub(r"[ -]+", " ", line).strip()


def test_the_page_of_the_api_names_every_method_and_every_public_name() -> None:
    text = (REPOSITORY / "docs/api.md").read_text()
    shown = dict(_shown_by_api_page(text))
    errors = [name for name in aio_ckpt.__all__ if name.endswith("Error")]
    assert "aio_ckpt.errors" in shown  # one directive for all errors
    assert errors == aio_ckpt.errors.__all__
    modules = (aio_ckpt, aio_ckpt.dcp, aio_ckpt.progress)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    public -= {f"aio_ckpt.{name}" for name in (*errors, "__version__")}
    in_module = {f"aio_ckpt.progress.{name}" for name in shown["aio_ckpt.progress"] or ()}
    assert public - shown.keys() - in_module == set()
    for name, kind in WITH_MEMBERS.items():
        listed = shown[name]
        assert listed is None or _members_of(kind) - {*listed} == set(), name


def test_the_page_of_the_api_has_an_example_of_every_public_name() -> None:
    code = "\n".join(block.text for block in BLOCKS["docs/api.md"] if block.language == "python")
    named = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    called = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    modules = (aio_ckpt, aio_ckpt.dcp, aio_ckpt.progress)
    public = {name for module in modules for name in module.__all__ if not name.endswith("Error")}
    assert public - named - called == set()
    members = {name for kind in WITH_MEMBERS.values() for name in _members_of(kind)}
    assert members - called == set()
    assert {"AioCkptError", "CheckpointNotFoundError"} <= named


WITH_MEMBERS: dict[str, type] = {
    "aio_ckpt.CheckpointEngine": aio_ckpt.CheckpointEngine,
    "aio_ckpt.SaveTicket": aio_ckpt.SaveTicket,
    "aio_ckpt.ticket.Milestone": Milestone,
    "aio_ckpt.Every": aio_ckpt.Every,
    "aio_ckpt.Progress": aio_ckpt.Progress,
    "aio_ckpt.progress.ProgressBar": aio_ckpt.progress.ProgressBar,
    "aio_ckpt.dcp.Installation": aio_ckpt.dcp.Installation,
}
"""Classes whose methods and properties a user calls. Those of aio_ckpt.dcp are called by DCP."""

NOT_FOR_USERS = {"resolve", "fail", "agree"}
"""Methods that the engine and the adapters call."""


def _members_of(kind: type) -> set[str]:
    """Public methods and properties of ``kind``. Of a dataclass, fields are among them."""
    return {name for name in dir(kind) if not name.startswith("_")} - NOT_FOR_USERS


def _shown_by_api_page(text: str) -> Iterator[tuple[str, list[str] | None]]:
    """Each name that the page shows, and its members that it lists; None if it shows all."""
    for name, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", text, re.MULTILINE):
        listed = re.search(r"members:(?: \[(.*)\]|((?:\n +- \w+)+))", options)
        yield name, None if listed is None else re.findall(r"\w+", listed[1] or listed[2])


# -- README -----------------------------------------------------------------------------------------


def test_readme_is_read_in_five_minutes() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1000


def test_readme_names_one_command_for_the_demo_and_one_for_the_tests() -> None:
    commands_of = [block.text for block in BLOCKS["README.md"] if block.language == "bash"]
    assert [sum(part in text for text in commands_of) for part in ("aio-ckpt demo", "pytest")] == [1, 1]
    assert (REPOSITORY / "README.md").read_text().count("<!-- test command -->\n```bash\n") == 1


# -- the generated page -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings() -> ModuleType:
    """The hook that renders docs/configuration.md."""
    spec = importlib.util.spec_from_file_location("settings_hook", REPOSITORY / "docs/hooks/settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_shows_each_setting_once(settings: ModuleType) -> None:
    page = settings.on_page_markdown((REPOSITORY / "docs/configuration.md").read_text())
    shown = re.findall(r"^### `(\w+)` \{ #EngineConfig", page, re.MULTILINE)
    assert sorted(shown) == sorted(settings.setting_names())
    assert tuple(shown[:5]) == settings.FIRST_NAMES


def test_a_page_without_marks_stays_as_it_is(settings: ModuleType) -> None:
    assert settings.on_page_markdown("# Limits\n") == "# Limits\n"
