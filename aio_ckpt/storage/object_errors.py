"""Errors of obstore, as errors of the system: their code, and a text without the query of any URL."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from aio_ckpt.errors import AioCkptError
from aio_ckpt.remote_path import is_panic

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_QUERY = re.compile(r"(https?://[^\s?]*)\?[^\s)\"']*")
"""URL with a query, which may hold a signature."""
_ANSWER = re.compile(
    r"status code: (?P<status>\d+ [^:]*):.*<Code>(?P<code>\w+)</Code>\s*<Message>(?P<message>[^<]*)</Message>",
    re.DOTALL,
)
_NO_CREDENTIALS = re.compile(r"credential provider: (?P<why>.+)")
"""Part of the first line of the error of a client whose Python function for credentials failed."""
_UNANSWERED = re.compile(
    r"performing \w+ (?P<server>https?://[^/\s]+)\S* in (?P<secs>\d+)\S*( - |, after \d+ retries).*HTTP error"
)
"""First line of the error of a request that got no answer until it was tried no more; some requests are tried once."""
_CAUSES = ("Connection refused", "dns error", "Connection reset", "operation timed out")
"""Parts of the text of such an error that tell why."""
_METADATA_SERVICE = "169.254.169.254"
"""Address that a client asks for credentials last, on the virtual machines of clouds."""
_CODES = {
    "NotFoundError": errno.ENOENT,
    "FileNotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.ESTALE,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.EOPNOTSUPP,
}
"""By name of an error of obstore, the code of the error that is raised."""
_REFUSED_TOKENS = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
"""Codes of S3 for credentials that are not valid any more, with status 400."""
_REMEDIES = {
    "RequestTimeTooSkewed": "set the clock of this host",
    "QuotaExceeded": "delete old steps, or raise the quota",
    "NotImplemented": "use a store that has conditional puts (If-None-Match, If-Match), or a root on a disk",
}
"""By code of S3, the remedy of a refusal that has nothing to do with credentials."""


class DoubtfulError(OSError):
    """Error of a call that may have been done: its answer was lost."""


def raising_os_errors(path: Path, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return ``fn(*args)``. Raise an error of obstore about ``path`` as OSError."""
    try:
        return fn(*args)
    except (AioCkptError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise as_os_error(error, path) from None
    except BaseException as error:
        if not is_panic(error):
            raise
        text = f"obstore cannot make the request ({error}): look at the endpoint: give http://HOST:PORT or https://HOST"
        raise OSError(errno.EINVAL, text, str(path)) from None


def as_os_error(error: Exception, path: Path) -> OSError:
    """Return an error of obstore about ``path`` as an error of the system."""
    code = code_of(error)
    text = os.strerror(code) if code else text_of(error)
    if code == errno.ESTALE:
        text = "another process has changed this object meanwhile"
    if code == errno.EACCES:
        answer = _ANSWER.search(str(error))  # a HEAD has none
        missing = _NO_CREDENTIALS.search(str(error))
        detail = f" ({answer['message']}, {answer['code']})" if answer else f" ({missing['why']})" if missing else ""
        remedy = "look at the credentials; they must be valid, and allowed to get, put, list and delete"
        if missing and "no running event loop" in missing["why"]:
            remedy = "give the store a credential_provider that is not asynchronous"
        text += f"{detail}: {_REMEDIES.get(answer['code'], remedy) if answer else remedy}"
    return OSError(code or errno.EIO, text, str(path))


def code_of(error: Exception) -> int | None:
    """Return the code of the system that tells the same; None if there is none."""
    code = getattr(error, "errno", None) or _CODES.get(type(error).__name__)
    answer = None if code else _ANSWER.search(str(error))  # obstore has no type for a listing that is refused
    is_refused = answer and (answer["status"].startswith(("401", "403")) or answer["code"] in _REFUSED_TOKENS)
    return errno.EACCES if is_refused else code


def text_of(error: Exception) -> str:
    """Return what an error of obstore tells a user: what the server answered, else its first line."""
    text = str(error).strip()
    if "builder error" in text:
        return (
            "obstore cannot make the request: if the endpoint begins with http:, set AWS_ALLOW_HTTP=true, or give the "
            'store client_options={"allow_http": True}'
        )
    if _METADATA_SERVICE in text:
        return (
            "no credentials were found: set those of the store in the environment, for S3 AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; profiles of ~/.aws count if boto3 is installed"
        )
    if answer := _ANSWER.search(text):
        remedy = _REMEDIES.get(answer["code"])
        text = f"the server answered {answer['status']}: {answer['message']} ({answer['code']})"
        return f"{text}: {remedy}" if remedy else text
    first_line = text.splitlines()[0] if text else type(error).__name__
    if unanswered := _UNANSWERED.search(first_line):
        why = next((cause for cause in _CAUSES if cause in text), "no answer")
        return (
            f"{unanswered['server']} did not answer for {unanswered['secs']} s ({why}): look at the network and at the "
            "endpoint, which is AWS_ENDPOINT_URL for S3"
        )
    if "redirect without LOCATION" in first_line:
        return "the bucket is in another region: set AWS_REGION to its region"
    remedy = ": the credentials may have expired, or AWS_REGION is another region" if "400 Bad Request" in text else ""
    return _QUERY.sub(r"\1", first_line).rstrip(": ") + remedy
