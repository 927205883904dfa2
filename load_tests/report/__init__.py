"""From what was measured to figures, rows and drawings."""
