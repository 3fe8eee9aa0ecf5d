"""What the tokenizers of this package have in common."""

END_OF_TEXT = "<|endoftext|>"
"""Begins, ends and pads sequences."""

NO_LENGTH_LIMIT = int(1e30)
"""What transformers itself takes for "no limit": it warns of a text longer than the tokenizer's limit, but here the
model decides what length it reads."""
