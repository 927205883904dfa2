"""What people would use instead of Baton, started as a user would start it, and Baton itself, all alike."""
