"""How engine outputs travel from replicas to an ingress: one message per engine step and ingress.

A message is the sender's replica id, then the frames of an encoded EngineCoreOutputs. It takes neither the Serve
proxy nor a Serve handle: a streamed item over a handle costs more than a small model's token.

A connection that breaks is not made again: what was in it is lost, and an answer must not go on after a gap. It breaks
when the ingress dies, or when its process does not answer for a lease's time (ZeroMQ's own heartbeats).
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

HIGH_WATER_MARK = 100_000
CONNECT_POLL_S = 0.002
NEVER = -1


class OutputSender:
    """A replica's side: one connection to each ingress. `lease_s`: so long an ingress may be silent."""

    def __init__(self, replica_id: str, lease_s: float) -> None:
        self._name, self._lease_s = replica_id.encode(), lease_s
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    async def connect(self, address: str) -> bool:
        """See that there is a connection before anything is sent; False when there is none within a lease's time."""
        if address in self._sockets:
            return True
        socket = self._begin(address)
        try:
            async with asyncio.timeout(self._lease_s):
                while not _is_up(socket):  # noqa: ASYNC110 - once for each ingress, and it takes a millisecond
                    await asyncio.sleep(CONNECT_POLL_S)
            self._sockets.setdefault(address, socket)
            return True
        except TimeoutError:
            return False
        finally:
            if self._sockets.get(address) is not socket:
                socket.close(0)

    def _begin(self, address: str) -> zmq.Socket[bytes]:
        lease_ms = max(4, int(1000 * self._lease_s))
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # takes messages only while there is a connection
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER)
        socket.setsockopt(zmq.HANDSHAKE_IVL, lease_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, lease_ms // 4)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, lease_ms // 2)
        socket.connect(address)
        return socket

    def send(self, address: str, frames: list[bytes]) -> bool:
        """Queue a message without waiting; False when the ingress is gone, or has not taken `HIGH_WATER_MARK`."""
        socket = self._sockets.get(address)
        if socket is None:
            return False
        try:
            socket.send_multipart([self._name, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def drop_gone(self) -> list[str]:
        """The addresses of ingresses that are gone, or take nothing more, since the last time; forgets them."""
        gone = [address for address, socket in self._sockets.items() if not _is_up(socket)]
        for address in gone:
            self._sockets.pop(address).close(0)
        return gone

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)


def _is_up(socket: zmq.Socket[bytes]) -> bool:
    """Whether it would take a message now."""
    return bool(socket.poll(0, zmq.POLLOUT))


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
