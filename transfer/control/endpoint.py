"""A worker's control endpoint: sealed messages to and from peers over ZeroMQ, used by one thread.

The prefill side answers on the connection that decode opened. A decode worker that loses its connection therefore knows
that the prefill process is gone: the kernel closed the socket. Connections never reconnect by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from transfer.control.messages import MAX_BYTES, AnyMessage, Seal
from transfer.control.seal import BadMessage
from transfer.memory.partition import address_of

MAX_SOCKETS = 60_000  # a connection takes three, so ZeroMQ's own limit of 1023 would allow only 341 peers
TAKE_AT_ONCE = 1000  # messages taken from one connection before the others have their turn

_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message. `sender`: an identity to answer to, or the endpoint of a peer that this worker connected to."""

    sender: bytes | str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer's process closed the connection, or there was no such process."""

    endpoint: str


class Endpoint:
    """Binds to a free port of `host`. `address`: where peers connect to."""

    def __init__(self, name: str, seal: Seal, host: str) -> None:
        self._name, self._seal = name, seal
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._inbox.setsockopt(zmq.IPV6, int(":" in host))
        port = self._inbox.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        self._peers: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._unreachable: list[str] = []
        self.bad_messages = 0

    def watch(self, fileno: int) -> None:
        """Also wake `poll` when a file descriptor is readable."""
        self._poller.register(fileno, zmq.POLLIN)

    def poll(self, timeout_ms: int | None) -> list[Incoming | PeerGone]:
        """Wait at most `timeout_ms` (None: for ever) for a message or an event, then return those that are here.

        An invalid address is an event that is already here.
        """
        self._poller.poll(0 if self._unreachable else timeout_ms)
        events: list[Incoming | PeerGone] = [PeerGone(address) for address in self._unreachable]
        self._unreachable.clear()
        for frames in _received(self._inbox):
            self._take(frames[0], frames[-1], events)
        for address, (socket, monitor) in list(self._peers.items()):
            for frames in _received(socket):
                self._take(address, frames[-1], events)
            while monitor.poll(0):
                if recv_monitor_message(monitor)["event"] & _GONE:
                    self.disconnect(address)
                    events.append(PeerGone(address))
                    break
        return events

    def _take(self, sender: bytes | str, frame: bytes, events: list[Incoming | PeerGone]) -> None:
        try:
            events.append(Incoming(sender, self._seal.unpack(frame)))
        except BadMessage:
            self.bad_messages += 1

    @property
    def peers(self) -> set[str]:
        """The endpoints of the connected peers."""
        return set(self._peers)

    def connect(self, address: str) -> bool:
        """Open a connection to a peer's endpoint. False when there is one already, or when the address is invalid.

        For an invalid address, the next `poll` returns PeerGone.
        """
        if address in self._peers:
            return False
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int("[" in address)),
            (zmq.RECONNECT_IVL, -1),
            (zmq.MAXMSGSIZE, MAX_BYTES),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            socket.setsockopt(option, value)
        monitor = socket.get_monitor_socket(_GONE)
        try:
            socket.connect(address_of(address))
        except zmq.ZMQError:
            socket.disable_monitor()
            socket.close(0)
            self._unreachable.append(address)
            return False
        self._peers[address] = (socket, monitor)
        for readable in (socket, monitor):
            self._poller.register(readable, zmq.POLLIN)
        return True

    def send(self, to: bytes | str, message: AnyMessage) -> None:
        """Send to a connected peer, or answer an identity. If that side is gone, the message is lost silently."""
        frame = self._seal.pack(message)
        try:
            if isinstance(to, bytes):
                self._inbox.send_multipart([to, frame], zmq.NOBLOCK)
            elif to in self._peers:
                self._peers[to][0].send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def disconnect(self, address: str) -> None:
        """Close a connection. Messages queued on it are never sent."""
        if peer := self._peers.pop(address, None):
            for readable in peer:
                self._poller.unregister(readable)
            peer[0].disable_monitor()
            peer[0].close(0)

    def close(self) -> None:
        """Close everything; idempotent."""
        for address in list(self._peers):
            self.disconnect(address)
        self._inbox.close(0)
        self._context.destroy(0)


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(TAKE_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
