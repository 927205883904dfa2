"""`make tune`: measures an engine of each pool by itself, and finds its settings."""
