"""Sends the first token from the prefill engine's scheduler to decode. It does not wait for a step of either engine."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection

import zmq

from transfer.control.messages import FirstToken, Seal
from transfer.memory.partition import address_of

logger = logging.getLogger("baton.transfer")

CONNECTIONS = 256  # the maximum number of connections kept open
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2000  # the first pause before connecting again, and the longest


class TokenSender:
    """Sends sealed messages to decode workers' endpoints. Only one thread may use it.

    `connections`: the number of connections kept open, those used last. A connection to a worker that is gone is tried
    again, at growing intervals, until `keep` no longer lists the worker or newer connections replace it.
    """

    def __init__(self, seal: Seal, connections: int = CONNECTIONS) -> None:
        self._seal, self._connections = seal, connections
        self._context = zmq.Context()
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._known: set[str] = set()

    def keep(self, addresses: Collection[str]) -> None:
        """Only these workers exist. Connections to workers that are not listed any more are closed.

        A worker that was never listed may be new. Its connection is closed at the next call, if it is still not listed.
        """
        for address in (self._sockets.keys() - set(addresses)) & self._known:
            self._sockets.pop(address).close()
        self._known = {*addresses, *self._sockets}

    def send(self, address: str, message: FirstToken) -> None:
        """Send without waiting. A token that cannot be delivered is lost. Decode's deadline then ends the handoff."""
        try:
            self._socket(address).send(self._seal.pack(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the queue is full, or the address is invalid
            about = {"session_id": message.session}
            logger.warning("a first token to %s is lost: %s", address, error, extra=about)

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._sockets.pop(address, None) or self._connect(address)
        self._sockets[address] = socket
        if len(self._sockets) > self._connections:
            self._sockets.popitem(last=False)[1].close()
        return socket

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            socket.connect(address_of(address))
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._context.destroy(0)
