"""Two hosts that share a directory over a real NFS: ``python -m tests.campaigns.hosts``."""
