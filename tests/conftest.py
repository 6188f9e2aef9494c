"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts a command in the background lets it ignore Ctrl-C, and so would every child of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)
