"""Shards of all ranks: the message of each rank, and the table in columns that the leader makes of them. Pure.

The leader of 10,000 ranks with 1,000 shards each has ten million shards: one Python object each would take minutes and
gigabytes. Therefore a message holds bytes that are equal on all ranks of one model (names, signatures), and numbers
that differ (offsets). Python code runs per rank, per distinct name and per distinct signature, never per shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from aio_ckpt.errors import DuplicateNameError, PeerFailedError, PlanChangedError
from aio_ckpt.format.constants import MAX_BYTES
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.tensor_columns import IntArray

SmallInts: TypeAlias = "npt.NDArray[np.int32]"
Tolerances: TypeAlias = "npt.NDArray[np.uint32]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"


# -- the message of a rank ---------------------------------------------------------------------------


class TensorSignature(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Shape and dtype of a shard, without its place in the tensor."""

    shape: tuple[int, ...]
    """Shape of the shard."""
    size: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: str
    """``str(torch.dtype)`` without ``torch.``."""


class ShardInfo(msgspec.Struct, frozen=True, gc=False):
    """Tensor item that one rank holds."""

    fqns: tuple[str, ...]
    """Every name of the item. Tied leaves share it."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    signature: TensorSignature
    tolerance: int = 0
    """Whether replicas may differ; see :class:`aio_ckpt.plan.differing_replicas.Tolerance`."""


class LocalPlan(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank: all that it holds."""

    names: bytes
    """msgpack: every name of each tensor item, in the order of its image."""
    signatures: bytes
    """msgpack: the distinct signatures, and which of them each item has."""
    offsets: bytes
    """Start of each item in its global tensor, one int64 per dimension, little-endian."""
    objects: bytes
    """msgpack: names of the leaves stored as objects, in order."""
    skeleton: bytes
    """Skeleton of its state, encoded."""
    tolerances: bytes
    """Tolerance of each item, uint32, little-endian."""

    @classmethod
    def of(cls, items: Sequence[ShardInfo], objects: Sequence[str], skeleton: bytes) -> LocalPlan:
        """Encode all that a rank holds."""
        signatures: dict[TensorSignature, int] = {}
        numbers = [signatures.setdefault(item.signature, len(signatures)) for item in items]
        encode = msgspec.msgpack.encode
        return cls(
            encode([item.fqns for item in items]),
            encode((list(signatures), numbers)),
            np.array([offset for item in items for offset in item.offsets], "<i8").tobytes(),
            encode(objects),
            skeleton,
            np.array([item.tolerance for item in items], "<u4").tobytes(),
        )


_NAMES: msgspec.msgpack.Decoder[tuple[tuple[str, ...], ...]] = msgspec.msgpack.Decoder(tuple[tuple[str, ...], ...])
_SIGNATURES: msgspec.msgpack.Decoder[tuple[tuple[TensorSignature, ...], tuple[int, ...]]] = msgspec.msgpack.Decoder(
    tuple[tuple[TensorSignature, ...], tuple[int, ...]]
)
_OBJECTS: msgspec.msgpack.Decoder[tuple[str, ...]] = msgspec.msgpack.Decoder(tuple[str, ...])


def object_names(plans: Sequence[LocalPlan]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the objects of each plan. Plans of equal bytes share one tuple.

    Raises:
        PeerFailedError: a plan is malformed; names the rank.
    """
    reader = _Reader()
    return tuple(reader.object_names(rank, plan) for rank, plan in enumerate(plans))


def intern(plans: Sequence[LocalPlan], known: Iterable[LocalPlan] = ()) -> list[LocalPlan]:
    """Return ``plans`` with equal bytes shared among them and with ``known``.

    So the names of a model are held once for 10,000 ranks, and a rank that plans the same anew takes no more memory.
    """
    seen: dict[bytes, bytes] = {}

    def kept(data: bytes) -> bytes:
        return seen.setdefault(data, data)

    def of_kept(plan: LocalPlan) -> LocalPlan:
        return LocalPlan(*map(kept, msgspec.structs.astuple(plan)))

    for plan in known:
        of_kept(plan)
    return [of_kept(plan) for plan in plans]


def malformed(rank: int, what: object) -> PeerFailedError:
    """Return the error of a message that no rank of this version sends."""
    return PeerFailedError(
        f"rank {rank} sent a plan that is none ({what}): run one version of aio_ckpt on all ranks",
        rank=rank,
        stage="agree",
    )


# -- the table of the leader -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTable:
    """Shards of all ranks. A row is one name of one item of one rank. Rows are in the order of the ranks' plans."""

    names: tuple[str, ...]
    """Every name of a tensor, in the order of its first row."""
    signatures: tuple[TensorSignature, ...]
    """Distinct signatures, in the order of their first rows."""
    signature_of_name: SmallInts
    """Per name, its first signature. All signatures of a name have the same global shape and dtype."""
    objects: tuple[tuple[str, ...], ...]
    """Per rank, the names of its objects."""
    starts: IntArray
    """Per rank, its first row; after the last rank, the number of rows."""
    rank: SmallInts
    """Per row, the rank that holds it."""
    name: SmallInts
    """Per row, the index into ``names``."""
    item: SmallInts
    """Per row, the index of the item in the plan of its rank."""
    signature: SmallInts
    """Per row, the index into ``signatures``."""
    is_tied: Flags
    """Per row, whether its item has other names, too."""
    tolerance: Tolerances
    """Per row, the tolerance of its item."""
    offsets: IntArray
    """Per row, the start of the shard in the tensor; padded with zeros to the most dimensions of any tensor."""
    shapes: IntArray
    """Per signature, the shape of the shard; padded with zeros."""
    sizes: IntArray
    """Per signature, the global shape; padded with zeros."""
    nbytes: IntArray
    """Per signature, the raw bytes of the shard."""

    @classmethod
    def of(cls, plans: Sequence[LocalPlan]) -> ShardTable:
        """Make the table of the messages of all ranks, by rank.

        Raises:
            PeerFailedError: a plan is malformed; names the rank.
            DuplicateNameError: two ranks give one name to values of different kind, dtype or shape.
            PlanChangedError: a shard begins outside of its tensor.
        """
        reader = _Reader()
        outlines = [reader.outline(rank, plan) for rank, plan in enumerate(plans)]
        objects = tuple(reader.object_names(rank, plan) for rank, plan in enumerate(plans))
        signature_of_name = _check_names(outlines, objects, reader)
        dims = max((len(signature.size) for signature in reader.signatures), default=0)
        signatures = tuple(reader.signatures)
        rows = [len(outline.name) for outline in outlines]
        held = cls(
            names=tuple(reader.names),
            signatures=signatures,
            signature_of_name=signature_of_name,
            objects=objects,
            starts=np.cumsum([0, *rows]),
            rank=np.repeat(np.arange(len(plans), dtype=np.int32), rows),
            name=_joined([outline.name for outline in outlines]),
            item=_joined([outline.item for outline in outlines]),
            signature=_joined([outline.signature for outline in outlines]),
            is_tied=np.concatenate([np.empty(0, np.bool_), *(outline.is_tied for outline in outlines)]),
            tolerance=_tolerances(plans, outlines),
            offsets=_offsets(plans, outlines, dims),
            shapes=padded([signature.shape for signature in signatures], dims),
            sizes=padded([signature.size for signature in signatures], dims),
            nbytes=np.array(
                [math.prod(signature.shape) * DTYPES[signature.dtype].itemsize for signature in signatures], np.int64
            ),
        )
        held.check_offsets()
        return held

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    def is_first(self, rows: IntArray) -> Flags:
        """Return, per row of ``rows`` (ascending), whether it is the first of them for its item."""
        item, rank = self.item[rows], self.rank[rows]
        first = np.ones(len(rows), np.bool_)
        first[1:] = (item[1:] != item[:-1]) | (rank[1:] != rank[:-1])
        return first

    def check_offsets(self) -> None:
        """Raise PlanChangedError for a shard that begins outside of its tensor."""
        outside = np.zeros(len(self.name), np.bool_)
        for dim in range(self.offsets.shape[1]):
            offset = self.offsets[:, dim]
            outside |= (offset < 0) | (offset > self.sizes[self.signature, dim])
        if outside.any():
            row = int(outside.argmax())
            signature = self.signatures[self.signature[row]]
            raise PlanChangedError(
                f"rank {self.rank[row]} holds a part of {self.names[self.name[row]]!r} that begins at "
                f"{self.offsets[row, : len(signature.size)].tolist()}, outside of its shape {list(signature.size)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outline:
    """Rows of ranks that have equal names and signatures, without the offsets of their shards."""

    name: SmallInts
    """Per row, the index into ``_Reader.names``."""
    item: SmallInts
    signature: SmallInts
    """Per row, the index into ``_Reader.signatures``."""
    is_tied: Flags
    dims: IntArray
    """Per item, its number of dimensions."""


class _Reader:
    """Decoder of plans. It decodes equal bytes once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.signatures: dict[TensorSignature, int] = {}
        self._outlines: dict[tuple[bytes, bytes], _Outline] = {}
        self._objects: dict[bytes, tuple[str, ...]] = {}

    def outline(self, rank: int, plan: LocalPlan) -> _Outline:
        """Return the rows of a plan without their offsets."""
        key = plan.names, plan.signatures
        if key not in self._outlines:
            try:
                self._outlines[key] = self._read(_NAMES.decode(plan.names), *_SIGNATURES.decode(plan.signatures))
            except (msgspec.MsgspecError, ValueError, IndexError) as error:
                raise malformed(rank, error) from error
        return self._outlines[key]

    def object_names(self, rank: int, plan: LocalPlan) -> tuple[str, ...]:
        found = self._objects.get(plan.objects)
        if found is None:
            try:
                found = self._objects[plan.objects] = _OBJECTS.decode(plan.objects)
            except msgspec.MsgspecError as error:
                raise malformed(rank, error) from error
            if len(set(found)) != len(found):
                raise malformed(rank, "an object twice")
        return found

    def _read(
        self, names: Sequence[tuple[str, ...]], signatures: Sequence[TensorSignature], numbers: Sequence[int]
    ) -> _Outline:
        flat = [name for fqns in names for name in fqns]
        if len(names) != len(numbers) or min(numbers, default=0) < 0:
            raise ValueError(f"{len(names)} items with {len(numbers)} signatures")
        if len(set(flat)) != len(flat) or not all(names):
            raise ValueError("an item without a name, or a name twice")
        for signature in signatures:
            _check_signature(signature)
        known = [self.signatures.setdefault(signature, len(self.signatures)) for signature in signatures]
        counts = [len(fqns) for fqns in names]
        item = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        return _Outline(
            name=np.array([self.names.setdefault(name, len(self.names)) for name in flat], np.int32),
            item=item,
            signature=np.array([known[number] for number in numbers], np.int32)[item],
            is_tied=np.array(counts, np.int64)[item] > 1,
            dims=np.array([len(signatures[number].size) for number in numbers], np.int64),
        )


def _check_signature(signature: TensorSignature) -> None:
    is_number = all(0 <= number <= MAX_BYTES for number in (*signature.shape, *signature.size))
    if len(signature.shape) != len(signature.size) or signature.dtype not in DTYPES or not is_number:
        raise ValueError(f"a shard of {signature}")
    if math.prod(signature.shape) * DTYPES[signature.dtype].itemsize > MAX_BYTES:
        raise ValueError(f"a shard of {signature}, which no memory holds")


def _joined(columns: Sequence[SmallInts]) -> SmallInts:
    return np.concatenate([np.empty(0, np.int32), *columns])


def padded(shapes: Sequence[tuple[int, ...]], dims: int) -> IntArray:
    """Return ``shapes`` as the rows of an array, padded with zeros to ``dims`` columns."""
    rows = np.zeros((len(shapes), dims), np.int64)
    for row, shape in zip(rows, shapes, strict=True):
        row[: len(shape)] = shape
    return rows


def _offsets(plans: Sequence[LocalPlan], outlines: Sequence[_Outline], dims: int) -> IntArray:
    """Return, per row, the offsets of its shard, padded with zeros to ``dims`` columns."""
    found = np.empty((sum(len(outline.name) for outline in outlines), dims), np.int64)
    places: dict[int, IntArray] = {}
    at = 0
    for rank, (plan, outline) in enumerate(zip(plans, outlines, strict=True)):
        if id(outline) not in places:
            begins = np.cumsum(outline.dims) - outline.dims
            dim = np.arange(dims)
            # Dimensions that a tensor lacks are taken from the zero that is appended to all numbers.
            place = np.where(dim < outline.dims[:, None], begins[:, None] + dim, outline.dims.sum())
            places[id(outline)] = place[outline.item]
        if len(plan.offsets) != 8 * outline.dims.sum():
            raise malformed(rank, f"{len(plan.offsets)} bytes of offsets")
        numbers = np.append(np.frombuffer(plan.offsets, "<i8"), 0)
        rows = len(outline.name)
        numbers.take(places[id(outline)], out=found[at : at + rows])
        at += rows
    return found


def _tolerances(plans: Sequence[LocalPlan], outlines: Sequence[_Outline]) -> Tolerances:
    """Return, per row, the tolerance of its item."""
    columns: dict[tuple[int, int], Tolerances] = {}  # ranks of one model share the bytes
    for rank, (plan, outline) in enumerate(zip(plans, outlines, strict=True)):
        key = id(plan.tolerances), id(outline)
        if key not in columns:
            if len(plan.tolerances) != 4 * len(outline.dims):
                raise malformed(rank, f"{len(plan.tolerances)} bytes of tolerances")
            columns[key] = np.frombuffer(plan.tolerances, "<u4")[outline.item]
    keys = [(id(plan.tolerances), id(outline)) for plan, outline in zip(plans, outlines, strict=True)]
    return np.concatenate([np.empty(0, np.uint32), *map(columns.__getitem__, keys)])


def _check_names(outlines: Sequence[_Outline], objects: Sequence[tuple[str, ...]], reader: _Reader) -> SmallInts:
    """Return, per name, its first signature.

    Raises:
        DuplicateNameError: two ranks give one name to values of different kind, dtype or shape.
    """
    signatures = tuple(reader.signatures)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind_of_signature = [kinds.setdefault((signature.dtype, signature.size), len(kinds)) for signature in signatures]
    names = tuple(reader.names)
    first: dict[str, tuple[int, int]] = {}
    holders: dict[str, int] = {}
    seen: set[int] = set()
    for rank, (outline, own) in enumerate(zip(outlines, objects, strict=True)):
        if id(outline) not in seen:
            for number, signature in zip(outline.name.tolist(), outline.signature.tolist(), strict=True):
                other, known_as = first.setdefault(names[number], (rank, signature))
                if kind_of_signature[known_as] != kind_of_signature[signature]:
                    shown = _shown(signatures[known_as]), _shown(signatures[signature])
                    raise _clash(names[number], (other, shown[0]), (rank, shown[1]))
        if id(own) not in seen:
            holders |= dict.fromkeys(own, rank)
        seen |= {id(outline), id(own)}
    clashing = first.keys() & holders.keys()
    if clashing:
        name = min(clashing)
        rank, signature = first[name]
        raise _clash(name, (rank, _shown(signatures[signature])), (holders[name], "object"))
    return np.array([first[name][1] for name in names], np.int32)


def _clash(name: str, *kinds: tuple[int, str]) -> DuplicateNameError:
    """Return the error for a name that two ranks give to different kinds, each given as (rank, kind)."""
    held = " and ".join(f"{kind} on rank {rank}" for rank, kind in sorted(kinds))
    return DuplicateNameError(f"{name!r} is {held}: name them apart, or wrap values of each rank's own in PerRank")


def _shown(signature: TensorSignature) -> str:
    return str((signature.dtype, signature.size))
