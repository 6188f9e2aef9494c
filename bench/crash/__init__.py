"""``python -m bench.crash``: crash points tried and survived, for this engine and what a user would pick instead."""

import os

# Every trainer is forked from this process, which must have one thread: OpenBLAS would start more at its import.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
