"""Turn values into the bytes of a checkpoint and back: pure, without a file and without a thread.

In: tensor specs, tables and manifests, or bytes that are not trusted. Out: the ``torch.save`` zip of one tensor,
our root and rank manifests, DCP's ``.metadata``, the names of files and directories; and all of these parsed.
``constants``: sizes, such as the bytes that one checksum covers; ``dtypes``: the names of dtypes; ``checksum``: CRC32.

- our files: ``checkpoint_files``, ``root_names`` and ``step_names`` (names), ``root_manifest``,
  ``rank_manifest``, ``tensor_columns``
- DCP's ``.metadata``, which is opened first and whose end names the root manifest: ``dcp_metadata_read``,
  ``dcp_metadata_write``
- zips of ``torch.save``: ``tensor_zip`` and ``tensor_pickle`` (one tensor), ``scalar_zip`` (a number or text),
  ``torch_file_write`` (a whole file), ``zip_records`` and ``zip_directory``
- ``safetensors_file``

Parsing runs no code: each reader of pickles has its own list of what is allowed, on ``restricted_unpickler`` (that of
objects: ``leaves.pickle_allow_list``). Imports ``errors`` and ``_torch`` only. Names, constants and the
root manifest need neither torch nor numpy.
"""
