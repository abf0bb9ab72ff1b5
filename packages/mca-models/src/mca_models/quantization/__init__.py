"""Block-quantised tensors of Hugging Face checkpoints (fp8, mxfp4): dequantised on reading, fp8 also written."""
