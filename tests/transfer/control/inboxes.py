"""The many addresses of one endpoint."""

from __future__ import annotations

import zmq


def addresses(inbox: zmq.Socket[bytes], count: int) -> list[str]:
    _, _, port = inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")
    return [f"tcp://127.0.{number // 256}.{number % 256}:{port}" for number in range(1, count + 1)]
