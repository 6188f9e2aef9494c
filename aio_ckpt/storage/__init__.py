"""Write durable files and read them.

In: paths and bytes. Out: files that are fsynced when a call says so, ranges of bytes, listings, renames and the
writer's lock. Each error holds its path and its errno. ``local`` is the file system, ``data_file`` reads and writes
large files, ``clone`` gives a file a second name, ``direct_io`` decides where O_DIRECT is tried. ``object_store`` is
the same over an object store: ``object_client`` opens it, with its credentials, retries and time limits,
``object_upload`` puts files in parts, ``object_directories`` stands for directories, ``object_errors`` makes OSErrors
of its errors. Imports ``runtime`` and ``format``.
"""

from aio_ckpt.storage.local import Storage

__all__ = ["Storage"]
