"""Run the plan of a load: fetch its pieces, decode its objects, and return the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch.autograd.graph import increment_version

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch, synchronize
from aio_ckpt.checkpoint.foreign_items import check_zip
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.requests import ReadRequest
from aio_ckpt.errors import UnsafeObjectError
from aio_ckpt.leaves.objects import decode_object
from aio_ckpt.restore.load_plan import LoadPlan, check_trusted
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.restore.progress import NO_METER, Meter
from aio_ckpt.runtime.portal import run_blocking

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedValues:
    """Values that a load has read. Tensors of the template were filled in place."""

    values: dict[str, object] = field(default_factory=dict)
    """Tensors outside the template's own leaves, and objects, by name."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Names of the objects that need trust, and why."""
    skip_untrusted: bool = False
    """Whether such objects are left out."""
    bytes_read: int = 0
    """Bytes read from data files."""
    has_unchecked: bool = False
    """Whether bytes were read that no checksum covers."""

    @property
    def skipped(self) -> dict[str, str] | None:
        """``untrusted`` if such objects are left out, else None."""
        return self.untrusted if self.skip_untrusted else None

    def is_verified(self, *, verify: bool) -> bool:
        """Return whether all that was read was compared with checksums: not if ``verify`` is off."""
        return verify and not self.has_unchecked

    def joined_with(self, other: FetchedValues) -> FetchedValues:
        """Return the values of both reads of one load."""
        return FetchedValues(
            values=self.values | other.values,
            untrusted=self.untrusted | other.untrusted,
            skip_untrusted=self.skip_untrusted,
            bytes_read=self.bytes_read + other.bytes_read,
            has_unchecked=self.has_unchecked or other.has_unchecked,
        )


async def fetch_values(
    ctx: ReadContext,
    files: Files,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    requests: Sequence[ReadRequest],
    *,
    meter: Meter = NO_METER,
) -> FetchedValues:
    """Run ``requests``, which ``plan`` made, and decode the objects. ``meter`` counts the bytes of the requests.

    Raises:
        CorruptCheckpointError, ReadError: see :func:`aio_ckpt.checkpoint.fetch.fetch`.
        UnsafeObjectError: an object needs trust.
    """
    bytes_read = await fetch(
        files,
        requests,
        executor=ctx.executor,
        readers=ctx.readers,
        verify=ctx.verify,
        devices=plan.reads.devices,
        on_fetched=meter.add,
    )
    return await run_blocking(ctx.executor, _decode, ctx, checkpoint, plan, bytes_read)


def _decode(ctx: ReadContext, checkpoint: Checkpoint, plan: LoadPlan, bytes_read: int) -> FetchedValues:
    """Decode objects. Wait for the devices, and increment the version of tensors that were filled without torch."""
    values = dict(plan.values)
    untrusted: dict[str, str] = {}
    synchronize(plan.devices)
    increment_version(plan.reads.filled)
    has_unchecked = plan.reads.has_unchecked
    for name, data in plan.undecoded.items():
        if checkpoint.is_plain_dcp:
            has_unchecked |= not check_zip(name, data)
        try:
            values[name] = decode_object(data, name=name, trusted=ctx.trusted)
        except UnsafeObjectError as error:
            untrusted[name] = str(error)
    check_trusted(untrusted, skip_untrusted=plan.skip_untrusted)
    return FetchedValues(
        values=values,
        untrusted=untrusted,
        skip_untrusted=plan.skip_untrusted,
        bytes_read=bytes_read,
        has_unchecked=has_unchecked,
    )


def by_stored_name(checkpoint: Checkpoint, values: Mapping[str, T]) -> Mapping[str, T]:
    """Return ``values`` under the names that the checkpoint has for them, before any ``rename``."""
    if not checkpoint.names:
        return values
    return {checkpoint.stored_name(name): value for name, value in values.items()}
