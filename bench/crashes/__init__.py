"""``python -m bench.crashes``: what the rivals lose in the crashes of ``python -m tests.campaigns.crash``."""
