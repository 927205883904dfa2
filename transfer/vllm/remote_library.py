"""What an engine lends, for its workers where they are in other processes than its scheduler.

The scheduler's process has the prefix cache, and each worker's channel and tiers ask it over a Unix socket of this
machine. By the same socket each worker tells what its tiers have. The socket has no file: its name is in Linux's
abstract namespace. Both sides prove that they know the secret.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

from transfer.channel.library import Library
from transfer.vllm.shared_tiers import SharedTiers

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

logger = logging.getLogger("baton.transfer")

ANSWER_S, GRACE_S = 0.5, 0.5
"""After the first the scheduler's process lends nothing. A worker's channel waits for both to pass."""
HELLO_S = 10.0
"""The longest that a worker takes to say what a new connection is for."""
CALLS, RECALLS, TIERS = "calls", "recalls", "tiers"
"""What a connection is for: the worker asks; it is told to end all fetches; it tells what its tiers have."""


class LibraryServer:
    """In the scheduler's process. Its threads call `library`. What a dead worker has borrowed is given back.

    `tiers`: what the workers' tiers have, where they have any.
    """

    def __init__(self, secret: bytes, tiers: SharedTiers | None = None) -> None:
        self.address = f"\0baton-{uuid.uuid4().hex}"
        self._listener = Listener(self.address, "AF_UNIX", authkey=secret)
        self.library: Library | None = None
        self._tiers = tiers
        self._recalls: list[Connection[Any, Any]] = []
        self._calls: list[Connection[Any, Any]] = []
        self._is_closing = False
        threading.Thread(target=self._accept, name="baton-library", daemon=True).start()

    def recall(self) -> bool:
        """Tell the workers to end all fetches. True: what they have borrowed comes back, each by each."""
        for connection in tuple(self._recalls):
            try:
                connection.send(RECALLS)
            except OSError:  # the worker has died
                self._recalls.remove(connection)
        return True

    def close(self) -> None:
        """End the threads."""
        self._is_closing = True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as wakes:
            wakes.connect(self.address)  # closing a socket does not wake a thread that listens
        self._listener.close()
        for connection in self._calls:
            _wake(connection)
        for connection in self._recalls:
            connection.close()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                connection = self._listener.accept()
                purpose = connection.recv() if connection.poll(HELLO_S) else ""
            except (OSError, EOFError, AuthenticationError) as error:
                if not self._is_closing:
                    logger.warning("a connection to the prefix cache was refused: %s", repr(error))
                continue
            serve = {CALLS: self._serve, TIERS: self._hear}.get(purpose)
            if serve is not None:
                self._calls.append(connection)
                threading.Thread(target=serve, args=(connection,), name="baton-library", daemon=True).start()
            elif purpose == RECALLS:
                self._recalls.append(connection)
            else:
                connection.close()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        assert self.library is not None
        lent: Counter[int] = Counter()
        try:
            while True:
                asked, given_back, until_s = connection.recv()
                if given_back:
                    lent.subtract(given_back)
                    self.library.give_back(given_back)
                if asked:
                    found = self.library.borrow(asked)
                    if time.monotonic() > until_s:
                        self.library.give_back(found)
                        found = ()
                    lent.update(found)
                    connection.send(found)
        except (OSError, EOFError):  # the worker has died, or this process ends
            self.library.give_back(list(lent.elements()))
        finally:
            connection.close()

    def _hear(self, connection: Connection[Any, Any]) -> None:
        """A worker's tiers, until it ends: its rank, and which blocks have come and gone."""
        assert self._tiers is not None
        rank: int | None = None
        try:
            while True:
                rank, changes = connection.recv()
                self._tiers.changed(rank, changes)
        except (OSError, EOFError):
            if rank is not None:
                self._tiers.lost(rank)
        finally:
            connection.close()


class RemoteLibrary:
    """In a worker's process: a `transfer.channel.library.Library`. `recall`: ends all fetches from this worker.

    The channel's thread calls it. Writes may read what is borrowed until the channel is closed, so only `close` ends
    the connection: then the other side takes all of it back.
    """

    def __init__(self, address: str, secret: bytes, recall: Callable[[], object]) -> None:
        self._recall, self._is_owed, self._is_closed = recall, False, False
        self._calls: Connection[Any, Any] | None = None  # until it is connected; no step waits for that
        self._recalls: Connection[Any, Any] | None = None
        self._closing = threading.Lock()
        threading.Thread(target=self._run, args=(address, secret), name="baton-recalls", daemon=True).start()

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """See `Library`. Nothing where the scheduler's process takes too long; what it lends too late goes back."""
        if (calls := self._calls) is None:
            return ()
        try:
            if self._is_owed and calls.poll(0):
                self._is_owed = False
                self.give_back(calls.recv())
            if self._is_owed or not hashes:
                return ()
            calls.send((list(hashes), (), time.monotonic() + ANSWER_S))
            if calls.poll(ANSWER_S + GRACE_S):
                return tuple(calls.recv())
            self._is_owed = True
        except (OSError, EOFError) as error:
            logger.warning("the prefix cache cannot be asked: %r", error)
        return ()

    def give_back(self, blocks: Sequence[int]) -> None:
        """See `Library`."""
        if self._calls is not None:
            with suppress(OSError):  # the scheduler's process has died, and this one ends with it
                self._calls.send(((), list(blocks), 0.0))

    def close(self) -> None:
        """No write reads a borrowed block any more."""
        self._is_closed = True
        self._close_calls()
        if self._recalls is not None:
            _wake(self._recalls)

    def _close_calls(self) -> None:
        """Two threads may come here at once, and a descriptor that is closed twice may be another one by then."""
        with self._closing:
            if self._calls is not None:
                self._calls.close()

    def _run(self, address: str, secret: bytes) -> None:
        """Connect, and heed recalls until the connection ends. A worker that cannot connect lends nothing."""
        try:
            with connected(address, secret, RECALLS) as recalls:
                self._recalls, self._calls = recalls, connected(address, secret, CALLS)
                while not self._is_closed and recalls.recv():
                    self._recall()
        except AuthenticationError as error:
            logger.warning("this worker lends nothing: %s", repr(error))
        except (OSError, EOFError):
            return
        finally:
            if self._is_closed:
                self._close_calls()


def _wake(connection: Connection[Any, Any]) -> None:
    """End a connection on which a thread waits, which then closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as known:
        known.shutdown(socket.SHUT_RDWR)


def connected(address: str, secret: bytes, purpose: str) -> Connection[Any, Any]:
    """A connection to the `LibraryServer` at this address. Raises OSError, EOFError, AuthenticationError."""
    connection = Client(address, "AF_UNIX", authkey=secret)
    connection.send(purpose)
    return connection
