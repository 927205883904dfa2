"""KV blocks in cheaper memory: a host tier and a disk tier, by hash, with torch and NIXL alone."""
