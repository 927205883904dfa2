"""How engine outputs travel from replicas to an ingress: one message per engine step and ingress.

A message is the sender's replica id, then the frames of an encoded EngineCoreOutputs. It goes neither through the Serve
proxy nor through a Serve handle, because a streamed item over a handle costs more than a token of a small model.

A broken connection is not made again: the messages in it are lost, and an answer must not go on after a gap. It breaks
when the ingress dies, or when its process does not answer for the length of a lease (ZeroMQ's own heartbeats).
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

HIGH_WATER_MARK = 100_000
"""The most messages that wait in one connection; then the ingress counts as gone."""

CONNECT_POLL_S = 0.002
"""The time between two looks at a connection that is being made."""

NEVER = -1
"""ZeroMQ's value for no reconnecting."""


class OutputSender:
    """The side of a replica: one connection to each ingress.

    `lease_s`: the longest time that an ingress may be silent.
    """

    def __init__(self, replica_id: str, lease_s: float) -> None:
        self._name, self._lease_s = replica_id.encode(), lease_s
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    async def connect(self, address: str) -> bool:
        """Make a connection before anything is sent. False when there is none within the length of a lease."""
        if address in self._sockets:
            return True
        socket = self._begin(address)
        try:
            async with asyncio.timeout(self._lease_s):
                while not _is_up(socket):  # noqa: ASYNC110 - it happens once per ingress, and takes a millisecond
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
        socket.setsockopt(zmq.IPV6, int("[" in address))
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
        """Forget the ingresses that are gone, or that take nothing more. Returns their addresses."""
        gone = [address for address, socket in self._sockets.items() if not _is_up(socket)]
        for address in gone:
            self._sockets.pop(address).close(0)
        return gone

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)


def _is_up(socket: zmq.Socket[bytes]) -> bool:
    """Whether the socket would take a message now."""
    return bool(socket.poll(0, zmq.POLLOUT))


class OutputReceiver:
    """The side of an ingress, on a free port of `host`."""

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
