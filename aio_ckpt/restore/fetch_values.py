"""Run the plan of a load: fetch its pieces, decode its objects, and return the values."""

from __future__ import annotations

from collections.abc import Mapping

from torch.autograd.graph import increment_version

from aio_ckpt.checkpoint.catalog import StoredObject
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch, synchronize
from aio_ckpt.checkpoint.foreign_items import check_zip
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import UnsafeObjectError
from aio_ckpt.leaves.objects import decode_object, is_immutable
from aio_ckpt.match.takers import Fetched
from aio_ckpt.message_texts import first_of
from aio_ckpt.restore.plan_fills import FillPlan
from aio_ckpt.runtime.portal import run_blocking


async def fetch_values(
    ctx: ReadContext, files: Files, checkpoint: Checkpoint, plan: FillPlan, fetched: Fetched
) -> None:
    """Run the requests of ``plan``, decode the objects, and add the values to ``fetched``.

    Raises:
        CorruptCheckpointError, ReadError: see :func:`aio_ckpt.checkpoint.fetch.fetch`.
        UnsafeObjectError: an object needs trust.
    """
    fetched.bytes_read += await fetch(
        files,
        plan.requests,
        executor=ctx.executor,
        readers=ctx.config.workers,
        verify=ctx.verify,
        devices=plan.pieces.devices,
        on_fetched=ctx.meter.add,
    )
    await run_blocking(ctx.executor, _decode, ctx, checkpoint, plan, fetched)


def _decode(ctx: ReadContext, checkpoint: Checkpoint, plan: FillPlan, fetched: Fetched) -> None:
    """Decode objects. Wait for the devices, and increment the version of tensors that were filled without torch."""
    synchronize(plan.pieces.devices)
    increment_version(plan.pieces.filled)
    fetched.values |= plan.values
    fetched.has_unchecked |= plan.pieces.has_unchecked or not ctx.verify
    shared: dict[StoredObject, object] = {}
    for name, stored in plan.objects.items():
        if stored in shared:
            fetched.values[name] = shared[stored]
            continue
        data = plan.undecoded.bytes_of(stored)
        if checkpoint.is_plain_dcp:
            fetched.has_unchecked |= not check_zip(name, data)
        try:
            value = fetched.values[name] = decode_object(data, name=name, trusted=ctx.config.trusted_objects)
        except UnsafeObjectError as error:
            fetched.untrusted[name] = str(error)
        else:
            if is_immutable(value):
                shared[stored] = value
    if fetched.untrusted and not fetched.skip_untrusted:
        raise _unsafe(fetched.untrusted)


def _unsafe(untrusted: Mapping[str, str]) -> UnsafeObjectError:
    """Return the error that names the objects that need trust."""
    (_, why), *more = untrusted.items()
    if more:
        why += f" (and so it is with {len(more)} others: {first_of([repr(name) for name, _ in more])})"
    return UnsafeObjectError(why)
