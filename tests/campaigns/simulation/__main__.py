"""``python -m tests.campaigns.simulation``."""

from __future__ import annotations

from tests.campaigns.simulation.runs import main

if __name__ == "__main__":
    main()
