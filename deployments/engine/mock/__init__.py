"""The mock engine, for tests of the control plane and at scale. It runs no model."""
