"""Rendezvous: which engine of each rank meets which ones of the others. Nothing here waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from aio_ckpt.ranks.store_keys import Store, found

__all__ = ["Rendezvous", "companions", "without"]

_QUEUE = "queue"


class Rendezvous:
    """Where the engines of one root wait for each other, in the order in which each process made them.

    A queue in the store of all ranks. The leader's engine takes out those that come with it, and tells each where to
    go on; whoever gives up takes itself out. So nothing that was left by a process that died, or by a process group
    that is gone, is taken for one of those who meet: each has a name of its own, and is answered by that name.
    """

    def __init__(self, store: Store, *, world_size: int, name: str) -> None:
        self._store = store
        self._world_size = world_size
        self._name = name
        self._told = b""
        self._has_answered = False
        self._party: Mapping[int, str] | None = None

    def enter(self, rank: int, world: str) -> None:
        """Stand in the queue behind those that this process has made before; ``world``: see :func:`companions`."""
        self._store.append(_QUEUE, f"{rank} {world} {self._name}\n")

    def here(self) -> dict[int, str]:
        """Who stands here with this engine, by rank."""
        return companions(self._queue(), self._name)

    def claim(self) -> Mapping[int, str] | None:
        """The leader's: take all out who go on with this engine, once one of each rank is here."""
        self._party = self._party or self._take_out(self._world_size)
        return self._party

    def dismiss(self, *, withdraws_alone: bool) -> tuple[Mapping[int, str], bool]:
        """The leader's, who gives up: take all out who have come. Who they are, and whether it had claimed them.

        ``withdraws_alone``: they wait for another one.
        """
        if self._party is not None:
            return self._party, True
        party = {} if withdraws_alone else self._take_out(0) or {}
        self.withdraw()
        return party, False

    def withdraw(self) -> bool:
        """Take this engine out alone; False if the leader has taken it out."""
        while self._name in (queue := self._queue()):
            if self._put(queue, without(queue, [self._name])):
                return True
        return False

    def answer(self, names: Iterable[str], data: bytes) -> None:
        """The leader's: tell those that were taken out; once, for whoever has heard it looks no more."""
        if not self._has_answered:
            self._has_answered = True
            for name in names:
                self._store.set(f"{name}/out", data)

    def answered(self) -> bytes | None:
        """What this engine is told; None: nothing yet."""
        if not self._told:
            self._told = found(self._store, f"{self._name}/out")
            if self._told:
                self._store.delete_key(f"{self._name}/out")
        return self._told or None

    def _take_out(self, count: int) -> Mapping[int, str] | None:
        while True:
            queue = self._queue()
            party = companions(queue, self._name)
            if len(party) < count:
                return None
            if self._put(queue, without(queue, party.values())):
                return party

    def _queue(self) -> str:
        return found(self._store, _QUEUE).decode()

    def _put(self, old: str, new: str) -> bool:
        return bytes(self._store.compare_set(_QUEUE, old, new)).decode() == new


def companions(queue: str, name: str) -> dict[int, str]:
    """Who stands in ``queue`` at the place that ``name`` has among those of its rank: a name for each rank.

    Each line is a rank, its world (a process, and the process group that it is in) and a name. What a rank has
    entered in an earlier world counts no more.
    """
    lines = [line.split(" ") for line in queue.splitlines()]
    newest = {rank: world for rank, world, _ in lines}
    names: dict[int, list[str]] = {}
    for rank, world, other in lines:
        if newest[rank] == world:
            names.setdefault(int(rank), []).append(other)
    place = next((each.index(name) for each in names.values() if name in each), None)
    return {} if place is None else {rank: each[place] for rank, each in names.items() if len(each) > place}


def without(queue: str, names: Collection[str]) -> str:
    """``queue``, less those that are named."""
    return "".join(line for line in queue.splitlines(True) if line.split()[2] not in names)
