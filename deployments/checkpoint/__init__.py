"""Models made ready for engines to load."""
