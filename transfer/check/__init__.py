"""The parts of `transfer/gpu_check.py`: two processes with a KV cache each, a small transformer, and the figures."""
