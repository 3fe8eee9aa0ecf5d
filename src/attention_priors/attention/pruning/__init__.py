"""Certified pruning: leave out keys whose total weight is provably below a tolerance."""
