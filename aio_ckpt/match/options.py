"""Options of a load, as the caller gave them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aio_ckpt.argument_checks import check_callback, check_flag
from aio_ckpt.match.rename import Rename, check_rename
from aio_ckpt.reports import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of one load, as the caller gave them. :meth:`check` is left to the load, which tells the other ranks."""

    step: int | None = None
    """Step of the checkpoint; None takes the newest that verifies."""
    path: str | os.PathLike[str] | None = None
    """Directory of the checkpoint, in the place of a step."""
    fallback: bool = True
    """Whether a load without a step passes by checkpoints that do not verify."""
    strict: bool = False
    """Whether names of the checkpoint that the template lacks are refused."""
    allow_missing: bool = False
    """Whether template names that the checkpoint lacks are left as they are, also below Stateful values."""
    skip_untrusted: bool = False
    """Whether objects that only running code reads are left as they are."""
    skip_mismatched: bool = False
    """Whether tensors of another shape are left as they are."""
    cast: bool = False
    """Whether tensors of another dtype are converted to that of the template."""
    rename: Rename | None = None
    """Maps stored names to those of the template; None if they are the same."""
    progress: OnProgress | None = None
    """Function of the caller that gets the progress."""

    def check(self) -> None:
        """Check the type of each option but those that name the checkpoint.

        Raises:
            ConfigError: names the option and its value.
        """
        check_rename(self.rename)
        for name in ("strict", "allow_missing", "skip_untrusted", "skip_mismatched", "cast", "fallback"):
            check_flag(name, getattr(self, name))
        check_callback("progress", self.progress)
