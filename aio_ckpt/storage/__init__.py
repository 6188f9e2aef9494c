"""Write durable files and read them.

In: paths and bytes. Out: files that are fsynced when a call says so, ranges of bytes, listings, renames and the
writer's lock. Each error holds its path and its errno. ``local`` is the file system, ``data_file`` reads and writes
large files, ``clone`` gives a file a second name or tells that it cannot, ``direct_io`` decides where O_DIRECT is
tried. ``object_store`` is the same over an object store: ``object_client`` opens it, with its credentials, retries and
time limits, ``object_upload`` puts files in parts of a size that it chooses, ``object_directories`` stands for
directories, ``object_errors`` makes OSErrors of its errors. ``durability`` is fsync; ``root_lock`` keeps other writers
out; ``mounts`` tells network file systems, and whose locks keep other hosts out; ``freshness`` asks those again that
answer with old listings. ``small_files`` reads ``.metadata`` and the root manifest; ``paths`` checks what a user gives;
``directories`` makes directories; ``os_errors`` translates errors of the system, with remedies. ``probe`` and
``probe_peer`` try a directory. Imports ``runtime``, ``format`` and ``config``.
"""
