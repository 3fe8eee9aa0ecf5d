"""The figures, drawn with matplotlib's objects."""
