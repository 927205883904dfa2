"""How KV blocks move from prefill memory into decode memory.

Runs with torch and nixl alone, except `vllm/`.
"""
