"""How long things take, and how much they come to. Pure."""
