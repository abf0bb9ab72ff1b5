"""The Megatron model factory: real megatron-core models from HF or MCA checkpoints, on any rank layout."""
