"""Benchmarks beside the library: ``python -m bench.save``, ``bench.load``, ``bench.plan``, ``bench.memory``."""
