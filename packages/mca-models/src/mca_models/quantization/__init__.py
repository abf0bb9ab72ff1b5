"""Block-quantised tensors of Hugging Face checkpoints (fp8, mxfp4), read as the numbers they stand for."""
