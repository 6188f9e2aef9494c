"""Plans, staging memory and copy engines of all captures of one engine."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from concurrent.futures import Future

from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.errors import EngineClosedError
from aio_ckpt.leaves.objects import ObjectBytes, ObjectEncoder
from aio_ckpt.memory.arena import SharedMemoryFactory
from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.plan.frozen_leaves import FrozenLeaves
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage, PlannedSave
from aio_ckpt.reports import Target, step_of, title
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.snapshot.capture import CopyEngines
from aio_ckpt.snapshot.image import Image, arena_spec, lease_image
from aio_ckpt.snapshot.optimizer_guard import OptimizerGuards
from aio_ckpt.state.check_leaves import naming_all_faults
from aio_ckpt.state.flatten import FlatState, check_not_empty, flatten
from aio_ckpt.write.throttle import WriteThrottle

_MANY_OBJECTS = 20_000
"""More values than these that are no tensors are warned of: ``save()`` takes some tenths of a second to plan them."""
_log = logging.getLogger("aio_ckpt")


class CaptureResources:
    """Plans, staging memory and copy engines of one engine. Its caller holds the engine's lock."""

    def __init__(self, ctx: EngineContext, throttle: WriteThrottle, segments: SharedMemoryFactory | None) -> None:
        """``segments``: factory of shared memory that outlives the process."""
        config = ctx.config
        self._ctx = ctx
        self._throttle = throttle
        self.lifetime = LifetimeManager(
            budget_bytes=config.budget_bytes,
            ranks_on_host=ctx.members.on_host,
            rank=ctx.rank,
            executor=ctx.executor,
            debug=config.debug,
            segments=segments,
        )
        # A snapshot that can be rescued is one file.
        has_frozen_files = config.relink_limit > 1 and config.shm_path is None
        self.frozen = FrozenLeaves(is_trusting=config.frozen == "trusted") if has_frozen_files else None
        """Leaves that get a file of their own; None if there is no such file."""
        self.cache = PlanCache(
            world_size=ctx.world_size,
            gather_bytes=config.gather_bytes,
            budget_bytes=self.lifetime.measure_budget,
            frozen=self.frozen,
        )
        """The plan of the last save."""
        max_bytes = config.device_copy_bytes
        self.copy_engines = CopyEngines(None if max_bytes == "auto" else max_bytes)
        """Streams and buffers of all captures."""
        self.guards = OptimizerGuards()
        self._encoder = ObjectEncoder(trusted=config.trusted_objects)
        self._staging = StagingChoice(config.staging, is_named=config.shm_path is not None)
        self._has_logged_waves = self._has_logged_objects = False

    def plan(self, state: object) -> tuple[FlatState, PlannedSave]:
        """Flatten ``state``, and plan it or reuse the plan of the last save."""
        ctx = self._ctx
        flat = flatten(state, rank=ctx.rank)
        if not ctx.members.are_several:  # rank 0 alone may hold the whole state, and the others nothing
            check_not_empty(flat)
        with naming_all_faults(flat):
            return flat, self.cache.resolve(flat)

    def encode(self, flat: FlatState, planned: PlannedSave) -> ObjectBytes:
        """Encode the leaves of a state that are stored as objects."""
        if len(planned.objects) > _MANY_OBJECTS and not self._has_logged_objects:
            self._has_logged_objects = True
            ((most, _),) = Counter(name.partition(".")[0] for name, _ in planned.objects).most_common(1)
            text = (
                "the state holds %d values that are no tensors, most of them below %r. Each is stored by itself: it "
                "takes 0.5 KB, and 20 us of save() if their number has changed. A list of numbers, or json.dumps() of "
                "them all, is one value. Logged once"
            )
            _log.warning(text, len(planned.objects), most)
        with naming_all_faults(flat):
            return self._encoder.encode(planned.objects, flat.versions)

    def lease(
        self,
        planned: PlannedImage,
        objects: ObjectBytes,
        target: Target,
        deadline: Deadline,
        *,
        spare_bytes: int = 0,
    ) -> Image:
        """Lease the memory of the image of a step or path; see :func:`lease_image`."""
        return lease_image(
            planned,
            len(objects.region),
            self.lifetime,
            self._staging,
            timeout_secs=self.slot_timeout_secs(planned.plan.layout.chunk_bytes),
            limit_secs=deadline.left_secs(MAX_SECS),
            spare_bytes=spare_bytes,
            step=step_of(target),
        )

    def slot_timeout_secs(self, nbytes: int) -> float:
        """Return the longest time in which ``nbytes`` of staging memory become free, if the disk does not stall."""
        return self._ctx.config.stall_timeout_secs + self._throttle.longest_wait_secs(nbytes)

    def log_waves(self, image: Image, target: Target) -> None:
        """Warn once that a state is saved in waves, so that ``save()`` takes as long as the disk."""
        if not (image.is_whole or self._has_logged_waves):
            self._has_logged_waves = True
            config, ranks = self._ctx.config, self._ctx.members.on_host
            share = f" (the share of one of {ranks} ranks on this host)"
            log_step(
                logging.WARNING,
                step_of(target),
                self._ctx.rank,
                "%s: %d bytes are saved in waves, as budget_bytes=%d%s holds no more: save() returns when the last "
                "wave is captured, which takes as long as the storage needs for the others%s; raise budget_bytes where "
                "there is memory. Logged once",
                title(target),
                image.chunks[-1].stop,
                self.lifetime.budget_bytes,
                share if config.budget_bytes is None and ranks > 1 else "",
                "" if config.shm_path is None else ", and such a snapshot cannot be rescued (shm_path)",
            )

    def map_ahead(
        self, plan: ImagePlan, objects: ObjectBytes, *, arenas: int, spare_bytes: int = 0
    ) -> Future[None] | None:
        """Map an arena for the next save in the background; see :meth:`LifetimeManager.map_ahead`."""
        kind, budget_bytes = self._staging.kind(plan.source), self.lifetime.budget_bytes
        spec = arena_spec(plan, len(objects.region), kind, budget_bytes=budget_bytes, spare_bytes=spare_bytes)
        return self.lifetime.map_ahead(spec, arenas=arenas)

    def map_next(self, plan: ImagePlan, objects: ObjectBytes, spare_bytes: int) -> None:
        """Map the arena of the next save ahead, if saves may overlap. A failure is logged."""
        arenas = self._ctx.config.max_in_flight
        if arenas == 1:
            return
        with contextlib.suppress(EngineClosedError):
            mapped = self.map_ahead(plan, objects, arenas=arenas, spare_bytes=spare_bytes)
            if mapped is not None:
                mapped.add_done_callback(_log_failure)

    def release_devices(self) -> None:
        """Forget guarded optimizers and free the gather buffers. Arenas are freed once their last thread has ended."""
        self.guards.close()
        self.copy_engines.clear()


def _log_failure(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log.info("no arena was mapped ahead, the next save will try: %s", named(error))
