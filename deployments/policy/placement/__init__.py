"""Where a session goes. Pure."""
