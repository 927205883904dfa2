"""Traces of requests: public formats are read, others are made from a seed. Any can be scaled to a rate and a size.

Two formats; a file's first line tells which:
- Mooncake (FAST '25): JSON lines `{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`. An id names a
  block of 512 tokens *and* what came before it, so ids are chained hashes. A trace of the session manager
  (`deployments/manager/trace_file.py`) has this format and says more: the size of its blocks, `max_tokens`, the class.
  Where it does not know what was answered, as of a refused request, the last answer before it stands in, of its class
  where there is one.
- Azure (LLM inference traces): CSV `TIMESTAMP,ContextTokens,GeneratedTokens`. There are no hashes, so nothing is ever
  cached.

Other traces do not say how many tokens a client asks for. It is taken to be twice the answer's length after rounding up
to a power of two, at least 256 and at most 8192 tokens. Such a limit is far off but has the right order of magnitude.
"""

from __future__ import annotations

import csv
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
AZURE_BLOCK_TOKENS = 128
LEAST_MAX_TOKENS, MOST_MAX_TOKENS = 256, 8192
HASH_BITS = 40
"""The ids of a trace are below 2^40. The bits above hold the number of the copy that a request belongs to."""
DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"


class TraceError(Exception):
    """A trace is missing, or one of its lines is malformed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at_s`: arrival. `hashes`: of the prompt's full blocks, each over all up to its end. `client`: the sender.

    `answered`: the hashes of the full blocks behind those, which hold the end of the prompt and the answer; empty where
    the trace does not say what the next turn repeats. `asked_tokens`: the limit that its client gave; 0: not known.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()
    client: str = ""
    answered: tuple[int, ...] = ()
    asked_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """The number of tokens that its client asks for."""
        if self.asked_tokens:
            return max(self.asked_tokens, self.output_tokens)
        rounded = 1 << max(self.output_tokens - 1, 0).bit_length()
        return max(self.output_tokens, min(max(2 * rounded, LEAST_MAX_TOKENS), MOST_MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, and the block size of their hashes, in tokens."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def scaled(self, requests_per_s: float, count: int) -> Trace:
        """The first `count` requests at a given mean rate. All times are compressed or stretched alike.

        A trace that is too short is repeated, and each repetition has its own hashes. Compressed times bring the turns
        of a conversation closer together: a cache sees them in the same order, but sooner.
        """
        if not self.requests:
            raise TraceError(f"trace {self.name} has no requests")
        first_s = self.requests[0].at_s
        length_s = (self.requests[-1].at_s - first_s) * len(self.requests) / max(len(self.requests) - 1, 1)
        factor = len(self.requests) / requests_per_s / length_s if length_s > 0 else 0.0
        taken = []
        for index in range(count):
            copy, position = divmod(index, len(self.requests))
            request = self.requests[position]
            at_s = copy * len(self.requests) / requests_per_s + (request.at_s - first_s) * factor
            hashes, answered = (
                tuple(block + (copy << HASH_BITS) for block in blocks) if copy else blocks
                for blocks in (request.hashes, request.answered)
            )
            taken.append(replace(request, at_s=at_s, hashes=hashes, answered=answered))
        return replace(self, requests=tuple(taken))

    def fitting(self, max_model_len: int) -> Trace:
        """The trace without the requests that no replica could serve."""
        kept = tuple(r for r in self.requests if r.prompt_tokens + r.max_tokens <= max_model_len)
        return replace(self, requests=kept)


def mooncake(path: Path) -> Trace:
    """A Mooncake trace. Raises TraceError, which names the line, where one is malformed."""
    with path.open() as lines:
        block_tokens = _block_tokens(path, lines.readline())
    return Trace(path.stem, block_tokens, tuple(_read(path, functools.partial(_mooncake_requests, block_tokens))))


def _block_tokens(path: Path, line: str) -> int:
    """The tokens of a block, by a trace's first line."""
    try:
        return _length(json.loads(line).get("block_tokens", MOONCAKE_BLOCK_TOKENS))
    except ValueError as error:
        raise TraceError(f"{path}: request 1: {error!r}") from error


def azure(path: Path) -> Trace:
    """An Azure trace. Raises TraceError, which names the line, where one is malformed."""
    return Trace(path.stem, AZURE_BLOCK_TOKENS, tuple(_read(path, _azure_requests)))


def load(path: Path) -> Trace:
    """A trace in either format."""
    with path.open() as lines:
        first = lines.readline()
    if first.lstrip().startswith("{"):
        return mooncake(path)
    if "ContextTokens" in first:
        return azure(path)
    raise TraceError(f"{path}: neither a Mooncake nor an Azure trace: it begins {first[:60]!r}")


def find(name: str, folder: Path | None = None) -> Trace:
    """The trace whose file name begins with `name`, in `folder`, $TRACES or the shared folder."""
    folder = folder or Path(os.environ.get("TRACES") or DEFAULT_FOLDER)
    files = sorted(file for file in folder.glob(f"{name}*") if file.suffix in (".jsonl", ".csv"))
    if not files:
        raise TraceError(f"no trace {name}*.jsonl or {name}*.csv in {folder}; TRACES=DIR names another folder")
    return load(files[0])


def _read(path: Path, parse: Callable[[Iterator[str]], Iterator[TraceRequest]]) -> Sequence[TraceRequest]:
    requests: list[TraceRequest] = []
    try:
        with path.open(newline="") as lines:
            requests.extend(parse(lines))
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: request {len(requests) + 1}: {error!r}") from error
    if not requests:
        raise TraceError(f"{path}: no requests")
    return sorted(requests, key=lambda request: request.at_s)


def _mooncake_requests(block_tokens: int, lines: Iterator[str]) -> Iterator[TraceRequest]:
    answers: dict[str, int] = {}  # the last one of each class
    output = 1
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        if row.get("block_tokens", MOONCAKE_BLOCK_TOKENS) != block_tokens:
            raise ValueError(f"blocks of {row.get('block_tokens')} tokens after blocks of {block_tokens}")
        prompt, priority = _length(row["input_length"]), row.get("class", "")
        hashes = tuple(_hash(block) for block in row["hash_ids"])
        if "outcome" in row:
            output = int(row["output_length"]) or answers.get(priority, output)
        else:
            output = _length(row["output_length"])
            if len(hashes) < prompt // block_tokens:
                raise ValueError(f"{len(hashes)} hashes for {prompt} tokens")
        answers[priority] = output
        full = hashes[: prompt // block_tokens]
        at_s = float(row["timestamp"]) / 1e3
        yield TraceRequest(at_s, prompt, output, full, asked_tokens=int(row.get("max_tokens", 0)))


def _azure_requests(lines: Iterator[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
        at_s = moment.timestamp() + float(f"0.{fraction or 0}")
        yield TraceRequest(at_s, _length(row["ContextTokens"]), _length(row["GeneratedTokens"]))


def _length(value: object) -> int:
    length = int(str(value))
    if length < 1:
        raise ValueError(f"a length of {length} tokens")
    return length


def _hash(value: object) -> int:
    number = int(str(value))
    if not 0 <= number < 1 << HASH_BITS:
        raise ValueError(f"hash id {number} is not in [0, 2^{HASH_BITS})")
    return number
