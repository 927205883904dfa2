"""Priority classes: the objectives of each, and the class of a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from configs.checks import DEFAULT_CLASS
from configs.schema import BatonConfig
from deployments.errors import UnknownClass
from deployments.messages import Reject


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """One class. `ttft_s`, `tpot_s`: its objectives; None: it has none. A lower `rank` is served first.

    `weight`: its share of the turns that are not given by rank. `max_queued`: the most requests of the class that wait;
    None: the class has no limit of its own. `yields`: it is placed only where the others leave room, and only while
    none of these waits.
    """

    name: str
    rank: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0
    max_queued: int | None = None
    yields: bool = False


class PriorityClasses:
    """The classes of a configuration, by name. A configuration without classes has one class without objectives."""

    def __init__(self, classes: Iterable[PriorityClass] = (), default: str = DEFAULT_CLASS) -> None:
        self._by_name = {each.name: each for each in classes} or {default: PriorityClass(default)}
        self._default = self._by_name[default]

    @classmethod
    def of(cls, config: BatonConfig) -> PriorityClasses:
        """As configured."""
        classes = (
            PriorityClass(name, each.rank, each.ttft_s, each.tpot_s, each.weight, each.max_queued, each.yields)
            for name, each in config.classes.items()
        )
        return cls(classes, config.placement.default_class)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may ask for."""
        return tuple(self._by_name)

    def resolve(self, name: str) -> PriorityClass:
        """The class of a request that asks for `name`, "" for the default one. Raises UnknownClass."""
        found = self._by_name.get(name) if name else self._default
        if found is None:
            raise UnknownClass(f"priority class {name!r} is none of {', '.join(self._by_name)}")
        return found

    def refusal(self, name: str) -> Reject | None:
        """The refusal of a request whose class does not exist; a value, because exceptions do not cross actors."""
        try:
            self.resolve(name)
        except UnknownClass as error:
            return Reject(str(error), code="unknown_class")
        return None
