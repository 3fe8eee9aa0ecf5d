"""RULER's eight needle-in-a-haystack tasks: prompts identical to the reference, and their score."""
