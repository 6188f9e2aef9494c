"""Adapters to other libraries: ``deepspeed``, ``huggingface``, ``lightning``, ``megatron``, ``nvrx``, ``torchtitan``.

Each needs its library, which is no dependency of this package. They share ``async_calls`` (saves in the background,
finalized in the same poll on all ranks), ``checkpoint_folder`` (a folder that a framework names by steps),
``path_saves`` (saves at paths that a framework gives) and ``patch_points`` (private names of a library, replaced).
``deepspeed_commit``: the draft of a checkpoint of DeepSpeed, which becomes visible as a whole; ``lightning_layout``: a
checkpoint of Lightning, as an engine stores it.

In: an engine. Out: what the other library asks for. Nothing is imported here. Imports everything below.
"""
