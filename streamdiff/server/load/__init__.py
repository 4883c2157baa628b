"""How much an engine can play at once, and what sessions give up where they ask for more."""
