"""Keep staged snapshots in named shared memory, and commit those that a killed trainer left there.

In: the image of a save, and orphan segments. Out: committed checkpoints, or the reason why one cannot be committed.
``hooks``: what an engine calls; ``segment``: the shared memory; ``snapshot_record``: what a commit needs beside the
image; ``orphans`` finds what dead trainers left, ``decision`` tells which of it counts, ``recover`` commits it.
Optional: an engine reaches this package through ``hooks.Rescue`` alone, and ``aio-ckpt rescue`` through
``recover.rescue_root``. Imports everything up to ``commit``.
"""
