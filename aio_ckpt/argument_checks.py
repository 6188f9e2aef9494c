"""Checks of arguments and settings.

Each check raises a ConfigError that names the argument, its value and what to give.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown

MAX_SECS = 1e9
"""Longest time, in seconds, that every wait of the operating system accepts."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""Start of a URL. One slash is enough, because ``pathlib`` merges those of ``Path("s3://bucket")``."""
_SECRETS = re.compile(r"(:/+)[^/?#]*@|[?#].*", re.DOTALL)
"""Parts of a URL that may hold a password, a token or a signature."""
_COPIED_BY = {
    "s3": "aio-ckpt cp copies checkpoints",
    "gs": "aio-ckpt cp copies checkpoints",
    "az": "aio-ckpt cp copies checkpoints",
    "abfss": "aio-ckpt cp copies checkpoints",
    "hf": "hf download",
    "http": "curl",
    "https": "curl",
}
"""By scheme, a command that copies files."""


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is a number of seconds above 0 and at most ``MAX_SECS``."""
    # The value is only compared: a nan fails comparisons, and an int of a thousand digits cannot become a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECS:
        raise ConfigError(f"{name}={shown(value)}: give a finite number of seconds above 0")


def check_wait(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None (no limit) or a number of seconds.

    A negative number is allowed: it is the time left until a deadline that has passed.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"{name}={shown(value)}: give a number of seconds, or None for as long as it takes")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None or a ``kind``."""
    # A class itself is refused, because it has the methods of a protocol, too. ``isinstance`` alone does not do: from
    # Python 3.12 on it overlooks methods that a wrapper passes on.
    is_one = isinstance(value, kind) or (getattr(kind, "_is_protocol", False) and _has_members_of(value, kind))
    if value is not None and (isinstance(value, type) or not is_one):
        raise ConfigError(f"{name}={shown(value)}: give one of type {kind.__name__}, or leave it away")


def _has_members_of(value: object, protocol: type) -> bool:
    return all(hasattr(value, name) for name in vars(protocol) if not name.startswith("_"))


def check_path(name: str, value: object, *, of: str = "a checkpoint's directory") -> Path:
    """Return ``value``, called ``name``, as an absolute path, or raise ConfigError: it is no path ``of`` a thing."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not is_path(text):
        raise ConfigError(f"{name}={shown(value)}: give the path of {of}")
    try:
        return Path(local_name(text)).absolute()
    except ValueError as error:
        raise ConfigError(f"{name}={shown(without_secrets(text))}: {error}") from None


def check_one_of(step: object, path: object) -> None:
    """Raise ConfigError if both a step and a path are given."""
    if step is not None and path is not None:
        raise ConfigError(f"step={shown(step)} and path={shown(path)} each name a checkpoint: give one of them")


def local_name(text: str) -> str:
    """Return the path that a ``file:`` URL names; return any other path unchanged.

    Raises:
        ValueError: ``text`` is a URL that names no path of this machine, or begins with ``~``, which no system call
            expands. The message says what to give.
    """
    if text.startswith("~"):
        raise ValueError("a path that begins with ~, which only a shell expands: give os.path.expanduser(path)")
    match = _URL.match(text)
    if match is None:
        return text
    scheme = match[1].lower()
    if scheme != "file":
        tool = f" ({_COPIED_BY[scheme]})" if scheme in _COPIED_BY else ""
        raise ValueError(
            f"a URL ({scheme}:), and only local file systems are supported here: mount it and give the directory, or "
            f"copy the files{tool}"
        )
    if not text[match.end() :].startswith("/"):
        raise ValueError("a file URL has two slashes before its host: give file:///absolute/path, as a str")
    url = urlsplit(text)
    if url.netloc.lower() not in ("", "localhost"):
        raise ValueError(f"a file URL of the host {url.netloc!r}: give file:///absolute/path, of this machine")
    path = unquote(url.path, errors="surrogateescape")
    if url.query or url.fragment or not is_path(path):
        raise ValueError("no file URL of a path: give file:///absolute/path, with ? as %3F and # as %23")
    return path


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a local file or directory; None for what :func:`local_name` refuses, such as s3:."""
    try:
        return Path(os.path.abspath(local_name(os.fspath(path))))
    except ValueError:
        return None


def is_path(text: str) -> bool:
    """Return whether a file system can hold this name."""
    try:
        return bool(text.encode(errors="surrogateescape")) and "\0" not in text
    except UnicodeEncodeError:  # a lone surrogate
        return False


def check_callback(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None or a function that is done when it returns."""
    is_async = inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None))  # noqa: B004
    if value is not None and (not callable(value) or isinstance(value, type) or is_async):
        raise ConfigError(f"{name}={shown(value)}: give a plain function (no coroutine function) of one argument")


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is True or False: ``"no"`` would count as True."""
    if type(value) is not bool:
        raise ConfigError(f"{name}={shown(value)}: give True or False")


def is_among(value: object, allowed: tuple[str, ...]) -> bool:
    """Return whether ``value`` is one of the strings ``allowed``."""
    # The type is checked first, because an array would be compared element by element.
    return isinstance(value, str) and value in allowed


def without_secrets(text: str) -> str:
    """Return a URL without its user, its password and its query; any other text as it is."""
    return _SECRETS.sub(r"\1", text) if _URL.match(text) else text
