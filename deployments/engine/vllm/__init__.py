"""The real engine: a vLLM engine core without its frontend."""
