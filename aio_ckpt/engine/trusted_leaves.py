"""What a save captures if frozen leaves are trusted: all of its leaves, or those not known to be unchanged."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.newest_frozen_file import NewestFrozenFile
from aio_ckpt.errors import ReadError, StallError
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.save_plan import Plan, PlannedImage, PlannedSave, parameters_of
from aio_ckpt.plan.trusted_plan import TrustedPlan, Versions
from aio_ckpt.reports import Target, step_of, title
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.image import Image, image_bytes_of
from aio_ckpt.snapshot.sample import SAMPLE_BYTES, differing_item
from aio_ckpt.state.flatten import FlatState
from aio_ckpt.write.frozen_file import FrozenFile

_STAMP_SECS = 2.0
"""Time in which the storage must tell whether the known file is there. Else the save captures all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """What a save captures, and the memory for it."""

    planned: PlannedImage
    """Leaves to capture: all of the rank's share, or those of the main data file alone."""
    image: Image
    spare_bytes: int = 0
    """Bytes of the arena behind the image."""
    versions: Versions | None = None
    """Versions of the frozen leaves; None if they are not trusted."""
    trusted_file: FrozenFile | None = None
    """Committed file that holds the frozen leaves, which are not captured; None if all are captured."""


@dataclass(slots=True, kw_only=True)
class TrustedLeaves:
    """Frozen leaves of an engine with ``frozen="trusted"``. They may need no capture.

    Its caller holds the engine's lock.
    """

    ctx: EngineContext
    portal: Portal
    resources: CaptureResources
    newest_frozen: NewestFrozenFile
    _plan: TrustedPlan | None = None

    def lease(
        self, flat: FlatState, planned: PlannedSave, objects: ObjectBytes, target: Target, deadline: Deadline
    ) -> Leased:
        """Lease the memory for what a save has to capture; see :meth:`CaptureResources.lease`."""
        plan = planned.plan
        lease = functools.partial(self.resources.lease, objects=objects, target=target, deadline=deadline)
        trusted = self._trusted(plan)
        versions = Versions.of([planned.tensors[leaf] for leaf in trusted.leaves], parameters_of(flat))
        known = None if versions is None else self._known(plan, versions)
        needed = image_bytes_of(trusted.main, len(objects.region)) + SAMPLE_BYTES
        if known is not None and needed <= self.resources.lifetime.budget_bytes:
            main = PlannedImage(plan=trusted.main, tensors=planned.tensors, objects=planned.objects)
            image = lease(main, spare_bytes=SAMPLE_BYTES)
            try:
                if self._is_unchanged(planned, known, image, target):
                    return Leased(
                        planned=main, image=image, spare_bytes=SAMPLE_BYTES, versions=versions, trusted_file=known
                    )
            except BaseException:
                image.lease.close()
                raise
            image.lease.close()
        return Leased(planned=planned, image=lease(planned), versions=versions)

    def _trusted(self, plan: Plan) -> TrustedPlan:
        """Return what is captured of ``plan``. That of the newest save is kept."""
        known = self._plan
        if known is None or known.layout is not plan.layout:
            known = self._plan = TrustedPlan.of(plan)
        elif known.main.fingerprint is not plan.fingerprint:
            known = self._plan = known.at(plan.fingerprint)
        return known

    def _known(self, plan: Plan, versions: Versions) -> FrozenFile | None:
        """Return the committed file that holds the frozen leaves, if nobody has deleted or changed it since."""
        known = self.newest_frozen.holding(plan.layout, versions)
        if known is None:
            return None
        read_stamp = functools.partial(self.ctx.storage.stamp, known.path)
        try:
            stamp = self.portal.call(read_stamp, timeout=_STAMP_SECS, what="save()")
        except (StallError, ReadError):
            return None
        return known if stamp == known.stamp else None

    def _is_unchanged(self, planned: PlannedSave, known: FrozenFile, image: Image, target: Target) -> bool:
        """Compare a sample of the frozen leaves. Log an ERROR if one has changed, although its version has not."""
        layout, sums = planned.plan.layout, known.result.sums
        streams = self.resources.copy_engines.streams
        item = differing_item(layout.items[: layout.frozen_items], planned.tensors, sums, image, streams)
        if item is not None:
            log_step(
                logging.ERROR,
                step_of(target),
                self.ctx.rank,
                "%s: %r was changed by something that torch does not count in its _version, so that frozen='trusted' "
                "did not see it: this save writes it, but earlier ones, up to %s, may hold older values of it. "
                "Set frozen='compared'",
                title(target),
                item.fqns[0],
                known.path.parent.name,
            )
        return item is None
