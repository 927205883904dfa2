"""The connection between an ingress and a replica: it begins, cancels and ends sessions' parts, and outputs come back.

Serve finds, watches and replaces replicas; a session's parts do not go through it, because a Serve call costs
milliseconds of CPU.
"""
