"""The eight needle-in-a-haystack tasks of RULER: prompts equal to the reference's, and their score."""
