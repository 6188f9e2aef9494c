"""What `pip install aio-ckpt` gives: the wheel, in an environment of its own, without the repository beside it."""

from __future__ import annotations

import email.parser
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import aio_ckpt

REPOSITORY = Path(__file__).parents[1]
BUILD = [sys.executable, "-m", "build", "--no-isolation"]
WAIT_SECS = 110.0


def run(command: list[str], folder: Path) -> str:
    """Output of a command that sees neither the repository nor the settings of the tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_SECS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sdist, and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([*BUILD, "--outdir", str(folder), str(REPOSITORY)], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment into which pip has installed the wheel. torch and the like are those of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], folder)
    packages = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # A .pth file that lies in a folder which another one names is not read: the editable install of the tests is not
    # found.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
    found = run([str(python), "-c", "import aio_ckpt; print(aio_ckpt.__file__)"], folder)
    assert Path(found.strip()).is_relative_to(packages)
    return python.parent


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        found = email.parser.BytesParser().parsebytes(archive.read(metadata))
    sources = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "aio_ckpt").rglob("*.py")}
    kept = {name for name in names if ".dist-info/" not in name}
    assert kept == sources | {"aio_ckpt/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert found["Version"] == aio_ckpt.__version__
    readme = (REPOSITORY / "README.md").read_bytes()
    assert found.get_payload(decode=True) == re.sub(rb"\[([^\]]+)\]\((?!https:)[^)]+\)", rb"\1", readme)
    assert wheel.stat().st_size < 1 << 20


def test_every_link_of_the_index_s_page_leads_somewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        page = content.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    assert "which checkpointer, concepts, configuration" in page


def test_the_sdist_holds_what_the_tests_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames()}
    wanted = {"aio_ckpt", "tests", "bench", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"}
    assert wanted <= tops


@pytest.mark.slow
def test_the_installed_package_runs_the_classic_loop_and_goes_on(installed: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    (loop,) = re.findall(
        r"```python\n(.*?)```",
        text.partition("## Save and resume")[2].partition("```python\nimport asyncio")[0],
        re.DOTALL,
    )
    (tmp_path / "loop.py").write_text(loop)
    python = str(installed / "python")
    assert run([python, "loop.py"], tmp_path) == ""
    assert run([python, "loop.py"], tmp_path) == "resumed after step 100\n"
    assert "step_000000100" in run([str(installed / "aio-ckpt"), "ls", "runs/classic"], tmp_path)


@pytest.mark.slow
def test_the_installed_commands_run(installed: Path, tmp_path: Path) -> None:
    assert run([str(installed / "python"), "-m", "aio_ckpt", "--version"], tmp_path).split()[-1] == aio_ckpt.__version__
    shown = run([str(installed / "aio-ckpt"), "demo", "--steps", "20"], tmp_path)
    assert "bit for bit" in shown


def test_an_import_takes_no_torch(installed: Path, tmp_path: Path) -> None:
    code = "import sys, aio_ckpt; print([name for name in ('torch', 'numpy', 'rich', 'click') if name in sys.modules])"
    assert run([str(installed / "python"), "-c", code], tmp_path) == "[]\n"
