"""Benchmarks beside the library: ``python -m bench.save``, and ``load``, ``plan``, ``memory``, ``crash`` likewise."""
