"""A small model of what survives a power loss, fed with the calls that a storage recorded.

A file's bytes survive once they were fsynced after the last write. A name in a directory survives once that directory
was fsynced; until then the disk may hold any value that the name had since the last fsync. Renames are atomic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gated_storage import Call

from aio_ckpt.format.checkpoint_files import (
    data_file_name,
    rank_manifest_name,
    root_manifest_name,
    save_of_metadata,
)

CHECKPOINT = frozenset({".metadata", "aio_ckpt.*.json", "aio_ckpt.*.0.bin", "__*_0_0.distcp"})
"""Names of the files, with ``*`` for the id of the save."""


class NotDurableError(AssertionError):
    """A power loss at some point would break a promise."""


@dataclass(eq=False)
class File:
    data: bytes
    is_synced: bool


@dataclass(eq=False)
class Directory:
    names: dict[str, list[Node]] = field(default_factory=dict)
    """What each name may be after a power loss; the last is what it is now."""

    def now(self, name: str) -> Node:
        return self.names.get(name, [None])[-1]

    def after_loss(self, name: str) -> list[Node]:
        return self.names.get(name, [None])

    def put(self, name: str, node: Node) -> None:
        self.names.setdefault(name, [None]).append(node)

    def sync(self) -> None:
        for name, nodes in self.names.items():
            self.names[name] = nodes[-1:]

    def is_certain(self, name: str) -> bool:
        """Whether the name and the bytes behind it survive."""
        nodes = self.after_loss(name)
        return len(nodes) == 1 and isinstance(nodes[0], File) and nodes[0].is_synced


Node = File | Directory | None


class Disk:
    """Everything below ``top``, which was durable when the log begins."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._root = Directory()

    def directory(self, path: Path) -> Directory:
        node: Node = self._root
        for part in path.relative_to(self._top).parts:
            assert isinstance(node, Directory)
            if part not in node.names:
                node.names[part] = [Directory()]  # was there before the log began
            node = node.now(part)
        return node if isinstance(node, Directory) else Directory()

    def node(self, path: Path) -> Node:
        return self.directory(path.parent).now(path.name)

    def apply(self, call: Call) -> None:
        parent, name = self.directory(call.path.parent), call.path.name
        match call.name:
            case "make_dir":
                parent.put(name, Directory())
            case "make_dirs":
                pass  # durable: :meth:`directory` makes them
            case "create_data_file":
                parent.put(name, File(b"", is_synced=False))
            case "write_file" | "write_file without fsync":
                parent.put(name, File(call.data, is_synced=call.name == "write_file"))
            case "write" | "sync":
                file = parent.now(name)
                if isinstance(file, File):
                    file.is_synced = call.name == "sync"
            case "sync_dir":
                self.directory(call.path).sync()
            case "clone":
                assert call.other is not None
                self.directory(call.other.parent).put(call.other.name, parent.now(name))
            case "rename" | "replace":
                assert call.other is not None
                target = self.directory(call.other.parent)
                node = parent.now(name)
                parent.put(name, None)
                target.put(call.other.name, node)
            case "remove_file":
                parent.put(name, None)
            case "remove_tree":
                for directory in _below(parent.now(name)):
                    for inner in directory.names:
                        directory.put(inner, None)
                parent.put(name, None)
            case _:
                raise NotImplementedError(call.name)

    def check_survives(self, path: Path) -> None:
        """Every name on the way to ``path`` survives."""
        for part in [path, *path.parents]:
            if part == self._top:
                return
            nodes = self.directory(part.parent).after_loss(part.name)
            if len(nodes) != 1 or nodes[0] is None:
                raise NotDurableError(f"{part} may be gone after a power loss")


def _below(node: Node) -> Iterator[Directory]:
    if isinstance(node, Directory):
        yield node
        for nodes in node.names.values():
            yield from _below(nodes[-1])


def dropped(calls: Sequence[Call], index: int) -> list[Call]:
    """The log without one fsync or rename; of a small file, only its fsync is left out."""
    call = calls[index]
    stays = [replace(call, name="write_file without fsync")] if call.name == "write_file" else []
    return [*calls[:index], *stays, *calls[index + 1 :]]


def check_root_mode(calls: Sequence[Call], *, top: Path, final: Path, was_committed: bool = False) -> None:
    """A loss after any call leaves the step whole or invisible, never loses a committed one; the end is durable."""
    disk, moved = Disk(top), list[Path]()
    for call in calls:
        disk.apply(call)
        if call.name == "rename" and call.other == final:
            moved.append(call.path)
        seen = disk.directory(final.parent).after_loss(final.name)
        for node in seen:
            if node is not None:
                _check_whole(node, f"after {call}: a power loss leaves {final.name} torn")
            elif was_committed and final.name in disk.directory(final.parent).names:
                raise NotDurableError(f"after {call}: a power loss loses the committed step")
        was_committed = was_committed or (len(seen) == 1 and seen[0] is not None)
    disk.check_survives(final)
    for pending in moved:
        if len(disk.directory(pending.parent).after_loss(pending.name)) != 1:
            raise NotDurableError(f"a power loss may bring {pending} back, which the next writer clears")


def _check_whole(node: Node, message: str) -> None:
    """Whatever ``.metadata`` a loss leaves in a visible directory, it is durable, and so are the files of its save."""
    assert isinstance(node, Directory)
    for metadata in node.after_loss(".metadata"):
        save_id = save_of_metadata(metadata.data) if isinstance(metadata, File) and metadata.is_synced else None
        if save_id is None:
            raise NotDurableError(f"{message}: .metadata")
        names = [data_file_name(save_id, 0), rank_manifest_name(save_id, 0), root_manifest_name(save_id)]
        frozen = data_file_name(save_id, 0, is_frozen=True)
        names += [frozen] if frozen in node.names else []
        lost = [name for name in names if not node.is_certain(name)]
        if lost:
            raise NotDurableError(f"{message}: {lost}")


@dataclass(frozen=True)
class Generation:
    """One checkpoint written to a caller's directory."""

    metadata: bytes
    files: frozenset[str]
    """Names of the others."""


def check_in_place(calls: Sequence[Call], *, top: Path, directory: Path, generations: Sequence[Generation]) -> None:
    """Whatever ``.metadata`` a loss leaves, all that it speaks of is there and is of its own save."""
    disk = Disk(top)
    by_metadata = {generation.metadata: generation for generation in generations}
    for call in calls:
        disk.apply(call)
        held = disk.directory(directory)
        for node in held.after_loss(".metadata"):
            if not isinstance(node, File):
                continue
            generation = by_metadata[node.data]
            lost = sorted(name for name in generation.files if not held.is_certain(name))
            if not node.is_synced or lost:
                raise NotDurableError(f"after {call}: a power loss leaves a torn checkpoint: {lost}")
    disk.check_survives(directory / ".metadata")
    newest = disk.node(directory / ".metadata")
    if not isinstance(newest, File) or newest.data != generations[-1].metadata:
        raise NotDurableError("the newest checkpoint is not there")


def check_deletion(calls: Sequence[Call], *, top: Path, final: Path) -> None:
    """A loss after any call from the commit of the step on leaves it whole or gone; at the end it is gone."""
    disk, is_committed = Disk(top), False
    for call in calls:
        disk.apply(call)
        seen = disk.directory(final.parent).after_loss(final.name)
        is_committed = is_committed or (len(seen) == 1 and seen[0] is not None)
        for node in seen:
            if is_committed and node is not None:
                _check_whole(node, f"after {call}: a power loss leaves {final.name} torn")
    if not is_committed or disk.directory(final.parent).after_loss(final.name) != [None]:
        raise NotDurableError(f"{final.name} may be there after a power loss")
