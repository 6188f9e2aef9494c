"""The house rules that a parser can check: imports point down, threads live in one file, everything stays short."""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aio_ckpt"

LAYERS: dict[str, int] = {
    **dict.fromkeys(("errors", "config", "items", "_version"), 0),
    **dict.fromkeys(("seal", "pickle_guard"), 1),
    **dict.fromkeys(
        ("tensor_pickle", "envelope", "metadata", "columns", "manifest", "objects", "skeleton", "tree", "names"), 1
    ),
    **dict.fromkeys(("storable",), 1),
    **dict.fromkeys(("frames", "ranks", "board", "lobby"), 1),
    **dict.fromkeys(("exits", "portal", "ticket", "device", "copies", "moves", "likeness", "batch", "preemption"), 1),
    **dict.fromkeys(("priority", "trace", "ratelimit"), 1),
    **dict.fromkeys(("numa",), 1),
    **dict.fromkeys(("arena", "staging", "segment"), 2),
    **dict.fromkeys(("sealed", "remains"), 3),
    **dict.fromkeys(("rescue",), 4),
    **dict.fromkeys(("lifetime", "layout", "structure", "routes", "descriptors", "plan"), 2),
    **dict.fromkeys(("gather", "shadow", "turns", "image", "progress", "encoding"), 2),
    **dict.fromkeys(("directio", "datafile", "rootlock", "storage", "coordinator", "throttle", "bounce"), 2),
    **dict.fromkeys(("connection", "presence"), 2),
    **dict.fromkeys(("metadata_pickle",), 1),
    **dict.fromkeys(("holdings", "balance", "shares", "coverage", "globalplan"), 2),
    **dict.fromkeys(("agreement", "peers", "notice", "narrowing"), 3),
    **dict.fromkeys(("snapshot", "guard", "write", "record", "owner", "commit", "directory", "retention"), 3),
    **dict.fromkeys(("quarantine", "tracing"), 3),
    **dict.fromkeys(("contents", "catalog", "pieces", "inplace", "files", "readplan", "place", "fetch", "sharing"), 3),
    **dict.fromkeys(("belonging", "match", "read", "verify"), 3),
    **dict.fromkeys(("putback",), 3),
    **dict.fromkeys(("undo", "pending", "concluding", "pipeline", "steps", "inflight", "walk", "joint", "restore"), 4),
    **dict.fromkeys(("targets", "mappings"), 2),
    **dict.fromkeys(("keeper", "calls", "saver", "closing", "engine"), 4),
    **dict.fromkeys(("sync", "dcp", "cli", "listing", "screen", "__main__", "__init__"), 5),
    **dict.fromkeys(("demo", "demo_disk", "demo_model", "demo_plot", "demo_report", "demo_train"), 5),
    **dict.fromkeys(("integrations",), 5),
}
"""Every file by its layer (DESIGN 4). A file that was split keeps its layer; a new file must be entered here."""

SIDEWAYS: set[tuple[str, str]] = {
    ("config", "errors"),
    ("items", "errors"),
    ("retention", "commit"),
    ("quarantine", "commit"),
    ("commit", "owner"),
    ("retention", "owner"),
    # Files that were split because of their length: the face of each pair is named first.
    ("envelope", "tensor_pickle"),
    ("manifest", "metadata"),
    ("manifest", "columns"),
    ("metadata_pickle", "columns"),
    ("columns", "metadata"),
    ("manifest", "seal"),
    ("metadata_pickle", "metadata"),
    ("metadata", "pickle_guard"),
    ("objects", "pickle_guard"),
    ("objects", "envelope"),
    ("objects", "tensor_pickle"),
    ("tree", "skeleton"),
    ("tree", "storable"),
    ("storable", "objects"),
    ("tree", "objects"),
    ("skeleton", "objects"),
    ("plan", "layout"),
    ("plan", "structure"),
    ("plan", "routes"),
    ("plan", "descriptors"),
    ("descriptors", "routes"),
    ("descriptors", "structure"),
    ("routes", "structure"),
    ("structure", "targets"),
    ("gather", "plan"),
    ("portal", "exits"),
    ("numa", "device"),
    ("arena", "segment"),
    ("lifetime", "arena"),
    ("lifetime", "segment"),
    ("sealed", "record"),
    ("remains", "owner"),
    ("remains", "sealed"),
    ("rescue", "pending"),
    ("rescue", "undo"),
    ("pending", "undo"),
    ("keeper", "rescue"),
    ("engine", "rescue"),
    ("staging", "arena"),
    ("image", "arena"),
    ("image", "layout"),
    ("image", "lifetime"),
    ("image", "plan"),
    ("gather", "routes"),
    ("shadow", "plan"),
    ("shadow", "gather"),
    ("shadow", "descriptors"),
    ("turns", "descriptors"),
    ("turns", "routes"),
    ("device", "batch"),
    ("device", "moves"),
    ("batch", "moves"),
    ("device", "copies"),
    ("copies", "moves"),
    ("storage", "datafile"),
    ("storage", "directio"),
    ("datafile", "directio"),
    ("storage", "rootlock"),
    ("catalog", "contents"),
    ("pieces", "contents"),
    ("readplan", "contents"),
    ("readplan", "pieces"),
    ("readplan", "inplace"),
    ("inplace", "contents"),
    ("inplace", "pieces"),
    ("fetch", "contents"),
    ("fetch", "pieces"),
    ("fetch", "place"),
    ("place", "pieces"),
    ("fetch", "files"),
    ("belonging", "catalog"),
    ("match", "belonging"),
    ("match", "catalog"),
    ("match", "contents"),
    ("read", "belonging"),
    ("read", "catalog"),
    ("read", "contents"),
    ("read", "readplan"),
    ("read", "fetch"),
    ("read", "files"),
    ("putback", "belonging"),
    ("putback", "catalog"),
    ("putback", "match"),
    ("read", "match"),
    ("read", "sharing"),
    ("sharing", "contents"),
    ("sharing", "match"),
    ("read", "putback"),
    ("verify", "catalog"),
    ("verify", "contents"),
    ("verify", "fetch"),
    ("verify", "files"),
    ("verify", "readplan"),
    ("pipeline", "undo"),
    ("inflight", "steps"),
    ("inflight", "pipeline"),
    ("closing", "inflight"),
    ("engine", "closing"),
    ("engine", "saver"),
    ("calls", "inflight"),
    ("calls", "pending"),
    ("saver", "calls"),
    ("saver", "inflight"),
    ("saver", "keeper"),
    ("engine", "restore"),
    ("engine", "keeper"),
    ("notice", "peers"),
    ("ranks", "frames"),
    ("board", "frames"),
    ("lobby", "board"),
    ("presence", "connection"),
    ("coordinator", "connection"),
    ("coordinator", "presence"),
    ("joint", "pending"),
    ("joint", "walk"),
    ("restore", "joint"),
    ("restore", "walk"),
    ("walk", "pending"),
    ("concluding", "pending"),
    ("engine", "pending"),
    ("balance", "holdings"),
    ("coverage", "holdings"),
    ("globalplan", "coverage"),
    ("globalplan", "holdings"),
    ("globalplan", "shares"),
    ("inflight", "pending"),
    ("keeper", "pending"),
    ("peers", "agreement"),
    ("peers", "owner"),
    ("pipeline", "concluding"),
    ("pipeline", "pending"),
    ("plan", "holdings"),
    ("plan", "shares"),
    ("shares", "balance"),
    ("shares", "holdings"),
    ("plan", "globalplan"),
    ("restore", "pending"),
    ("saver", "pending"),
}
"""Allowed imports within a layer, importer first. Faces (layer 5) may import each other."""

PURE = (
    "errors",
    "config",
    "items",
    "seal",
    "pickle_guard",
    "tensor_pickle",
    "envelope",
    "metadata",
    "metadata_pickle",
    "manifest",
    "objects",
    "skeleton",
    "storable",
    "tree",
    "names",
    "trace",
    "ratelimit",
)
FACES = {name for name, layer in LAYERS.items() if layer == 5}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The first part below the package: files of a sub-package share one layer."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Full names of everything imported, at any depth of the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(tree: ast.Module) -> set[str]:
    """Modules of this package that are imported."""
    ours = (name.split(".") for name in imports_of(tree) if name.split(".")[0] == "aio_ckpt")
    return {parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__" for parts in ours}


@functools.cache
def code_of(path: Path) -> str:
    """The source without comments and strings, and without spaces around dots and brackets."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    strings = {getattr(tokenize, name) for name in ("STRING", "FSTRING_MIDDLE") if hasattr(tokenize, name)}
    kept = [(kind, "''" if kind in strings else text) for kind, text, *_ in tokens if kind != tokenize.COMMENT]
    return re.sub(r"\s*([.(])\s*", r"\1", tokenize.untokenize(kept))


def files_with(pattern: str) -> set[str]:
    """Modules whose code (comments and strings apart) matches."""
    return {module_of(path) for path in FILES if re.search(pattern, code_of(path))}


def test_the_search_of_code_sees_calls_and_no_comments(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import time\n# time.sleep(1)\nx = 'os.fork()'\ntime . sleep (2)\n")
    assert re.search(r"\btime\.sleep\(2", code_of(file))
    assert not re.search(r"sleep\(1|fork", code_of(file))


def names_of(path: Path) -> set[str]:
    """Everything that the file imports, by full name, and the last part of each."""
    names = set(imports_of(parsed(path)))
    return names | {name.rpartition(".")[2] for name in names}


def test_every_file_has_a_layer() -> None:
    assert {module_of(path) for path in FILES} <= set(LAYERS), "enter new files in LAYERS, and in DESIGN's table"
    assert all(LAYERS[upper] == LAYERS[lower] for upper, lower in SIDEWAYS)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_only_point_down(path: Path) -> None:
    module = module_of(path)
    imported = modules_imported(parsed(path)) - {module}
    for other in sorted(imported):
        is_down = LAYERS[other] < LAYERS[module]
        is_face = LAYERS[other] == LAYERS[module] == 5
        assert is_down or is_face or (module, other) in SIDEWAYS, f"{module} must not import {other}"


def test_every_sideways_import_that_is_allowed_is_needed_and_they_make_no_circle() -> None:
    used = {
        (module_of(path), other)
        for path in FILES
        for other in modules_imported(parsed(path)) - {module_of(path)}
        if LAYERS[other] == LAYERS[module_of(path)] < 5
    }
    assert used == SIDEWAYS
    waiting = set(SIDEWAYS)
    while free := {edge for edge in waiting if edge[1] not in {upper for upper, _ in waiting}}:
        waiting -= free
    assert not waiting


@pytest.mark.parametrize(
    "pattern", [r"\bThread\(", r"\brun_in_executor\(", r"\bThreadPoolExecutor\b", r"\bto_thread\b"]
)
def test_only_the_portal_starts_threads(pattern: str) -> None:
    assert files_with(pattern) <= {"portal"}


def test_only_the_portal_starts_loops_only_it_and_the_exits_know_threads_and_no_file_starts_processes() -> None:
    for path in FILES:
        roots = {name.split(".")[0] for name in imports_of(parsed(path))}
        assert module_of(path) in ("portal", "exits") or not roots & {"threading", "_thread", "queue"}, path
        if module_of(path) not in FACES:
            assert not roots & {"subprocess", "multiprocessing"}, path
    assert files_with(r"\b(asyncio|anyio)\.run\(|\bnew_event_loop\(|\basyncio\.Runner\b") <= {"portal", *FACES}
    assert files_with(r"\bos\.(fork|forkpty|posix_spawn)\(") == set()


def test_pure_files_know_no_loop_no_thread_and_no_file() -> None:
    for name in PURE:
        roots = {full.split(".")[0] for full in imports_of(parsed(PACKAGE / f"{name}.py"))}
        assert not roots & {"asyncio", "anyio", "aiofiles", "threading", "concurrent", "os", "shutil"}, name
    assert files_with(r"\basync def\b").isdisjoint(PURE)
    assert files_with(r"\bopen\(").isdisjoint(PURE)


def test_only_device_names_cuda() -> None:
    assert files_with(r"\btorch\.cuda\b") - FACES == {"device"}


def test_nothing_waits_for_a_whole_device_while_saving() -> None:
    saving = set(LAYERS) - FACES - {"read"}  # a load fills the caller's own tensors, whose streams it cannot know
    assert files_with(r"\b(cuda|accelerator)\.synchronize\(").isdisjoint(saving)
    assert files_with(r"\bempty_cache\b") == set()


def test_planner_classes_stay_where_they_belong() -> None:
    users = {
        module_of(path)
        for path in FILES
        if any(re.search(r"\.(default_planner|planner|planner_helpers)\b|Planner$", name) for name in names_of(path))
    }
    assert users <= {"plan", "globalplan", "read", "dcp", "readplan"}


def test_stores_and_process_groups_stay_in_the_coordinator_and_the_faces() -> None:
    allowed = {"coordinator", *FACES}
    pattern = r"\b(TCPStore|FileStore|HashStore|PrefixStore|ProcessGroup\w*|init_process_group|all_gather\w*|barrier)\b"
    assert files_with(pattern) <= allowed
    for path in FILES:
        if module_of(path) not in allowed:
            grouped = {
                name for name in imports_of(parsed(path)) if re.match(r"torch\.distributed(\.\w*c10d\w*)?$", name)
            }
            assert not grouped, f"{path}: {grouped}"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\b(add_)?safe_globals\b", "changes what weights_only accepts for the whole process"),
        (r"\bdef __del__\b", "resources belong to a with"),
        (r"\btime\.sleep\(", "blocks a loop or hides a race"),
        (r"\braise BaseException\b", "errors are one tree"),
        (r"\bflock\(", "survives into forked workers"),
        (r"\bensure_future\(|\bcreate_task\(", "every task belongs to a task group"),
        (r"\bpickle\.loads?\(", "reading runs no code"),
        (
            r"\bdecode\(.*\btype=|\bmsgspec\.\w+\.decode\b(?!\()",
            "first decoded in two threads at once, a type crashes: a Decoder",
        ),
        (r"\bassert_never\b|\bprint\(", "libraries log"),
    ],
)
def test_what_no_file_may_do(pattern: str, reason: str) -> None:
    allowed = FACES if "print" in pattern or "sleep" in pattern else set()
    assert files_with(pattern) <= allowed, reason


def test_words_that_mean_nothing_here_are_not_used() -> None:
    """One word an idea (DESIGN 8)."""
    banned = {"payload", "job", "request", "slab", "finalize", "master"}
    for path in FILES:
        names = {node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
        names |= {node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        words = {word for name in names for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}
        assert not banned & {word.lower() for word in words}, path


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_a_file_is_short_and_begins_with_what_it_is_for(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_FILE_LINES
    tree = parsed(path)
    assert ast.get_docstring(tree), "say in the first line what the file is for"
    if tree.body[1:] and path.name not in ("__init__.py", "__main__.py", "_version.py"):
        assert "from __future__ import annotations" in path.read_text()
        assert any(
            isinstance(node, ast.Assign) and node.targets[0].id == "__all__" for node in tree.body if _assigns(node)
        )


def _assigns(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)


def lengths(tree: ast.Module) -> dict[str, int]:
    """Lines of each function's body, its docstring and the functions inside it apart."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node) is not None
            body = node.body[1:] if documented else node.body
            found[f"{node.name}:{node.lineno}"] = body[-1].end_lineno - body[0].lineno + 1 if body else 0
    return found


def test_functions_are_short() -> None:
    by_file = {path.name: lengths(parsed(path)) for path in FILES}
    long = {
        f"{file}:{name}": n for file, found in by_file.items() for name, n in found.items() if n >= MAX_FUNCTION_LINES
    }
    assert not long
    assert statistics.median(n for found in by_file.values() for n in found.values()) <= 10


def test_everything_public_is_documented_and_annotated() -> None:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{path.name}:{node.name}"
            assert node.returns is not None or node.name == "__init__", f"{where}: what does it return?"
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert all(a.annotation for a in arguments if a.arg not in ("self", "cls")), f"{where}: annotate it"
