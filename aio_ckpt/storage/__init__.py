"""Write durable files and read them.

In: paths and bytes. Out: files that are fsynced when a call says so, ranges of bytes, listings, renames and the
writer's lock. Each error holds its path and its errno. ``local`` is the file system, ``data_file`` reads and writes
large files, ``clone`` gives a file a second name, ``direct_io`` decides where O_DIRECT is tried. Imports ``runtime``
and ``format``.
"""

from aio_ckpt.storage.local import Storage

__all__ = ["Storage"]
