"""Work of the commands, which prints nothing. In: paths and settings. Out: values that a command shows.

- ``loop``: run the work of a command on a loop of its own
- ``root_table``: a root, for ls, du and prune; ``quick_check``: its checkpoints, by manifests and lengths of files
- ``contents``: a checkpoint, for inspect; ``differences``: two of them, for diff
- ``root_changes``: delete and roll back under the lock, for rm, prune and rollback; ``copies``: for cp
- ``conversions``: results of export, import and convert; ``sources``: what they read

Imports all packages below; never click nor a command.
"""

from aio_ckpt.cli.work.loop import call

__all__ = ["call"]
