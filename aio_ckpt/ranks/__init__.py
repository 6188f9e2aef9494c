"""Bring the ranks of one training run to one decision.

In: a message of each rank. Out: the leader's decision, the same on every rank, or an error that names the rank that
failed. One rank alone is a group with one member. Stores are used here only.

- exchanges: ``exchange``, by a ``coordinator``; between several ranks by ``store_coordinator``, ``store``,
  ``store_values`` and ``messages``; ``failure``: what a rank tells of its own
- members: ``membership``, and how long a call waits for the others; ``heartbeats``: sends them, and looks while a wait
  lasts; ``missing_ranks``: after how much silence a rank is lost, and the log lines about the others
- ``on_host``: how many ranks share this host; ``same_root``: whether a rank sees the leader's root
- a save: ``save_round``; ``save_ledger``: the leader's table of all shares
- polls of a training loop: ``polls``: preemption, timers and work, by the flags that ``flag_watch`` waits for;
  ``polls`` decides how soon

Imports everything up to ``commit``; never what loads.
"""
