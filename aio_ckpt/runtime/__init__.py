"""The event loop's thread, the pool of I/O threads, and waits on their work.

In: callables and coroutines, from any thread. Out: futures that one loop thread and a pool of threads complete
(``portal``, whose ``STOP_SECS`` is how long closing waits for a thread that hangs, and whose exit hooks no fork runs);
also deadlines, warnings about waits, locks and futures that Ctrl-C leaves usable (``ctrl_c``), exit hooks, thread
priorities, ``limits`` of the system, notes on errors, the exit status after a failed save, and the flags of preemption
signals (``signals``; Ctrl-C ends a waiting save in ``engine.job_queue``). No other package starts a thread or a loop.
Imports ``argument_checks``, ``message_texts``, ``errors`` and ``reports`` only.
"""
