"""Places in an object store, as paths: ``s3://bucket/run/step_000000100``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from aio_ckpt.argument_checks import check_path
from aio_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore
else:

    class ObjectStore:
        """Store object of obstore: ``S3Store``, ``GCSStore``, ``AzureStore`` or ``MemoryStore``."""


Place: TypeAlias = str | os.PathLike[str] | ObjectStore
"""What an engine takes for the place of its checkpoints."""
SCHEMES = ("s3", "gs", "az", "abfss", "memory")
"""Schemes of URLs that name an object store."""
_WRITTEN_AS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "abfss"}
"""Schemes that other programs have for these stores."""
_BUCKETS = {"S3Store": ("s3", "bucket"), "GCSStore": ("gs", "bucket"), "AzureStore": ("az", "container_name")}
"""By class of a store object: its scheme, and the name of the bucket in its ``config``."""
_ONE_SLASH = re.compile(rf"^({'|'.join(SCHEMES)}):/(?!/)")
"""Begin of a URL of which ``pathlib`` has merged the slashes."""
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<bucket>[^/?#]+)(?P<key>[^?#]*)", re.IGNORECASE)


class RemotePath(PosixPath):
    """Place in an object store. It is joined and taken apart like any path, and no call of the system takes it.

    Its text is the URL. It holds no credentials: a store gets them from the environment.
    """

    __slots__ = ()

    @classmethod
    def of(cls, url: str) -> RemotePath | None:
        """Return the place that ``url`` names; None if it names none in an object store.

        Raises:
            ValueError: it names no bucket, or holds credentials or a query. The message does not repeat them.
        """
        scheme, separator, _ = url.partition("://")
        scheme = scheme.lower()
        if separator and scheme in _WRITTEN_AS:
            raise ValueError(f"a URL ({scheme}:): give {_WRITTEN_AS[scheme]}://BUCKET/PATH")
        if not separator or scheme not in SCHEMES:
            return None
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(f"no place in a bucket: give {scheme}://BUCKET/PATH, without a query")
        if ":" in match["bucket"] or ("@" in match["bucket"] and scheme != "abfss"):
            raise ValueError("a URL with credentials: give them by the environment, as the store's own tools take them")
        if {".", ".."} & {*match["key"].split("/")}:
            raise ValueError("a URL with . or .. in it: give the place itself")
        if "\\" in match["key"]:
            raise ValueError("a URL with a backslash, which some stores take for a slash: give another place")
        return cls(f"{scheme}:/{match['bucket']}", *[part for part in match["key"].split("/") if part])

    @property
    def bucket_url(self) -> str:
        """URL of the bucket."""
        return f"{self.parts[0]}//{self.parts[1]}"

    @property
    def is_in_memory(self) -> bool:
        """Whether it is in the memory of one engine."""
        return self.parts[0] == "memory:"

    @property
    def key(self) -> str:
        """Name below the bucket; empty for the bucket itself."""
        return "/".join(self.parts[2:])

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace(":/", "://", 1) if self.parts[:1] and self.parts[0].endswith(":") else text

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is in an object store: no call of the system takes it")

    def iterdir(self) -> NoReturn:
        """Refuse: Python 3.14 would list a local directory of this text."""
        self.__fspath__()

    def absolute(self) -> RemotePath:
        """Return it as it is."""
        return self

    def is_absolute(self) -> bool:
        """Return whether it names a bucket."""
        return self.parts[:1] != () and self.parts[0].endswith(":")


def place_of(name: str, value: Place) -> str | os.PathLike[str]:
    """Return the place of a store object, called ``name``: its bucket and its prefix. Return any other value as it is.

    Raises:
        ConfigError: the store is of another kind, or names no bucket.
    """
    stores = sys.modules.get("obstore.store")  # if it was never imported, nothing is a store object
    if stores is None or not isinstance(value, stores.ObjectStoreMethods):
        return value  # type: ignore[return-value]
    if isinstance(value, stores.MemoryStore):
        return RemotePath("memory:/store", f"{id(value):x}")
    for kind, (scheme, bucket) in _BUCKETS.items():
        if isinstance(value, getattr(stores, kind)) and (place := _config_of(name, value).get(bucket)):
            return RemotePath(f"{scheme}:/{place}", *filter(None, (value.prefix or "").split("/")))
    given = ", ".join(_BUCKETS)
    raise ConfigError(
        f"{name}={type(value).__name__}: give a store object that names a bucket ({given}), a MemoryStore, or a path"
    )


def _config_of(name: str, store: ObjectStore) -> Mapping[str, Any]:
    try:
        return store.config  # type: ignore[union-attr]
    except BaseException as error:
        if not is_panic(error):
            raise
        text = "obstore cannot tell its settings: give those of the client, such as allow_http, in client_options"
        raise ConfigError(f"{name}={type(store).__name__}: {text}") from None


def is_panic(error: BaseException) -> bool:
    """Return whether ``error`` is a panic of obstore, which is no ``Exception``, and whose class nothing exports."""
    return type(error).__name__ == "PanicException"


def check_place(name: str, value: object, *, of: str = "a checkpoint's directory") -> Path:
    """Return ``value``, called ``name``, as an absolute path or as a place in an object store.

    Raises:
        ConfigError: it is no path, or a URL of something else.
    """
    return find_remote(name, value) or check_path(name, value, of=of)


def find_bucket(name: str, value: object) -> RemotePath | None:
    """Return :func:`find_remote`, but None for ``memory://``, which other libraries know as a memory of the process."""
    place = find_remote(name, value)
    return None if place is None or place.is_in_memory else place


def find_remote(name: str, value: object) -> RemotePath | None:
    """Return ``value``, called ``name``, as a place in an object store; None if it is none.

    Raises:
        ConfigError: it is the URL of an object store, but names no place in a bucket, or holds credentials.
    """
    if isinstance(value, RemotePath):
        return value
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    try:
        return RemotePath.of(_ONE_SLASH.sub(r"\1://", text)) if isinstance(text, str) else None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
