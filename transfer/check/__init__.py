"""What `transfer/gpu_check.py` runs: two processes with a KV cache each, a small transformer, and the figures."""
