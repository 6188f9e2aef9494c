"""``python -m bench.gpu``: saves and loads of GPU states beside the rivals, plain or under torchrun.

======================  ==============================================================================
``__main__``            the command: which trials, in which order, and what becomes of their results
``options``             the command line; a :class:`~bench.gpu.options.Trial` is what one process is told
``supervise``           one process a trial and rank: time limits, memory, agreement between the ranks
``trial``               that process: build a trainer, save, train beside saves, report each phase at once
``train``               the trainers: real forward, backward and optimizer step; states; step times
``contenders``          aio_ckpt, torch.save and DCP behind one face
``guests``              the same for the libraries that may be missing
``loads``               loading to the device
``results``             from phases to rows, tables, goals and JSON
``plot``                the PNG, made from the JSON
======================  ==============================================================================
"""
