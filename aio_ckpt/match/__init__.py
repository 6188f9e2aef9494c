"""Compare a template with a checkpoint: which values are read into which memory, and the faults.

In: an opened checkpoint and a template. Out: a ``Match``, or an error that names every leaf that does not fit.
``fills``: which tensor is read into which memory; ``takers`` build and put all other values, once these are read.
``match.match`` makes the errors "lacks name" and "the template lacks name"; ``tensors``, ``leaves``, ``stateful`` and
``compounds`` compare; ``rename`` applies ``rename=``; ``missing_names`` finds remedies; ``dtype_changes`` names
tensors that change their dtype, ``modules`` what a module lacks, refuses or converts. Reads no data file and touches no
tensor. Imports ``checkpoint`` and what it imports; nothing that saves.
"""
