"""A driver on the application's Ray, `RAY_ADDRESS` in its environment, that has replicas let their sessions go.

For every line of its input, the name of a pool with one replica, it prints how many go.
"""

from __future__ import annotations

import sys

import ray
from ray import serve


def main() -> None:
    ray.init(log_to_driver=False)
    handles = {pool: serve.get_deployment_handle(pool, "baton") for pool in ("decode-small", "decode-large")}
    for handle in handles.values():
        handle.counters.remote().result(timeout_s=60)  # Serve tells a new handle about its replicas
    print("ready", flush=True)
    for line in sys.stdin:
        print(handles[line.strip()].move_out.remote().result(timeout_s=60), flush=True)


if __name__ == "__main__":
    main()
