"""Carries the first token from the prefill engine's scheduler to decode, past both engines' steps."""

from __future__ import annotations

import zmq

from transfer.control import FirstToken, Seal


class TokenSender:
    """Sends sealed messages to decode workers' endpoints; a connection to each is kept open. One thread only."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, address: str, message: FirstToken) -> None:
        """Send without waiting; what cannot be delivered is lost, and decode's deadline speaks."""
        if address not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.connect(address)
            self._sockets[address] = socket
        try:
            self._sockets[address].send(self._seal.pack(message), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)
