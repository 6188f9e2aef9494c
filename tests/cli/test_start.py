"""Commands that need no torch do not wait for it."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_python import child_environment
from command_line import called

import aio_ckpt
from aio_ckpt.cli import commands as cli

LOOK = """
import sys
from aio_ckpt.cli.commands import run
sys.argv[0] = "aio-ckpt"
try:
    code = run(sys.argv[1:])
except SystemExit as end:  # of the completion
    code = end.code or 0
names = {"torch", "numpy", "rich"} & sys.modules.keys()
print(f"IMPORTED {sorted(names)} {code}", file=sys.stderr)
"""


def imported(*arguments: object, **environment: str) -> tuple[str, str]:
    """Run a command in a new process; its output, and which slow packages it imported."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=child_environment(**environment),
        timeout=120,
    )
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["ls", "du"])
def test_listing_imports_no_torch(root, command):
    out, words = imported(command, root)
    assert words == "IMPORTED [] 0"
    assert out


def test_help_and_version_import_no_torch_for_any_command():
    script = "from aio_ckpt.cli.commands import commands, run\n"
    script += "codes = [run([*name, '--help']) for name in [[], *([each] for each in commands.commands)]]\n"
    script += "codes.append(run(['--version']))\nimport sys\n"
    script += "sys.exit(any(codes) or bool({'torch', 'numpy', 'rich', 'anyio'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=child_environment(), timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "wanted"), [("aio-ckpt ver", "verify"), ("aio-ckpt inspect --la", "--largest")])
def test_completion_imports_no_torch(words, wanted):
    number = str(len(words.split()) - 1)
    out, imports = imported(_AIO_CKPT_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=number)
    assert wanted in out
    assert imports == "IMPORTED [] 0"


def test_the_package_imports_no_torch_until_a_name_needs_it():
    script = "import sys, aio_ckpt; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, env=child_environment(), timeout=120)
    names: dict[str, object] = {}
    exec("from aio_ckpt import *", names)
    assert all(names[name] is getattr(aio_ckpt, name) for name in aio_ckpt.__all__)


def test_type_checkers_see_the_names_that_are_imported_at_first_use():
    tree = ast.parse(Path(aio_ckpt.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen.pop("progress") == "aio_ckpt"  # a module itself
    assert seen == aio_ckpt._MODULES
    assert seen.keys() <= set(aio_ckpt.__all__)
    for name, module in seen.items():
        assert getattr(aio_ckpt, name) is getattr(importlib.import_module(module), name)


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'aio_ckpt' has no attribute 'nothing'"):
        aio_ckpt.nothing  # noqa: B018


def test_python_m_runs_the_same_command_for_the_package_and_its_cli():
    outputs = [
        subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, env=child_environment(), timeout=120
        )
        for module in ("aio_ckpt", "aio_ckpt.cli")
    ]
    assert [(done.returncode, done.stdout) for done in outputs] == [
        (0, f"aio-ckpt {aio_ckpt.__version__}\n".encode())
    ] * 2


@pytest.mark.parametrize("name", [*cli.commands.commands])
def test_each_help_text_has_an_example_that_can_be_called(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in ("runs/ckpt/step_000000100", "runs/a", "runs/b", "runs/dcp"):
        os.makedirs(path)
    for file in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / file).touch()
    code, out, _ = called(capsys, name, "--help")
    assert code == 0
    words = " ".join(out.split("Example: ")[1].split())
    assert words.startswith(f"aio-ckpt {name}")
    command = cli.commands.commands[name]
    command.make_context(name, words.split()[2:])  # raises if an option or argument of it is wrong
