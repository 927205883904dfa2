"""The randomness that policy needs; `random.Random` has it. It is always an argument, so a decision can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Chance(Protocol):
    """A source of randomness."""

    def random(self) -> float: ...

    def choice(self, seq: Sequence[T]) -> T: ...

    def choices(self, population: Sequence[T], weights: Sequence[float]) -> list[T]: ...

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...
