"""Open a checkpoint, list its names and items, and read and verify their bytes.

In: a checkpoint directory, of an engine or of stock DCP. Out: its catalog of names and stored items; verified bytes,
copied to their targets; the faults of a checkpoint that does not verify. ``open`` reads the small files, ``catalog``
lists the names, ``rank_names`` those of one rank; ``locate`` finds the bytes of an item, ``foreign_items`` those of
stock DCP, ``dcp_places`` those that ``.metadata`` tells, ``boxes`` shards that overlap. ``data_files`` are opened at
their first use. ``read_plan`` says which bytes go where, ``read_requests`` joins them to reads, over small gaps too,
and ``fetch`` runs these (``load_progress`` tells how far); ``deliver_pieces`` checks the CRC32 of each piece and copies
it, ``verify`` checks whole checkpoints (one fault for each block), and ``torch_file`` a ``torch.save`` file.
``read_context`` is what all stages of a load share. Knows nothing of templates. Imports ``runtime``, ``format``,
``leaves``, ``state``, ``memory`` and ``storage``; nothing that saves.
"""
