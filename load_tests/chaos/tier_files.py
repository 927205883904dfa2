"""What may befall the files of KV tiers on a disk. The tiers' digests find it (docs/concepts/kv-tiers.md)."""

from __future__ import annotations

import os
import random
from pathlib import Path

STEP_BYTES = 4096
CUT_SHARE = 0.3
"""Of so many damages, a file is cut."""


def damage(path: Path, draw: random.Random) -> int:
    """Change a byte in every page of each file of blocks, or in every 400th, or cut the file. Returns how many files.

    `path`: as in `disk_kv`. A file may be in use.
    """
    files = list(path.glob("baton-kv/*.blocks"))
    for file in files:
        size = file.stat().st_size
        if draw.random() < CUT_SHARE:
            os.truncate(file, draw.randrange(max(1, size)))
        else:
            _flip(file, range(draw.randrange(STEP_BYTES), size, STEP_BYTES * draw.choice((1, 400))))
    return len(files)


def _flip(file: Path, places: range) -> None:
    with file.open("r+b") as opened:
        for place in places:
            opened.seek(place)
            if byte := opened.read(1):  # its owner may have cut it meanwhile
                opened.seek(place)
                opened.write(bytes([byte[0] ^ 0x55]))
