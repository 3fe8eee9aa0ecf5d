"""What figures, tables and words take from results."""
