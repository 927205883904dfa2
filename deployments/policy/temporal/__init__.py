"""Prefill and decode in long phases, one after the other, on one engine: TD-Pipe's methods (arXiv 2506.10470)."""
