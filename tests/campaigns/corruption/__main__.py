"""``python -m tests.campaigns.corruption``."""

from __future__ import annotations

from tests.campaigns.corruption.campaign import main

if __name__ == "__main__":
    main()
