"""Pages that hold everything they show."""
