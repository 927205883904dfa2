"""Benchmarks: `make bench NAME=<module>`. The last line that each prints is one JSON object."""
