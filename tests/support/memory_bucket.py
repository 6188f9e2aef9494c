"""An object store in memory, whose calls can fail, lose their answers, or end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from aio_ckpt.storage import object_store

Fault = Literal["", "failed", "lost", "dead"]
"""What happens to a call: nothing; it fails and does nothing; it is done, and its answer is lost; neither it nor any
later call is done."""
_CHANGES = ("put", "delete")
_READS = ("get", "head", "list", "list_with_delimiter")


class MemoryBucket:
    """The store of each URL while the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        self.changes: list[tuple[str, str]] = []
        """Calls that changed something, or should have: (name, key)."""
        self.calls: list[str] = []
        """Names of all calls."""
        self.choose: Callable[[str, str, int], Fault] = lambda *_: ""
        """Gets the name, the key and the number of a change; returns its fault."""
        self._is_dead = False
        self._put = obstore.put
        self._mutex = threading.Lock()
        monkeypatch.setattr(object_store, "open_store", lambda _: self.store)
        for name in (*_CHANGES, *_READS):
            monkeypatch.setattr(obstore, name, self._called(name, getattr(obstore, name)))

    def empty(self) -> None:
        """Begin anew, without a fault."""
        self.store = MemoryStore()
        self.changes.clear()
        self.revive()

    def revive(self) -> None:
        """End the fault: a new process begins."""
        self._is_dead = False
        self.choose = lambda *_: ""

    def keys(self) -> set[str]:
        return {each["path"] for batch in obstore.list(self.store) for each in batch}

    def replace(self, key: str, data: bytes) -> None:
        """Do what another process does."""
        self._put(self.store, key, data)

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def _called(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_fail(store: Any, key: Any = None, *args: Any, **options: Any) -> Any:
            fault: Fault = ""
            self.calls.append(name)
            if name in _CHANGES and store is self.store:
                shown = key if isinstance(key, str) else ",".join(key)
                with self._mutex:
                    self.changes.append((name, shown))
                    fault = "" if self._is_dead else self.choose(name, shown, len(self.changes) - 1)
                    self._is_dead = self._is_dead or fault == "dead"
            if self._is_dead or fault == "failed":
                raise GenericError(f"{name} {key}: connection refused")
            found = call(store, key, *args, **options) if key is not None else call(store, *args, **options)
            if fault == "lost":
                raise GenericError(f"{name} {key}: the answer was lost")
            return found

        return call_or_fail
