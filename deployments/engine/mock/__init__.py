"""The mock engine: tests of the control plane, and scale. It computes nothing."""
