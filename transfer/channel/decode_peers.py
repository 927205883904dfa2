"""The decode workers that a prefill worker may write to.

A decode worker introduces itself with a Hello. It is then connected for good, or refused for good. Only the channel's
thread uses this module.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from transfer.channel.outbox import Outbox, remember
from transfer.control import messages as control
from transfer.control.endpoint import Endpoint
from transfer.memory.layout import KVLayout, mismatch
from transfer.memory.plane import Plane, PlaneError


@dataclass(slots=True)
class Agent:
    """A decode worker: its name and memory on the data plane, and the address of its control endpoint.

    `nudged_s`: when it was last asked to let its transport work.
    """

    name: str
    layout: KVLayout
    address: str
    nudged_s: float = field(default=0.0, compare=False)


class DecodePeers:
    """`agents`: the workers that may be written to, by the identity of their control connection."""

    def __init__(self, plane: Plane, layout: KVLayout, endpoint: Endpoint, outbox: Outbox, warm_up_s: float) -> None:
        self._plane, self._layout, self._endpoint, self._outbox = plane, layout, endpoint, outbox
        self._warm_up_s, self._warm_until = warm_up_s, 0.0
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._listed: set[str] = set()
        self.agents: dict[bytes, Agent] = {}

    def is_active(self, now: float) -> bool:
        """Whether the transport is making or closing a data connection."""
        return now < self._warm_until

    def layout_of(self, sender: bytes) -> KVLayout | None:
        """The memory of a worker that is connected. One that is not is refused, and then introduces itself again.

        This side has forgotten it, or its Hello was lost.
        """
        if (agent := self.agents.get(sender)) is None:
            self.refuse(sender, "this worker is not known here")
            return None
        return agent.layout

    def hello(self, sender: bytes, hello: control.Hello) -> list[bytes]:
        """Connect a worker that introduces itself, or refuse it.

        Returns the identities that this connection replaces. The worker has lost those connections, and has given up
        the handoffs on them.
        """
        agent = Agent(hello.agent, hello.layout, hello.address)
        known = {peer: other for peer, other in self.agents.items() if peer == sender or other.name == agent.name}
        if sender in known and known != {sender: agent}:
            # No answer is sent: "refused" would tell the connected worker that nothing writes to it.
            self._outbox.counts["messages_refused"] += 1
            return []
        reason = self._refused.get(sender)
        if any(other != agent for other in known.values()):
            reason = "this agent's name is another worker's"
        elif not known and reason is None:
            reason = self._connect(hello)
        if reason is not None:
            self.refuse(sender, reason)
            return []
        replaced = [peer for peer in known if peer != sender]
        for peer in replaced:
            del self.agents[peer]
        self.agents[sender] = agent
        self._endpoint.send(sender, control.Welcome())
        return replaced

    def _connect(self, hello: control.Hello) -> str | None:
        """Make the data connection. Returns the reason when there can be none, else None."""
        self._warm_until = time.monotonic() + self._warm_up_s
        reason = mismatch(self._layout, hello.layout)
        if reason is None:
            try:
                self._plane.connect(hello.agent, hello.agent_metadata, hello.layout)
            except PlaneError as error:
                reason = str(error)
        return reason

    def refuse(self, sender: bytes, reason: str) -> None:
        """Refuse a connection for good. A refused peer reuses its blocks, so nothing may be written to it later."""
        self._outbox.counts["messages_refused"] += 1
        remember(self._refused, sender, reason)
        self._endpoint.send(sender, control.Refused(reason[: control.REASON_CHARS]))

    def keep(self, replicas: list[list[str]], busy: Collection[bytes]) -> None:
        """Forget the workers of replicas that were listed before and are not listed now.

        `replicas`: each is the endpoints of its workers. `busy`: the workers with an open handoff. They are forgotten
        at a later call.
        """
        now_listed = {endpoint for workers in replicas for endpoint in workers}
        gone, self._listed = self._listed - now_listed, now_listed
        for sender, agent in list(self.agents.items()):
            if agent.address not in gone:
                continue
            if sender in busy:
                self._listed.add(agent.address)
            else:
                self._warm_until = time.monotonic() + self._warm_up_s
                self._plane.disconnect(agent.name)
                del self.agents[sender]
