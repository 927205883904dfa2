"""Messages of a schema, authenticated with the deployment's secret.

A sealed message is a 16-byte keyed BLAKE2b digest followed by msgpack. A message that is not sealed with the secret, is
too long or does not fit the schema is refused with `BadMessage`. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Generic, TypeVar

import msgspec

DIGEST_BYTES = 16

M = TypeVar("M")


class BadMessage(Exception):
    """Bytes that are not a message of this deployment."""


class SealOf(Generic[M]):
    """Encodes and authenticates messages. `schema`: their type, for msgspec.

    `most_bytes`: the maximum length of a sealed message. A message that is sealed for one `purpose` is refused where
    another purpose is expected.
    """

    def __init__(self, secret: str, schema: Any, most_bytes: int, purpose: bytes = b"") -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=purpose).digest()
        self.most_bytes = most_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(schema)

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=self._key).digest()

    def pack(self, message: M) -> bytes:
        """The message as bytes for the wire."""
        body = self._encoder.encode(message)
        return self._digest(body) + body

    def unpack(self, frame: bytes) -> M:
        """The message that a frame carries. Raises BadMessage."""
        if not DIGEST_BYTES < len(frame) <= self.most_bytes:
            raise BadMessage(f"a frame of {len(frame)} bytes")
        digest, body = frame[:DIGEST_BYTES], frame[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(body)):
            raise BadMessage("a frame with a wrong seal")
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadMessage(f"a frame that fits no message: {error}") from error
