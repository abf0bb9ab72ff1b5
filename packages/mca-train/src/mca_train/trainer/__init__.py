"""The trainers: Hugging Face's lifecycle of a run over Megatron's engine.

This package decides when steps, logs, evaluations and checkpoints happen. The other packages implement them.
"""
