"""Fault injection: a seeded schedule of faults under a crowd of clients, on the mock cluster and on the real one.

`crowd.py` sends requests and judges their answers. `faults.py` disturbs the control plane of
`harness/control_plane.py`, and uses `messages.py` for faults on the KV channel. `real.py` does both to real engines,
over HTTP and by signals.
"""
