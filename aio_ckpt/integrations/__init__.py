"""Adapters to other libraries: ``deepspeed``, ``huggingface``, ``lightning``, ``megatron``, ``nvrx``, ``torchtitan``.

Each needs its library, which is no dependency of this package. They share ``async_calls`` (saves in the background,
finalized in the same poll on all ranks), ``checkpoint_folder`` (a folder that a framework names by steps),
``path_saves`` (saves at paths that a framework gives) and ``patch_points`` (private names of a library, replaced).

In: an engine. Out: what the other library asks for. Nothing is imported here. Imports everything below.
"""
