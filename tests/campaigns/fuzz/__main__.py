"""``python -m tests.campaigns.fuzz``."""

from __future__ import annotations

from tests.campaigns.fuzz.campaign import main

if __name__ == "__main__":
    main()
