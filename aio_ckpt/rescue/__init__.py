"""Keep staged snapshots in named shared memory, and commit those that a killed trainer left there.

In: the image of a save, and orphan segments. Out: committed checkpoints, or the reason why one cannot be committed.
``hooks``: what an engine calls; ``segment``: the shared memory; ``snapshot_record``: what a commit needs beside the
image; ``found_segments``: those that trainers left, dead or alive; ``decision`` tells which are committed, and why
others are not; ``recover`` commits them. Optional: an engine reaches this package through ``hooks.Rescue`` alone, and
``aio-ckpt rescue`` through ``recover.rescue_root``. Imports everything up to ``commit``.
"""
