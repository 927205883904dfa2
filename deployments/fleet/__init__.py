"""What is known of the replicas, and what is reserved on them. Pure."""
