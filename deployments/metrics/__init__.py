"""What Baton measures for Prometheus: the names of all metrics, and their values in one process."""
