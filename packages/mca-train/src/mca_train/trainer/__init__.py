"""The trainers: Hugging Face's lifecycle of a run over Megatron's engine.

This room says when a step, a log, an evaluation or a checkpoint comes. What each of them does is in the rooms below.
"""
