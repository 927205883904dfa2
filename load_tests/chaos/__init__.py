"""Fault injection: a seeded schedule of faults under a crowd of clients, on the mock cluster and on the real one.

`crowd.py` asks and judges, `faults.py` disturbs the control plane of `harness/control_plane.py`, with `messages.py`
for what happens on the KV channel; `real.py` does both to real engines, over HTTP and by signals.
"""
