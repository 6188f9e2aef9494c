"""Options of a load, as the caller gave them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aio_ckpt.argument_checks import check_callback, check_flag
from aio_ckpt.match.rename import Rename, check_rename
from aio_ckpt.reports import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of one load: the arguments of ``load()``, which says what they mean.

    :meth:`check` is left to the load, which tells the other ranks.
    """

    step: int | None = None
    path: str | os.PathLike[str] | None = None
    fallback: bool = True
    strict: bool = False
    allow_missing: bool = False
    skip_untrusted: bool = False
    skip_mismatched: bool = False
    cast: bool = False
    rename: Rename | None = None
    progress: OnProgress | None = None

    def check(self) -> None:
        """Check the type of each option but those that name the checkpoint.

        Raises:
            ConfigError: names the option and its value.
        """
        check_rename(self.rename)
        for name in ("strict", "allow_missing", "skip_untrusted", "skip_mismatched", "cast", "fallback"):
            check_flag(name, getattr(self, name))
        check_callback("progress", self.progress)
