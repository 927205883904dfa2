"""The layers that are launched and not computed yet: their order, and which are taken."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.channel.layers import Chunk, LaunchedLayers

CHUNKS = (Chunk(("session", 1), "p", 4, 8, (3, 4)),)


@dataclass
class Computing:
    """A layer's event. A `synchronize` waits for it here by making it true."""

    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def launched(*computing: Computing) -> LaunchedLayers:
    layers = LaunchedLayers()
    for layer, ready in enumerate(computing):
        layers.add(CHUNKS, layer, ready)
    return layers


def test_the_oldest_layers_that_are_computed_are_taken_once() -> None:
    layers = launched(Computing(True), Computing(True), Computing())
    assert list(layers.take()) == [(CHUNKS, 0), (CHUNKS, 1)]
    assert len(layers) == 1
    assert list(layers.take()) == []


def test_a_layer_does_not_overtake_an_older_one() -> None:
    older = Computing()
    layers = launched(older, Computing(True))
    assert list(layers.take()) == []
    older.is_done = True
    assert list(layers.take()) == [(CHUNKS, 0), (CHUNKS, 1)]


def test_with_wait_every_layer_is_waited_for_and_taken() -> None:
    computing = [Computing(), Computing()]
    layers = launched(*computing)
    assert list(layers.take(wait=True)) == [(CHUNKS, 0), (CHUNKS, 1)]
    assert all(each.is_done for each in computing)
    assert len(layers) == 0
