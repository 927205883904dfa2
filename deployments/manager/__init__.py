"""The session manager: a shell around the allocator, and the calls that reach it."""
