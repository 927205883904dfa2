"""Makes an API key: `python -m app.access.new_key NAME` prints it once, and its entry for the file of keys."""

from __future__ import annotations

import hashlib
import secrets
import sys


def made(name: str) -> tuple[str, str]:
    """A new key, and its entry in YAML."""
    key = f"baton-{secrets.token_urlsafe(32)}"
    return key, f"  - name: {name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}\n"


def main() -> None:
    """Print both: the key on standard error, the entry on standard output, so that `>>` adds it to a file."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m app.access.new_key NAME")
    key, entry = made(sys.argv[1])
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(entry)


if __name__ == "__main__":
    main()
