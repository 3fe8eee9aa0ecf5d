"""Attention over a sequence whose tokens are distributed over processes."""
