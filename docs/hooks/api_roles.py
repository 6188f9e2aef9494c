"""Show Sphinx roles of docstrings (``:class:`~a.b.C```) as plain code on the API page."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):<code>~?(?:aio_ckpt(?:\.\w+)*\.)?([^<]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Rewrite the rendered page. mkdocs calls this for every page."""
    return _ROLE.sub(r"<code>\1</code>", html)
