"""Checkpoints on disk: Hugging Face and MCA directories, read and written without torch.

Reading (``opening.open_checkpoint`` takes any kind)::

    source = open_checkpoint(path)                     # any kind; complete, or an McaError
    for param in source.params:                        # all stored parameters, in canonical order
        piece = read_shard(source, param, rank, size)  # NumPy; only this rank's slices are read

Writing an MCA directory, by one process or several (each its own files)::

    layout = McaLayout(params, config, dtypes, wholes)
    partial = AtomicDirectory(destination)            # one process; the others get partial.path
    file = plan_file(partial.path / iteration_name(1) / name, layout.specs(name))
    with SafetensorsWriter(file) as writer: writer.write(tensor_name, bytes_like) ...
    layout.finish(partial.path, {name: writer.record, ...}); partial.publish()

A HF directory likewise, with ``HfLayout`` and ``METADATA``.
"""
