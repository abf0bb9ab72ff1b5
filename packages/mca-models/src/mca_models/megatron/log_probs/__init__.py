"""Log-probabilities of tokens, and entropies, from vocabulary-parallel logits a few tokens at a time."""
