"""Turn written files into a durable, visible checkpoint directory, and maintain those directories.

In: write results. Out: a published directory, the list of committed steps, and what was removed.

- a commit: ``manifests`` renders what ``format`` defines; ``publish`` renames a directory into place, ``publish_files``
  single files, ``in_place`` replaces a checkpoint at a path of the caller
- what a caller gives: ``step_numbers`` (which are valid, and which comes next), ``user_metrics``, ``user_extra``
  (JSON), ``user_files``, ``path_checkpoints``
- who may write: ``owner``: which process made a file; ``root_claim``: the one engine of a root, among all hosts
  (``storage.root_lock`` refuses another one of the same host first); ``root_writer`` holds a root for a command;
  ``engine_dirs``: the directories of its own
- what is there: ``discovery``: the committed steps; ``mirror_copies``: those of a mirror
- removal: ``retention`` and ``protection``; ``rollback``; ``quarantine`` of damage; ``trash``; ``leftovers`` of a
  crash, which the next writer removes and logs

Imports everything up to ``write``.
"""
