"""Who asks: an HTTP client, workloads, and vLLM's own client."""
