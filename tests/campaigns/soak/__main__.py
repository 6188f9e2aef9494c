"""``python -m tests.campaigns.soak``."""

from __future__ import annotations

from tests.campaigns.soak.saves import main

if __name__ == "__main__":
    main()
