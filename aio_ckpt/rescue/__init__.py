"""Keep staged snapshots in named shared memory, and commit those that a killed trainer left there.

In: orphaned segments. Out: committed checkpoints, or the reason why one cannot be committed. Optional: without
``shm_path`` nothing here runs. Imports everything up to ``commit``.
"""
