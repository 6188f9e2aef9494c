"""The demo: train a small model, kill the trainer, resume it, and compare with a run that was never killed.

In: a directory. Out: a report. One run is a process of its own, ``python -m aio_ckpt.demo.train``; nothing is imported
here, so that this module is loaded as ``__main__`` only. Imports everything below.
"""
