"""A discrete-event simulator of a Baton cluster: the real policy code over simulated replicas, links and caches.

`traces` (what clients send) -> `simulation` (the event loop around one allocator per ingress) -> `replica` (an engine:
batching, paged KV memory, prefix cache) and `links` (KV on its way) -> `metrics` (what clients saw). `profiles` and
`cluster` describe the machines. Times are simulated seconds from 0.
"""
