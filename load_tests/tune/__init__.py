"""`make tune`: an engine of each pool measured by itself, and the settings that it speaks for."""
