"""The digest of a block's bytes."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def digest_of(data: memoryview | bytes) -> bytes:
    """XXH3 with 128 bits. It finds what broke by chance, and not what was forged: the files' modes are against that."""
    return xxhash.xxh3_128_digest(data)
