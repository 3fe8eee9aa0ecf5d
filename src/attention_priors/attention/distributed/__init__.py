"""Attention over a sequence that is spread over processes."""
