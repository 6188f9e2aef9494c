"""Turn written files into a durable, visible checkpoint directory, and maintain those directories.

In: write results. Out: manifests, a published directory, the list of committed steps; also ``owner``: ownership of
pending directories; ``leftovers`` of dead writers; ``trash`` and failed saves; ``retention``, ``protection`` and
deletion; ``rollback``; ``quarantine``. ``step_numbers`` checks a given step. ``root_writer`` holds the root for a
command. ``publish`` renames a directory into place, ``publish_files`` single files. Imports everything up to ``write``.
"""

from aio_ckpt.commit.discovery import discover
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.retention import Retention

__all__ = ["Quarantine", "Retention", "discover"]
