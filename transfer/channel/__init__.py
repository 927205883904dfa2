"""The two sides of a KV channel, and what passes between them."""
