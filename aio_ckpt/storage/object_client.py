"""Client of an object store: its credentials, its retries and its limits of time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from datetime import timedelta
from typing import Any

from aio_ckpt.errors import ConfigError
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.object_errors import text_of

RETRY_SECS = 45
"""Time after which a request that fails is tried no more."""
REQUEST_SECS = 30
"""Obstore's limit of one try. Both limits together are less than the silence after which a writer is dead: a commit
that hangs must not come after the next writer has cleared the save."""
_RETRIES: Any = {
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    "max_retries": 10_000,  # the time alone counts: refused connections use up any small number in a third of it
    "retry_timeout": timedelta(seconds=RETRY_SECS),
}
_CREDENTIAL_LIFE = timedelta(minutes=10)
"""Time for which obstore takes credentials of boto3 to be valid; it asks for new ones 5 minutes earlier. boto3 gives
temporary ones that are valid for 10 minutes at least (botocore 1.44, ``RefreshableCredentials``)."""


def has_obstore() -> bool:
    """Return whether the library for object stores is installed."""
    return importlib.util.find_spec("obstore") is not None


def open_store(place: RemotePath) -> Any:
    """Return the store of a bucket. Its credentials, its region and its endpoint come from the environment.

    For S3, profiles of ``~/.aws`` count, too, which boto3 reads.

    Raises:
        ConfigError: obstore is missing, or refuses the URL.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise ConfigError(f"{place}: object stores need obstore: pip install 'aio-ckpt[remote]'") from error
    try:
        if place.is_in_memory:
            return MemoryStore()
        return from_url(place.bucket_url, retry_config=_RETRIES, **_s3_options(place))
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(f"{place}: {text_of(error)}") from error


def adopt_store(store: Any) -> Any:
    """Return a caller's store object for its whole bucket, with this module's limits of time, which a commit needs."""
    from obstore.store import MemoryStore

    if isinstance(store, MemoryStore):
        return store
    arguments, settings = store.__getnewargs_ex__()  # those of a pickle
    client_options = {**(settings.get("client_options") or {}), "timeout": timedelta(seconds=REQUEST_SECS)}
    changed = {"prefix": None, "retry_config": _RETRIES, "client_options": client_options}
    return type(store)(*arguments, **{**settings, **changed})


def _s3_options(place: RemotePath) -> dict[str, Any]:
    """Return the options of a store that speaks S3: the server checks the sum of each part, by a header that most know.

    boto3 finds the credentials, if it is installed: obstore looks for them in fewer places.
    """
    if not place.bucket_url.startswith("s3:"):
        return {}
    options: dict[str, Any] = {} if "AWS_CHECKSUM_ALGORITHM" in os.environ else {"checksum_algorithm": "SHA256"}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        with contextlib.suppress(ImportError, ValueError):  # no boto3; no credentials
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider(ttl=_CREDENTIAL_LIFE)
    return options
