"""Where API keys come from: a file, which is read again when it changes, or an environment variable."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from app.access.keys import Keys, parse
from configs.schema import BatonConfig

LOOK_EVERY_S = 2.0
"""The least time between two looks at the file."""

logger = logging.getLogger("baton.keys")


class KeysFile:
    """The keys of a file, as it is now. Raises OSError and ValueError where it cannot be read at the start."""

    def __init__(self, path: Path, classes: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._classes, self._clock = path, classes, clock
        self._looked_s = clock()
        self._stamp = self._stamped()
        self._keys = parse(path.read_text(), classes)

    def __call__(self) -> Keys:
        """The keys. A file that cannot be read leaves those that there were."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._keys

    def _look(self) -> None:
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys = parse(self._path.read_text(), self._classes)
        except (OSError, ValueError) as error:
            logger.error("the file of API keys is not read, and the keys of before count: %s", error)
        else:
            logger.warning("the file of API keys has changed: %d keys", len(self._keys.entries))

    def _stamped(self) -> tuple[int, int, int]:
        """A new value when the file is written, replaced, or a link to it set anew."""
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino


def keys_of(config: BatonConfig, environment: Mapping[str, str] = os.environ) -> Callable[[], Keys] | None:
    """What gives the keys at any moment; None where no request needs one.

    Raises ValueError where they cannot be read: a server that should ask for keys does not start without them.
    """
    ingress = config.ingress
    classes = config.classes.keys()
    try:
        if ingress.keys_file is not None:
            return KeysFile(ingress.keys_file, classes)
        if ingress.keys_env is not None:
            keys = parse(environment.get(ingress.keys_env, ""), classes)
            return lambda: keys
    except (OSError, ValueError) as error:
        where = "keys_file" if ingress.keys_file is not None else f"keys_env {ingress.keys_env}"
        raise ValueError(f"ingress.{where}: {error}") from None
    return None
