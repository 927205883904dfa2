"""Which request is served now, which waits, and which is refused. Pure."""
