"""The fleets that a plan chooses among: a prefill and a decode pool of one device each, or one mixed pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.messages import Role
from load_tests.plan.devices import Device
from load_tests.simulator.profiles import Cluster, Pool
from load_tests.simulator.steps import Limits

PROMPT_CHUNK, ANSWER_CHUNK = 8192, 2048
"""Tokens of a step: of replicas that mostly prefill, and of those that mostly write answers."""

Counts = tuple[int, ...]
"""Replicas of each pool, in the order of the kind's pools."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Pools of these devices, with these roles."""

    roles: tuple[Role, ...]
    devices: tuple[Device, ...]

    @property
    def name(self) -> str:
        return " + ".join(f"{role.value} {device.name}" for role, device in zip(self.roles, self.devices, strict=True))

    def cost(self, counts: Counts) -> float:
        """What so many replicas of each pool cost an hour."""
        return sum(device.cost * number for device, number in zip(self.devices, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many replicas of each pool of a kind."""

    kind: Kind
    counts: Counts

    @property
    def cost(self) -> float:
        return self.kind.cost(self.counts)

    @property
    def name(self) -> str:
        parts = zip(self.kind.roles, self.counts, self.kind.devices, strict=True)
        return " + ".join(f"{role.value} {number} x {device.name}" for role, number, device in parts)

    def fewer(self) -> tuple[Fleet, ...]:
        """The fleets with one replica fewer of one pool. A pool of one replica is not made smaller."""
        pools = range(len(self.counts))
        return tuple(
            Fleet(self.kind, tuple(number - (pool == each) for pool, number in enumerate(self.counts)))
            for each in pools
            if self.counts[each] > 1
        )


def kinds(devices: Iterable[Device], split: bool = True, mixed: bool = True) -> list[Kind]:
    """Every pair of devices for prefill and decode, and every device for both at once."""
    devices, found = tuple(devices), list[Kind]()
    if split:
        found += [Kind((Role.PREFILL, Role.DECODE), pair) for pair in itertools.product(devices, repeat=2)]
    if mixed:
        found += [Kind((Role.MIXED,), (device,)) for device in devices]
    return found


def cluster(fleet: Fleet, max_model_len: int) -> Cluster:
    """The fleet as the simulator takes it."""
    parts = zip(fleet.kind.roles, fleet.kind.devices, fleet.counts, strict=True)
    return Cluster(tuple(_pool(role, device, number) for role, device, number in parts), max_model_len)


def _pool(role: Role, device: Device, number: int) -> Pool:
    chunk = ANSWER_CHUNK if role is Role.DECODE else PROMPT_CHUNK
    name = "prefill" if role is Role.PREFILL else device.name
    return Pool(name, role, number, device.profile, Limits(batched_tokens=chunk, sequences=device.sequences))
