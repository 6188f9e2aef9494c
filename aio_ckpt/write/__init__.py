"""Write an image to its data files.

In: an ``Image``. Out: a ``WriteResult``: the data file is durable, its checksums are known, and the write rate was kept
below the limit. ``writer`` sums each block (of ``format.constants.BLOCK_BYTES``) and writes the chunks, at most as many
at once as its caller says (``EngineConfig.workers``), for a ``part`` of a save; ``throttle`` limits the rate.
``frozen_file`` clones the file of what did not change (``write_frozen``, or ``write_trusted`` if it was not captured)
or, if the file system cannot, writes it. ``full_disk`` explains an error of a full disk. Imports everything up to
``snapshot``.
"""
