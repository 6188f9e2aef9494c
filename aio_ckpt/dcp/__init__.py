"""Replacements for classes of ``torch.distributed.checkpoint`` (DCP): its saves and loads run on this package.

``Writer`` replaces ``FileSystemWriter``, ``Reader`` replaces ``FileSystemReader``, and ``AsyncStager`` replaces
``DefaultStager``. ``install`` and ``default`` do so for calls that name none of them. A checkpoint is a directory that
the caller names: ``Writer`` refuses or accepts one that is there, :mod:`aio_ckpt.commit.in_place` replaces it.

- ``writer`` saves by ``rank_save`` (``item_sources``: what a rank writes), ``reader`` loads by ``rank_load``
- ``async_save``: ``stager`` copies, ``resolved_planner`` plans before, ``uncopied_state`` is saved without a copy
- ``drop_in`` installs, and ``install_handle`` undoes it
- ``call_resources``: the threads of a call, and how ``budget_bytes`` is divided; ``replacement``: what all share
"""

from aio_ckpt.dcp.drop_in import Installation, default, install
from aio_ckpt.dcp.reader import Reader
from aio_ckpt.dcp.stager import AsyncStager
from aio_ckpt.dcp.writer import Writer

__all__ = ["AsyncStager", "Installation", "Reader", "Writer", "default", "install"]
