"""The two sides of the check: a KV cache in torch tensors, one per layer, with the channel of vLLM's workers."""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transfer.channel.channel import Channel
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key
from transfer.check.figures import Pass, block_digests
from transfer.check.shape import CheckFailed, Shape
from transfer.check.transformer import Transformer
from transfer.control.messages import Seal
from transfer.memory.layout import KVLayout
from transfer.memory.nixl_plane import NixlPlane


def key_of(session: str) -> Key:
    """A session's only handoff."""
    return session, 1


class Side:
    """A KV cache and its channel. `transports`: UCX_TLS, or None. `timeout_s`: of every handoff and every wait."""

    def __init__(self, device: str, shape: Shape, secret: str, transports: str | None, timeout_s: float) -> None:
        self._device, self._shape, self._timeout_s = torch.device(device), shape, timeout_s
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)  # as Baton's replicas on CPU do
        dtype = getattr(torch, shape.dtype)
        self._cache = [torch.zeros(shape.layer_shape, dtype=dtype, device=self._device) for _ in range(shape.layers)]
        self._synchronize()
        self._news, self._received, self._released = threading.Event(), set[str](), set[str]()
        self._events: list[tuple[float, str, dict[str, Any]]] = []
        layout = KVLayout(
            num_layers=shape.layers,
            regions_per_layer=1,
            num_blocks=shape.blocks,
            block_size=shape.block_size,
            block_bytes=shape.block_bytes,
            bases=tuple(layer.data_ptr() for layer in self._cache),
            device=self._device.type,
            device_id=self._device.index or 0,
            facts={"dtype": shape.dtype},
            total_heads=shape.kv_heads,
        )
        plane = NixlPlane(f"check-{uuid.uuid4().hex[:8]}", transports=transports)
        self._channel = Channel(plane, layout, Seal(secret), "127.0.0.1", timeout_s, self._trace)
        self._channel.on_news(self._news.set)

    def device_name(self) -> str:
        """The name of the device that holds the cache."""
        if self._device.type == "cuda":
            return f"{self._device}: {torch.cuda.get_device_name(self._device)}"
        return f"cpu: {platform.machine()}, {os.cpu_count()} cores"

    def fill(self, seed: int) -> None:
        """Fill the whole cache with random bytes, different for every seed."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for layer in self._cache:
            layer.view(torch.uint8).random_(0, 256, generator=generator)
        self._synchronize()

    def digests(self) -> list[bytes]:
        """One digest per block."""
        return block_digests(layer.view(torch.uint8).cpu().numpy() for layer in self._cache)

    def close(self) -> None:
        """End the channel. The memory may be freed only after that."""
        self._channel.close()

    def _trace(self, event: str, **fields: Any) -> None:
        self._events.append((time.monotonic(), event, fields))
        self._news.set()

    def _taken(self, event: str, session: str) -> list[tuple[float, dict[str, Any]]]:
        """Times and fields of one session's events of one kind."""
        return [(at, fields) for at, kind, fields in self._events if kind == event and fields["session"] == session]

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. It sleeps between news, as polling would disturb the measurement."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._news.clear()
            results = self._channel.take_results()
            for session, reason in results.broken.items():
                raise CheckFailed(f"handoff {session} broke: {reason}")
            self._received |= results.received.keys()
            self._released |= results.released
            if condition():
                return
            if not self._news.wait(deadline - time.monotonic()):
                raise CheckFailed(f"{what} took over {self._timeout_s:g} s")

    def _synchronize(self, other: Any = None) -> None:
        if self._device.type == "cuda":
            for device in (self._device, other or self._device):
                torch.cuda.synchronize(device)


class Decode(Side):
    """Offers blocks and waits for them."""

    def offer(self, session: str, peer: str, blocks: list[int]) -> None:
        """Offer `blocks` to the prefill side at `peer`."""
        self._channel.offer(key_of(session), session, [peer], 0, blocks, needs_token=False)

    def received(self, session: str) -> float:
        """Wait for the KV. Returns the time when the channel knew that all of it was here."""
        self._wait(
            f"the KV of handoff {session}",
            lambda: session in self._received and bool(self._taken("received", session)),
        )
        return self._taken("received", session)[0][0]


class Prefill(Side):
    """Writes blocks, either as they are or while it computes them."""

    def __init__(self, device: str, shape: Shape, secret: str, transports: str | None, timeout_s: float) -> None:
        super().__init__(device, shape, secret, transports, timeout_s)
        self._model = Transformer(shape, self._device)

    def address(self) -> str:
        """The endpoint that decode's offers go to."""
        return self._channel.address

    def write(self, session: str, blocks: list[int], prompt_tokens: int, steps: Sequence[int]) -> Pass:
        """Hand over the blocks as they are. `steps`: the number of tokens that count as computed after each step."""
        self._offered(session)
        begun = time.monotonic()
        for computed in steps:
            self._channel.begin_step([Chunk(key_of(session), session, computed, prompt_tokens, tuple(blocks))])
            for layer in range(self._shape.layers):
                self._channel.layer_saved(layer)
            self._channel.end_step()
        return self._written(session, begun, time.monotonic())

    def prefill(self, session: str, blocks: list[int], seed: int, writes: bool) -> Pass:
        """Prefill a random prompt in chunks, and hand over each layer of each chunk as the connector does."""
        prompt = self._model.prompt(self._shape.prompt_tokens, seed)
        if writes:
            self._offered(session)
        self._synchronize()
        saved = self._saved if writes else _not_saved
        begun, done = time.monotonic(), 0
        with torch.inference_mode():
            for computed in self._shape.chunks(self._shape.prompt_tokens):
                if writes:
                    chunk = Chunk(key_of(session), session, computed, self._shape.prompt_tokens, tuple(blocks))
                    self._channel.begin_step([chunk])
                self._model.forward(prompt[done:computed], done, blocks, self._cache, saved)
                self._channel.end_step()
                self._drain()  # an engine step ends when its token has been sampled
                done = computed
        ended = time.monotonic()
        return self._written(session, begun, ended) if writes else Pass(begun, ended)

    def copy_s(self, blocks: int, device: str) -> float:
        """The seconds that torch takes to copy `blocks` blocks, layer after layer, to this or another device."""
        other = torch.device(device)
        targets = [torch.empty_like(layer[:blocks], device=other) for layer in self._cache]
        for _ in range(2):  # the first copy touches the memory and connects the devices
            self._synchronize(other)
            begun = time.monotonic()
            for layer, target in zip(self._cache, targets, strict=True):
                target.copy_(layer[:blocks])
            self._synchronize(other)
        return time.monotonic() - begun

    def _saved(self, layer: int) -> None:
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self._channel.layer_saved(layer, ready)

    def _drain(self) -> None:
        """Wait for the compute stream only: the writes have streams of their own."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _offered(self, session: str) -> None:
        self._wait(f"the offer of handoff {session}", lambda: self._channel.is_answered(key_of(session)))

    def _written(self, session: str, begun: float, ended: float) -> Pass:
        self._channel.ended(key_of(session), session, ok=True)
        self._wait(f"the writes of handoff {session}", lambda: session in self._released)
        done = tuple((at, int(fields["bytes"])) for at, fields in self._taken("layer_written", session))
        self._events.clear()
        return Pass(begun, ended, done)


def _not_saved(layer: int) -> None:
    return
