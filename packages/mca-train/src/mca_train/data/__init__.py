"""Files become tokenized samples in this room. How samples become batches is in ``batching``."""
