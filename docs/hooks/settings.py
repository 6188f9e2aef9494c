"""Render the settings of ``EngineConfig`` into docs/configuration.md, from the dataclass itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from aio_ckpt import EngineConfig, KeepBest, Mirror

FIRST = "<!-- settings: first -->"
"""Replaced by the settings that people change first."""
REST = "<!-- settings: rest -->"
"""Replaced by all other settings, in the order of the dataclass."""
OTHERS = {"<!-- settings: keep_best -->": KeepBest, "<!-- settings: mirror -->": Mirror}
"""Each replaced by the fields of a type."""
FIRST_NAMES = ("keep_last", "device_copy_bytes", "when_busy", "budget_bytes", "stall_timeout_secs")
"""The five settings that people change first."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marks of a page. mkdocs calls this for every page."""
    if FIRST not in markdown:
        return markdown
    rest = [name for name in setting_names() if name not in FIRST_NAMES]
    markdown = markdown.replace(FIRST, rendered(EngineConfig, FIRST_NAMES))
    markdown = markdown.replace(REST, rendered(EngineConfig, rest))
    for mark, kind in OTHERS.items():
        markdown = markdown.replace(mark, rendered(kind, [field.name for field in dataclasses.fields(kind)]))
    return markdown


def setting_names() -> list[str]:
    """Return the names of all settings, in the order of the dataclass."""
    return [field.name for field in dataclasses.fields(EngineConfig)]


def rendered(kind: type, names: list[str] | tuple[str, ...]) -> str:
    """Return the Markdown of these fields: one heading each, then type, default and docstring."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints, docstrings = get_type_hints(kind), _docstrings(kind)
    parts = []
    for name in names:
        default = fields[name].default
        shown = "required" if default is dataclasses.MISSING else f"default `{_shown(default)}`"
        heading = f"### `{name}` {{ #{kind.__name__}.{name} }}"
        parts.append(f"{heading}\n\n{_type_of(hints[name])}, {shown}\n\n{docstrings[name]}\n")
    return "\n".join(parts)


def _docstrings(kind: type) -> dict[str, str]:
    """Return the string literal below each field. Fail for a field without one: every setting is documented."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            raise TypeError(f"{kind.__name__}.{statement.target.id}: give the field a docstring")
        text = inspect.cleandoc(str(following.value.value))
        found[statement.target.id] = re.sub(r"``(.+?)``", r"`\1`", text)
    return found


def _type_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_type_of, get_args(hint)))
    return "`None`" if hint is type(None) else f"`{hint.__name__}`"


def _shown(value: object) -> str:
    if type(value) is int and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} << 20"
    return repr(value).replace("'", '"')
