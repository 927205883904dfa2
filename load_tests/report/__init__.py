"""Turns measurements into figures, rows and drawings."""
