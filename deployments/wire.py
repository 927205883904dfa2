"""How engine outputs travel from replicas to an ingress: one message per engine step and ingress.

A message is the sender's replica id, then the frames of an encoded EngineCoreOutputs. It takes neither the Serve
proxy nor a Serve handle: a streamed item over a handle costs more than a small model's token.
"""

from __future__ import annotations

import zmq
import zmq.asyncio

HIGH_WATER_MARK = 100_000


class OutputSender:
    """A replica's side. Connections are opened on first use and kept."""

    def __init__(self, replica_id: str) -> None:
        self._name = replica_id.encode()
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, address: str, frames: list[bytes]) -> bool:
        """Queue a message without waiting; False when the ingress has not taken the last `HIGH_WATER_MARK`."""
        if address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.connect(address)
            self._sockets[address] = socket
        try:
            self._sockets[address].send_multipart([self._name, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)


class OutputReceiver:
    """An ingress's side, on a free port of `host`."""

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        shown = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{shown}:{self._socket.bind_to_random_port(f'tcp://{shown}')}"

    async def receive(self) -> tuple[str, list[bytes]]:
        """The next message: the sender's replica id, and the frames."""
        name, *frames = await self._socket.recv_multipart()
        return name.decode(errors="replace"), frames

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._context.destroy(0)
