"""Sends the first token from the prefill engine's scheduler to decode, without waiting for either engine's step."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection

import zmq

from transfer.control.messages import FirstToken, Seal

logger = logging.getLogger("baton.transfer")

CONNECTIONS = 256  # kept open at most
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2000  # the first pause before a new try to connect, and the longest


class TokenSender:
    """Sends sealed messages to decode workers' endpoints. One thread only.

    The `connections` used last are kept open. A connection to a worker that is gone is tried again, at growing
    intervals, until `keep` no longer lists the worker or other connections push it out.
    """

    def __init__(self, seal: Seal, connections: int = CONNECTIONS) -> None:
        self._seal, self._connections = seal, connections
        self._context = zmq.Context()
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._known: set[str] = set()

    def keep(self, addresses: Collection[str]) -> None:
        """Only these workers exist. Connections to workers that are not listed any more are closed.

        A worker that was never listed may be new: its connection is closed at the next call if it is still unlisted.
        """
        for address in (self._sockets.keys() - set(addresses)) & self._known:
            self._sockets.pop(address).close()
        self._known = {*addresses, *self._sockets}

    def send(self, address: str, message: FirstToken) -> None:
        """Send without waiting. A token that cannot be delivered is lost; decode's deadline then ends the handoff."""
        try:
            self._socket(address).send(self._seal.pack(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # full, or no address
            logger.warning("a first token to %s is lost: %s", address, error)

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._sockets.pop(address, None) or self._connect(address)
        self._sockets[address] = socket
        if len(self._sockets) > self._connections:
            self._sockets.popitem(last=False)[1].close()
        return socket

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)
