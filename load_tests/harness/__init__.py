"""What benchmarks and tests start: a control plane in one process, engines, applications and peers."""
