"""Tables, for a terminal, for pages and for papers."""
