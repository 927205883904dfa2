"""One hostile client beside others, and what they notice."""
