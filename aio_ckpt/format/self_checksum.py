"""The seal of a JSON document: a last member that holds the digest of all bytes before it. Pure.

A reader that knows no seals (format 1.0) sees one more member and ignores it.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

__all__ = ["is_sealed", "seal"]

_END = b"\n}\n"
_SEAL = re.compile(rb',\n "blake2b": "([0-9a-f]{64})"\n\}\n\Z')


def seal(document: bytes) -> bytes:
    """``document``, an object as :func:`msgspec.json.format` indents it by 1, with its seal."""
    body = document.removesuffix(_END)
    return b'%b,\n "blake2b": "%b"%b' % (body, _digest(body), _END)


def is_sealed(document: bytes) -> bool | None:
    """Whether these are the bytes that were sealed; None if they are a whole document without a seal."""
    found = _SEAL.search(document, max(len(document) - 128, 0))
    if found is not None:
        return found[1] == _digest(document[: found.start()])
    try:
        msgspec.json.decode(document)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).hexdigest().encode()
