"""Clients of an object store: their credentials, their retries and their limits of time."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from aio_ckpt.errors import ConfigError
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.object_errors import text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of time of the requests of a client."""

    try_secs: int
    """Longest time of one try, from its connection to the last byte of its answer."""
    retry_secs: int
    """Time after which a request that fails is tried no more."""
    silence_secs: int | None = None
    """Longest time without a byte of the answer, from the begin of the try."""

    @property
    def options(self) -> dict[str, timedelta]:
        """Options of a client of obstore."""
        silence = {} if self.silence_secs is None else {"read_timeout": timedelta(seconds=self.silence_secs)}
        return {"timeout": timedelta(seconds=self.try_secs), **silence}

    @property
    def retry_config(self) -> Any:
        """Retries of a client of obstore."""
        return {
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
            "max_retries": 10_000,  # the time counts: refused connections use up any small number in a third of it
            "retry_timeout": timedelta(seconds=self.retry_secs),
        }


COMMITS = Limits(try_secs=30, retry_secs=45)
"""Limits of all small requests. Both together are less than the silence after which a writer is dead: a commit that
hangs must not come after the next writer has cleared the save."""
UPLOADS = Limits(try_secs=120, retry_secs=180)
"""Limits for parts of data files. Many of them share the network, and each is on the way for as long as all are."""
DOWNLOADS = Limits(try_secs=300, retry_secs=360, silence_secs=30)
"""Limits for ranges of data files. A silence tells nothing of an upload, whose answer comes after its last byte."""
_VARIABLES = {"S3Store": "AWS", "GCSStore": "GOOGLE", "AzureStore": "AZURE"}
"""Begin of the names of the variables for a store, by its class."""
_CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "user_agent",
)
"""Options of a client that the environment may hold, as ``AWS_ALLOW_HTTP``. Obstore looks there if it is given none."""
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
        ConfigError: obstore is missing, or refuses the URL; or boto3 cannot get the credentials that it is to find.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise ConfigError(f"{place}: object stores need obstore: pip install 'aio-ckpt[remote]'") from error
    if place.is_in_memory:
        return MemoryStore()
    options = _s3_options(place)
    try:
        return with_limits(from_url(place.bucket_url, **options), COMMITS)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(f"{place}: {text_of(error)}") from error


def with_limits(store: Any, limits: Limits) -> Any:
    """Return another client of the whole bucket of ``store``, with these limits of time."""
    from obstore.store import MemoryStore

    if isinstance(store, MemoryStore):
        return store
    arguments, settings = store.__getnewargs_ex__()  # those of a pickle
    given = settings.get("client_options") or _client_options(type(store).__name__)
    changed = {"prefix": None, "retry_config": limits.retry_config, "client_options": {**given, **limits.options}}
    return type(store)(*arguments, **{**settings, **changed})


def _client_options(kind: str) -> dict[str, str]:
    """Return the options of a client that the environment holds for the stores of a class."""
    variables = {name: f"{_VARIABLES[kind]}_{name.upper()}" for name in _CLIENT_OPTIONS}
    return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}


def _s3_options(place: RemotePath) -> dict[str, Any]:
    """Return the options of a store that speaks S3: the server checks the sum of each part, by a header that most know.

    boto3 finds the credentials, if it is installed: obstore looks for them in fewer places.

    Raises:
        ConfigError: boto3 cannot get them, as of a profile that does not exist.
    """
    if not place.bucket_url.startswith("s3:"):
        return {}
    options: dict[str, Any] = {} if "AWS_CHECKSUM_ALGORITHM" in os.environ else {"checksum_algorithm": "SHA256"}
    if "AWS_ACCESS_KEY_ID" not in os.environ and (provider := _credential_provider(place)) is not None:
        options["credential_provider"] = provider
    return options


def _credential_provider(place: RemotePath) -> Any:
    """Return what gets credentials by boto3; None if boto3 is not installed, or finds none."""
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    try:
        provider = Boto3CredentialProvider(ttl=_CREDENTIAL_LIFE)
        provider()  # those of a login (SSO) are got at the first use
    except ValueError:  # there are none
        return None
    except BotoCoreError as error:
        text = "boto3 cannot get the credentials of the store"
        remedy = "look at AWS_PROFILE and ~/.aws; for SSO, log in by aws sso login"
        raise ConfigError(f"{place}: {text}: {str(error).rstrip(': ')}: {remedy}") from error
    if "AWS_REGION" in os.environ:  # it counts before that of a profile
        provider.config.pop("region", None)
    return provider
