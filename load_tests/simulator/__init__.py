"""A discrete-event simulator of a Baton cluster: the real policy code over replicas, links and caches made of numbers.

`traces` (what clients send) -> `simulation` (the event loop around one allocator per ingress) -> `replica` (an engine:
batching, paged KV memory, prefix cache) and `links` (KV on its way) -> `metrics` (what clients saw). `profiles` and
`cluster` say what the machines are. Times are simulated seconds from 0.
"""
