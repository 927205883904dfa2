"""What `make serve` runs: a Ray, a proxy, the application, and their end."""
