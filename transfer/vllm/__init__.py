"""Inside vLLM: the KV connector and what it leans on."""
