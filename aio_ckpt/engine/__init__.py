"""The checkpoint engine: every call of a user, from its first check to its report.

In: calls of ``save``, ``load`` and ``close``. Out: tickets and reports. Each save and each load runs here through the
packages below; the engine alone knows their order. ``engine`` wires it together:

- a save: ``state_save`` on the caller's thread, ``state_pipeline`` on the loop; a file: ``file_save`` and
  ``file_pipeline``; both: ``capture_job``, ``common_stages`` and ``job_runner``, which watches a job (cancellation,
  stall, deadline, and the line about one that does not move); ``rollback()``, ``delete()``, ``remove()``:
  ``agreed_changes``, and ``remove_pipeline`` for the last; ``job``: what passes between both threads
- all of them: ``call_lock``: one call at a time; ``capture_resources``: plans and memory; ``trusted_leaves``: which
  frozen leaves need no capture; ``newest_frozen_file``: what the last commit tells of them; ``job_queue``: the pending
  jobs, their waits and their end; ``known_steps``: the newest step, which the default step follows;
  ``earlier_run``: what the log says of steps that are there already; ``root_session``: lock, retention, protection
- a load: ``loader`` shows its stages; ``newest_good``: which checkpoint verifies;
  ``group_load.LoadLeader``: the same on all ranks
- several ranks: ``agreement``: what they agree on before a capture
- both: ``context``: what all calls share; ``outcomes``: what follows the end of a save: ``outcome_log``,
  ``statistics`` and callbacks; ``failed_save``: what goes; ``full_disk_remedy``: what its error says
- the end: ``shutdown``

Imports all packages below; never an entry point (``dcp``, ``cli``, ``integrations``).
"""
