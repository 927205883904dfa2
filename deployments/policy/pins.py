"""Which prefixes are pinned, how many blocks that sets aside on each replica, and which one pins what next. Pure.

Every replica that computes prompts pins them, one at a time, as soon as what is promised there leaves room. Where
replicas fetch from each other, the first of an engine computes a prefix, and the others fetch it from there.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable

from configs.schema import BatonConfig
from deployments.messages import BeginPin, Phase, Pin, PinList, ReplicaInfo, ReplicaSnapshot
from transfer.memory.blocks import blocks_for

MOST_TOKENS = 500_000
"""The most tokens of all pinned prefixes: every replica is sent them, and a message has a largest size."""
LEAD_S = 10.0
"""How long the other replicas of an engine wait for the first one to have computed a prefix."""
SPARE_BLOCKS = 1
"""What a request that pins or unpins may hold beside the blocks that stay: the end of its prompt, and its token."""


class Pins:
    """`most`: prefixes. `share`: of a replica's blocks. `fetches`: replicas fetch from each other's caches.

    `now`: the list that all replicas are to have. `refuses`: why none can be pinned; "": they can.
    """

    def __init__(self, most: int, share: float, fetches: bool, refuses: str = "") -> None:
        self.now = PinList()
        self._most, self._share, self._fetches, self._refuses = most, share, fetches, refuses
        self._aside: dict[tuple[int, int, int], int] = {}
        self._leads: dict[tuple[str, str], tuple[str, float]] = {}

    def add(self, pin: Pin, replicas: Iterable[ReplicaInfo]) -> str:
        """Pin a prefix; idempotent. Returns why it is refused; "": it is not. `replicas`: those that are up."""
        pins = self.now.pins
        if any(each.id == pin.id for each in pins):
            return ""
        if why := self._refuses or self._refusal(pin, [info for info in replicas if info.prefills]):
            return why
        self._become((*pins, pin))
        return ""

    def remove(self, pin_id: str) -> bool:
        """Unpin a prefix. Whether it was pinned."""
        left = tuple(pin for pin in self.now.pins if pin.id != pin_id)
        if len(left) == len(self.now.pins):
            return False
        self._become(left)
        return True

    def learn(self, known: PinList | None) -> bool:
        """Take the list that a replica has, if it is newer. Whether it is: this manager has restarted."""
        if known is None or known.version <= self.now.version:
            return False
        self.now = known
        self._aside.clear()
        return True

    def wanted_on(self, info: ReplicaInfo) -> tuple[Pin, ...]:
        """The prefixes that a replica pins: those that fit into its share, in the order in which they were pinned."""
        room, wanted = self._room(info), list[Pin]()
        for pin in self.now.pins if info.prefills else ():
            if pin.blocks <= room:
                room -= pin.blocks
                wanted.append(pin)
        return tuple(wanted)

    def set_aside(self, info: ReplicaInfo) -> int:
        """The blocks of a replica that are promised to no session."""
        if not self.now.pins or not info.prefills:
            return 0
        shape = info.total_blocks, info.max_model_len, info.block_size
        if shape not in self._aside:
            blocks = sum(pin.blocks for pin in self.wanted_on(info))
            self._aside[shape] = blocks + SPARE_BLOCKS if blocks else 0
        return self._aside[shape]

    def next_on(self, snapshot: ReplicaSnapshot, others: Collection[ReplicaSnapshot], now_s: float) -> BeginPin | None:
        """What a replica that has room pins next; None: it waits, or has all. `others`: all that are up."""
        info = snapshot.info
        if info is None or snapshot.phase is not Phase.READY or not self.now.pins:
            return None
        for pin in self.wanted_on(info):
            if not stands(pin, snapshot):
                return self._begin(pin, info, others, now_s)
        return None

    def _begin(self, pin: Pin, info: ReplicaInfo, others: Collection[ReplicaSnapshot], now_s: float) -> BeginPin | None:
        if not self._fetches:
            return BeginPin(pin.id)
        holders = [
            each.info
            for each in others
            if each.info is not None and each.info.fingerprint == info.fingerprint and stands(pin, each)
        ]
        if holders:
            return BeginPin(pin.id, holders[zlib.crc32(info.replica_id.encode()) % len(holders)])
        first, since_s = self._leads.get((pin.id, info.fingerprint), ("", now_s - LEAD_S))
        if first == info.replica_id or now_s - since_s >= LEAD_S:
            self._leads[pin.id, info.fingerprint] = info.replica_id, since_s if first == info.replica_id else now_s
            return BeginPin(pin.id)
        return None

    def _become(self, pins: tuple[Pin, ...]) -> None:
        """The version grows with every change, and differs for unlike lists of two managers that did not know so."""
        number = (self.now.version >> 32) + 1
        self.now = PinList((number << 32) | zlib.crc32(repr([pin.id for pin in pins]).encode()), pins)
        self._aside.clear()
        named = {pin.id for pin in pins}
        self._leads = {key: lead for key, lead in self._leads.items() if key[0] in named}

    def _refusal(self, pin: Pin, replicas: Collection[ReplicaInfo]) -> str:
        pins = self.now.pins
        if not pin.blocks:
            return "the prompt fills no block"
        if len(pins) >= self._most:
            return f"{len(pins)} prefixes are pinned, the most that `placement.pins.most` allows"
        if len(pin.tokens) + sum(len(each.tokens) for each in pins) > MOST_TOKENS:
            return f"all pinned prefixes together would have more than {MOST_TOKENS} tokens"
        if not replicas:
            return "no replica is up that computes prompts"
        room, where = min((self._room(info), info.pool) for info in replicas)
        blocks = pin.blocks + sum(each.blocks for each in pins)
        if blocks > room:
            return (
                f"all pinned prefixes together would take {blocks} blocks, and a replica of {where} has {room} for them"
            )
        return ""

    def _room(self, info: ReplicaInfo) -> int:
        """The blocks of a replica that may be pinned. The longest request that it takes still fits beside them."""
        longest = blocks_for(info.max_model_len, info.block_size) + SPARE_BLOCKS
        return max(0, min(int(self._share * info.total_blocks), info.total_blocks - longest))


def pins_of(config: BatonConfig) -> Pins:
    """What a manager of this configuration begins with: no prefix is pinned."""
    pins, is_pulled = config.placement.pins, config.channel.kind == "vllm"
    why = "prefixes are not pinned with `channel: {kind: vllm}`" if is_pulled else ""
    return Pins(pins.most, pins.share, config.placement.fetch and not is_pulled, why)


def stands(pin: Pin, snapshot: ReplicaSnapshot) -> bool:
    """Whether a replica has all blocks of a prefix pinned."""
    return snapshot.pinned.get(pin.id, 0) >= pin.blocks
