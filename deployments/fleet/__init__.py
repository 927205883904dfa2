"""What is known of the replicas, and what was promised on them. Pure."""
