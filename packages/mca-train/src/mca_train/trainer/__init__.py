"""The Hugging Face Trainer's lifecycle over Megatron's engine."""
