"""KV memory: layouts, blocks, and the planes that move them."""
