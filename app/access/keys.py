"""API keys as an operator has listed them, by their hashes. Pure.

A key is 256 random bits (`app.access.new_key`), so a plain SHA-256 is enough: no key can be guessed from its hash. A
slow hash, such as one for passwords, protects what a person can remember, and would cost each request milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Iterable

import yaml
from pydantic import TypeAdapter, ValidationError

from configs.schema import KeyConfig

_ENTRIES = TypeAdapter(tuple[KeyConfig, ...])


class Keys:
    """All keys of a server."""

    def __init__(self, entries: Iterable[KeyConfig]) -> None:
        self.entries = tuple(entries)
        self._hashes = [(bytes.fromhex(entry.sha256), entry) for entry in self.entries]

    def find(self, key: bytes) -> KeyConfig | None:
        """The entry of a key that a client presents. Each entry is looked at, so the time does not tell which it is."""
        digest, found = hashlib.sha256(key).digest(), None
        for known, entry in self._hashes:
            if hmac.compare_digest(known, digest):
                found = entry
        return found


def parse(text: str, classes: Collection[str]) -> Keys:
    """The keys of a file. `classes`: those that are configured.

    Raises ValueError, whose message repeats nothing that may be a key.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"no YAML, in line {mark.line + 1 if mark else '?'}") from None
    if not isinstance(document, dict) or document.keys() != {"keys"} or not document["keys"]:
        raise ValueError("the text must have `keys:` alone, with a list of at least one key")
    try:
        entries = _ENTRIES.validate_python(document["keys"])
    except ValidationError as error:
        wrong = "; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in error.errors(include_input=False))
        raise ValueError(wrong) from None
    for what in ("name", "sha256"):
        counted = Counter(getattr(entry, what) for entry in entries)
        if any(count > 1 for count in counted.values()):
            raise ValueError(f"two keys have the same {what}")
    for entry in entries:
        if unknown := set(entry.classes) - set(classes):
            raise ValueError(f"{entry.name}: classes {sorted(unknown)} are not in placement.classes {sorted(classes)}")
    return Keys(entries)


def _place(loc: tuple[int | str, ...]) -> str:
    """Where a fault is. The name of a field that is not known may be a key, and is left out."""
    number = f"[{loc[0]}]" if loc else ""
    return ".".join([f"keys{number}", *(str(part) for part in loc[1:] if part in KeyConfig.model_fields)])
