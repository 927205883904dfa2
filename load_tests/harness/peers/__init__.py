"""The alternatives to Baton, each started as a user starts it, and Baton itself, started alike."""
