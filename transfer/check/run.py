"""The check itself: bytes, bandwidth and overlap, in this order. Its two processes end with it."""

from __future__ import annotations

import platform
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from transfer.check.child import Child
from transfer.check.figures import Pass, gb_per_s, overlap, wrong_blocks
from transfer.check.shape import CheckFailed, Shape, scattered
from transfer.check.sides import Decode, Prefill

GRACE_S = 10.0  # a side's own deadline passes first, because its error names what it waited for


class Check:
    """Two started sides, and the number of bytes verified on them."""

    def __init__(self, prefill: Child, decode: Child, shape: Shape, say: Callable[[str], None]) -> None:
        self._prefill, self._decode, self._shape, self._say = prefill, decode, shape, say
        self._chance, self._handoffs, self.bytes_verified = random.Random(1), 0, 0
        self._address = prefill.call("address")
        decode.call("fill", 1)
        self._before: list[bytes] = decode.call("digests")

    def bytes(self) -> dict[str, Any]:
        """Move blocks in several patterns, and compare all of both caches each time."""
        shape, count = self._shape, self._shape.prompt_blocks
        full, some = count * shape.block_size, scattered(shape, count, self._chance)
        ahead, behind = list(range(count)), list(range(shape.blocks - count, shape.blocks))
        odd = full - shape.block_size // 2  # the last block is only half full, and moves whole
        patterns = {
            "contiguous": (ahead, behind, full, [full]),
            "descending": (behind[::-1], ahead[::-1], full, [full]),
            "scattered": (some, scattered(shape, count, self._chance), full, [full]),
            "in chunks": (some, scattered(shape, count, self._chance), odd, shape.chunks(odd)),
            "one block": (some[:1], scattered(shape, 1, self._chance), shape.block_size, [shape.block_size]),
        }
        for seed, (name, (source, target, tokens, steps)) in enumerate(patterns.items(), start=2):
            self._prefill.call("fill", seed)
            self._write(source, target, tokens, steps)
            self._verify(name, source, target)
        self._say(
            f"bytes      {len(patterns)} patterns, {self.bytes_verified / 1e6:.1f} MB as sent, no other block touched"
        )
        return {"patterns": list(patterns), "wrong_blocks": 0}

    def bandwidth(self, rounds: int, devices: Sequence[str]) -> dict[str, Any]:
        """Write rates of blocks that are all ready, beside the rates of plain copies within and between the devices."""
        shape, most = self._shape, self._shape.prompt_blocks
        rows = []
        for count in sorted({1, max(1, most // 8), most}):
            for kind in ("contiguous", "scattered"):
                rows.append(self._rate(count, kind, rounds))
                self._say(
                    f"bandwidth  {count:4} {kind:10} blocks a layer, {rows[-1]['bytes'] / 1e6:8.1f} MB: "
                    f"{rows[-1]['gb_per_s']:8.2f} GB/s"
                )
        limits: dict[str, float] = {}
        for name, device in zip(
            ("copy_within_device_gb_per_s", "copy_between_devices_gb_per_s"), devices, strict=False
        ):
            seconds = [self._prefill.call("copy_s", most, device) for _ in range(rounds)]
            limits[name] = gb_per_s(shape.kv_bytes(most), seconds)
            share = rows[-2]["gb_per_s"] / limits[name]
            self._say(f"           torch copies to {device} at {limits[name]:.2f} GB/s; contiguous writes: {share:.0%}")
        return {"writes": rows, **limits}

    def overlap(self, rounds: int) -> dict[str, Any]:
        """Prefill with writes and without, in turns. The first round of each does not count."""
        with_writes: list[Pass] = []
        without: list[Pass] = []
        received: list[float] = []
        for turn in range(rounds + 1):
            for writes in (True, False) if turn % 2 else (False, True):
                source = sorted(scattered(self._shape, self._shape.prompt_blocks, self._chance))
                if not writes:
                    without.append(self._prefill.call("prefill", "", source, turn, False))
                    continue
                target = sorted(scattered(self._shape, self._shape.prompt_blocks, self._chance))
                session = self._offer(target)
                with_writes.append(self._prefill.call("prefill", session, source, turn, True))
                received.append(self._decode.call("received", session))
                self._verify("prefill", source, target)
        figures = overlap(with_writes[1:], received[1:], without[1:])
        self._say(
            f"overlap    {figures['overlap_share']:.1%} of {figures['kv_bytes'] / 1e6:.1f} MB moved before the prefill "
            f"ended; all at decode {figures['tail_ms']:.2f} ms after its end"
        )
        on_ms, off_ms = figures["prefill_ms"], figures["prefill_without_writes_ms"]
        slowdown = figures["prefill_slowdown"]
        self._say(f"prefill    {on_ms:.1f} ms with writes, {off_ms:.1f} ms without: {slowdown:+.1%}")
        return figures

    def _rate(self, count: int, kind: str, rounds: int) -> dict[str, Any]:
        shape = self._shape
        source, target = list(range(count)), list(range(shape.blocks - count, shape.blocks))
        if kind == "scattered":
            source, target = scattered(shape, count, self._chance), scattered(shape, count, self._chance)
        tokens = count * shape.block_size
        self._prefill.call("fill", self._handoffs + 100)
        passes = [self._write(source, target, tokens, [tokens]) for _ in range(rounds + 1)]
        self._verify(f"{count} {kind} blocks", source, target)
        size = shape.kv_bytes(count)
        rate = gb_per_s(size, [one.write_s for one in passes[1:]])  # the first one makes connections
        return {"blocks": count, "kind": kind, "bytes": size, "gb_per_s": rate}

    def _write(self, source: list[int], target: list[int], tokens: int, steps: list[int]) -> Pass:
        session = self._offer(target)
        written: Pass = self._prefill.call("write", session, source, tokens, steps)
        self._decode.call("received", session)
        return written

    def _offer(self, target: list[int]) -> str:
        self._handoffs += 1
        session = f"check-{self._handoffs}"
        self._decode.call("offer", session, self._address, target)
        return session

    def _verify(self, what: str, source: list[int], target: list[int]) -> None:
        for side in (self._prefill, self._decode):
            side.ask("digests")
        sent, after = self._prefill.answer(), self._decode.answer()
        if wrong := wrong_blocks(self._before, after, sent, source, target):
            raise CheckFailed(f"{what}: decode blocks {wrong} do not hold what they should; {target} were written")
        self._before = after
        self.bytes_verified += self._shape.kv_bytes(len(target))


def run(
    devices: Sequence[str],
    shape: Shape,
    rounds: int,
    transports: str | None,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the whole check. `devices`: prefill's, then decode's, which may be the same. Raises CheckFailed."""
    secret = secrets.token_hex()
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(Child(name, make, (device, shape, secret, transports, timeout_s), timeout_s + GRACE_S))
            for name, make, device in (("prefill", Prefill, devices[0]), ("decode", Decode, devices[-1]))
        )
        names = {"prefill": prefill.call("device_name"), "decode": decode.call("device_name")}
        for role, name in names.items():
            say(f"{role:10} {name}")
        check = Check(prefill, decode, shape, say)
        parts = {
            "bytes": check.bytes(),
            "bandwidth": check.bandwidth(rounds, list(dict.fromkeys(devices))),
            "overlap": check.overlap(rounds),
        }
        return {
            "ok": True,
            "devices": names,
            **parts,
            "bytes_verified": check.bytes_verified,
            "conditions": asdict(shape) | {"rounds": rounds, "transports": transports, "versions": versions()},
        }


def versions() -> dict[str, str]:
    """The versions that the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nixl": metadata.version("nixl"),
    }
