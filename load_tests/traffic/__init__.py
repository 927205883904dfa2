"""Where requests come from: an HTTP client, workloads, and vLLM's own client."""
