"""Files to tokenized samples."""
