"""Checkpoints that others wrote, read without torch, without executing a pickle, and without loading.

    open_roll(dir)                  a tree of ROLL's mcore_adapter (mp_rank_*/model_optim_rng.pt)
    open_torch_dist(dir, config)    a torch_dist checkpoint of Megatron (.metadata, __R_I.distcp)

Both return a ``ForeignSource``, which is a ``checkpoint.ModelSource``: ``parts(param)`` are runs of bytes in
files, ``gathers(param, side)`` says how to copy from them (never plan moves of it in another way: the runs
need not hold the elements in order), ``check_duplicates()`` compares what the files hold several times.
``config.layout`` is the layout that a ROLL tree was written with.

    open_torch_file(file)           names, shapes and places of the tensors in one file of torch.save

Importing its modules imports NumPy; do so only where a source is opened.
"""
