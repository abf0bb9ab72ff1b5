"""Conversion of single weights to Hugging Face names."""
