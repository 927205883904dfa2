"""The live page at /status: what the fleet does, as it does it."""
