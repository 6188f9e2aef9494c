"""Load a checkpoint into a template, or read its state without one.

In: a checkpoint directory, and a template if values are to be filled in place. Out: values whose checksums were
verified, or an error that names the damaged file and tensor. ``load`` shows the stages of a load; ``read_state`` needs
no template. ``plan_fills`` finds the bytes of each fill, ``fetch_values`` reads and decodes; ``apply`` lets the takers
put their values, and warns of names and settings that the load left out. ``page_cache``: each rank reads all bytes that
it needs. If ranks of one host need the same ones, they read through the page cache, and the disk is read about once.
Imports ``match``, ``checkpoint`` and what they import; nothing that saves.
"""
