"""The two sides of a KV channel, and what goes between them."""
