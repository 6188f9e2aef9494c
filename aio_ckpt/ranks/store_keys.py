"""StoreKeys: what the ranks of one engine write into their store, and when it goes again. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from aio_ckpt.ranks.messages import REPLIES, Heartbeat, Reply

__all__ = ["Store", "StoreKeys", "found"]

Store: TypeAlias = Any
"""``torch.distributed.Store``, whose stubs know neither ``append`` nor values of bytes."""

_NO_VALUE = "no value"
_WORDS_KEPT = 256
"""A call may ask again for a word that it has taken, as it ends; many calls may be under way."""

_TOLD_LOOKED_AT = 16
"""From so many topics on the leader looks which of them are still there, and again when they have doubled."""


class StoreKeys:
    """The keys of one engine in a store of all ranks. Only ever called in one thread.

    Invariant: the keys of a topic stay until every rank has taken the leader's word on it, however late it comes; the
    last one to take it deletes them. So each rank takes a word once, and remembers it.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, Reply] = {}
        self._told: list[str] = []
        self._sent: set[str] = set()
        self._looks_at = _TOLD_LOOKED_AT

    # -- topics ---------------------------------------------------------------------------------------

    def send(self, topic: str, data: bytes, *, wakes: bool) -> None:
        """Append a message for the leader, who looks at them when all are there, or one ``wakes`` it."""
        store = self._store
        self._sent.add(topic)
        store.append(f"{topic}/in", data)
        if store.add(f"{topic}/n", 1) == self._world_size - 1 or wakes:
            store.set(f"{topic}/woken", "1")

    def is_woken(self, topic: str) -> bool | None:
        """Whether the leader is to look; None: not yet."""
        return True if self._store.check([f"{topic}/woken"]) else None

    def messages(self, topic: str) -> bytes:
        """All that was sent so far."""
        return found(self._store, f"{topic}/in")

    def tell(self, topic: str, word: Reply, each: Sequence[bytes]) -> None:
        """The leader's word, or what it tells ``each`` rank instead; nothing if it was told before."""
        if topic in self._known:
            return
        store = self._store
        for rank, data in enumerate(each):
            if rank != self._rank:
                store.set(f"{topic}/out/{rank}", data)
        store.set(f"{topic}/out", msgspec.msgpack.encode(word))
        self._remember(topic, word)
        self._told.append(topic)
        if len(self._told) >= self._looks_at:
            self._told = self._untaken()
            self._looks_at = 2 * len(self._told) + _TOLD_LOOKED_AT

    def word(self, topic: str) -> Reply | None:
        """The leader's word, with what it tells this rank; None if it is not out."""
        store = self._store
        data = b"" if topic in self._known else found(store, f"{topic}/out")
        if not data:
            return self._known.get(topic)
        word = REPLIES.decode(data)
        if word.is_each:
            word = msgspec.structs.replace(word, common=found(store, f"{topic}/out/{self._rank}"))
            store.delete_key(f"{topic}/out/{self._rank}")
        self._remember(topic, word)  # in this thread: whoever waits for it may have been cancelled
        if store.add(f"{topic}/taken", 1) == self._world_size - 1:
            self._delete_topic(topic)
        return word

    def _remember(self, topic: str, word: Reply) -> None:
        self._sent.discard(topic)
        self._known[topic] = word
        if len(self._known) > _WORDS_KEPT:
            del self._known[next(iter(self._known))]

    def _untaken(self) -> list[str]:
        return [topic for topic in self._told if self._store.check([f"{topic}/out"])]

    def _delete_topic(self, topic: str) -> None:
        for key in ("in", "n", "woken", "out", "taken"):
            self._store.delete_key(f"{topic}/{key}")

    # -- signs of life, flags -------------------------------------------------------------------------

    def beat(self, beat: Heartbeat) -> None:
        """This rank lives."""
        self._store.set(f"alive/{self._rank}", msgspec.msgpack.encode(beat))

    def forget_beat(self) -> None:
        """This rank goes on elsewhere."""
        self._store.delete_key(f"alive/{self._rank}")

    def beats(self, ranks: Sequence[int]) -> list[bytes]:
        """The last sign of life of each; empty where there was none."""
        return [found(self._store, f"alive/{rank}") for rank in ranks]

    def raise_flag(self, name: str) -> None:
        """For good."""
        self._store.append("flags", f"{name}\n")

    def is_raised(self, name: str) -> bool:
        """Whether any rank has raised it."""
        return name.encode() in found(self._store, "flags").splitlines()

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This rank reads and writes nothing more. The last one to leave clears the store."""
        store = self._store
        rest = [*self._untaken(), *self._sent]
        if rest:
            store.append("rest", "".join(f"{topic}\n" for topic in rest))
        if store.add("left", 1) == self._world_size:
            self._clear()

    def have_all_left(self) -> bool | None:
        """Whether the store was cleared, after this rank has left; None: not yet."""
        return None if self._store.check(["left"]) else True

    def _clear(self) -> None:
        store, ranks = self._store, range(self._world_size)
        for topic in found(store, "rest").decode().splitlines():
            word = found(store, f"{topic}/out")
            if word and REPLIES.decode(word).is_each:
                for rank in ranks:
                    store.delete_key(f"{topic}/out/{rank}")
            self._delete_topic(topic)
        for key in (*(f"alive/{rank}" for rank in ranks), "flags", "rest", "left"):
            store.delete_key(key)


def found(store: Store, key: str) -> bytes:
    """The value; empty if there is none. In one question: ``get`` would wait for a key that was deleted since."""
    value = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))  # what is not there is set by an empty one alone
    return b"" if value == _NO_VALUE.encode() else value
