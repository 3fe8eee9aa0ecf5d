"""Lab: train, evaluate, compare, inspect, draw and time models with positional priors."""
