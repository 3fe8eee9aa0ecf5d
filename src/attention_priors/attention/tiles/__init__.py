"""CPU engine: exact attention in tiles whose bias is a view of the prior's table."""
