"""The checkpoint engine: every call of a user, from its first check to its report.

In: calls of ``save``, ``load`` and ``close``. Out: tickets and reports. Each save and each load runs here through the
packages below; the engine alone knows their order. ``in_flight`` holds the saves, their waits, and their end by Ctrl-C;
``load`` shows the stages of a load. Imports all packages below; never a face.
"""

from aio_ckpt.engine.engine import CheckpointEngine

__all__ = ["CheckpointEngine"]
