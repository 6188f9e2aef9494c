"""Apply loaded values to the template: set objects and call every ``load_state_dict``, once all is verified."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.match.match import Match
from aio_ckpt.match.takers import Fetched
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.names import listed

_log = logging.getLogger("aio_ckpt")


def prepare_apply(ctx: ReadContext, checkpoint: Checkpoint, found: Match, fetched: Fetched) -> Callable[[], None]:
    """Return a function that gives the template what the reads did not fill, and calls each ``load_state_dict``.

    All values are built before this returns, because building finds damage.

    Raises:
        CorruptCheckpointError: a value cannot be built.
    """
    puts = [taker.prepare(fetched) for taker in found.takers]

    def apply() -> None:
        is_modified = found.fills_template
        for put in puts:
            is_modified = put(is_modified)
        if ctx.rank == 0:  # the report of every rank lists its own
            _warn(ctx, checkpoint, found)

    return apply


def _warn(ctx: ReadContext, checkpoint: Checkpoint, found: Match) -> None:
    """Log what the load has left out."""
    if found.narrowed:
        _log.warning(
            "%s: cast=True: %s: values beyond the range of the template's dtype are not kept",
            checkpoint.path,
            first_of(found.narrowed),
        )
    if found.converted:
        _log.warning(
            "%s: load_state_dict converts to the module's dtype: %s", checkpoint.path, first_of(found.converted)
        )
    if found.mismatched:
        _log.warning(
            "%s: skip_mismatched=True: of another shape, and left as they are: %s",
            checkpoint.path,
            listed(found.mismatched),
        )
    if found.dropped:
        _log.warning(
            "%s: %d ranks saved, and %d load: the PerRank values of the others are not loaded: %s",
            checkpoint.path,
            checkpoint.world_size,
            ctx.world_size,
            listed(found.dropped),
        )
    if missing := found.all_missing:
        _log.warning("%s: allow_missing=True: lacks %s, left as they are", checkpoint.path, listed(missing))
    if found.unexpected:
        _log.warning(
            "%s: the template lacks %s; not loaded (strict=True refuses this)",
            checkpoint.path,
            listed(found.unexpected),
        )
