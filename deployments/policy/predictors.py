"""Everything that is learned of requests and replicas, and what it says of one request when it arrives. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deployments.fleet.columns import UNKNOWN
from deployments.messages import ReplicaInfo, SessionRequest, StepSample
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.prediction.adapters import AdapterIndex
from deployments.policy.prediction.answer_length import Length, LengthPredictor
from deployments.policy.prediction.prefix_index import PrefixIndex
from deployments.policy.prediction.step_time import StepModel
from deployments.policy.scaling.demand import Demand
from deployments.step_cost import Coefficients

TRUSTED_STEPS = 64
"""The steps of a pool that must have been seen before requests are refused by its predicted times."""

LEARN_EVERY_S = 0.1
"""The least time between two changes of the coefficients that placement uses: each change updates every replica's
row."""

AFFINITIES = 65_536
"""The most affinity keys that are remembered; the one used longest ago is forgotten first."""


class Predictors:
    """The prefix index, the replicas' adapters, the length of answers, the demand, the time of steps, and the replicas
    of each affinity key.

    `link_bytes_per_s`: between two replicas; 0 where it is not known. `models`: by pool. The model of a pool starts
    from what its first replica reports of its hardware.
    """

    def __init__(self, link_bytes_per_s: float) -> None:
        self.index, self.adapters = PrefixIndex(), AdapterIndex()
        self.lengths, self.demand = LengthPredictor(), Demand()
        self.models: dict[str, StepModel] = {}
        self._link_bytes_per_s = link_bytes_per_s
        self._block_tokens = 0
        self._coefficients: dict[str, Coefficients] = {}
        self._learned_s = -LEARN_EVERY_S
        self._affinities: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._expectations: dict[str, int] = {}  # by session

    def knowledge(self, request: SessionRequest) -> Knowledge:
        """What is known of a request now. The prediction of its length is remembered, to be judged at its end."""
        known = self._known(request, self.lengths.predict(request))
        cached_tokens = max(known.hits.values(), default=0) * self._block_tokens
        self.demand.came(request, cached_tokens, known.output_tokens)
        return known

    def look(self, request: SessionRequest) -> Knowledge:
        """The same of a request that does not come: nothing is remembered of it."""
        return self._known(request, self.lengths.guess(request))

    def _known(self, request: SessionRequest, length: Length) -> Knowledge:
        hits, resident = self.index.find(request.hashes) if request.hashes else ({}, {})
        return Knowledge(
            hits=hits,
            resident=resident,
            output_tokens=length.mean,
            trusted=frozenset(pool for pool, model in self.models.items() if model.count >= TRUSTED_STEPS),
            pinned=self._affinities.get(request.affinity, frozenset()) if request.affinity else frozenset(),
            link_bytes_per_s=self._link_bytes_per_s,
            adapter_on=self.adapters.holders(request.adapter) if request.adapter else frozenset(),
            adapter_s=self.adapters.load_s if request.adapter else 0.0,
        )

    def forget(self, replica_id: str) -> None:
        """A replica is gone, and what it had with it."""
        self.index.forget(replica_id)
        self.adapters.forget(replica_id)

    def learn_steps(self, info: ReplicaInfo, steps: Sequence[StepSample]) -> None:
        """Learn from the steps that a replica reports. A pool has coefficients once they are more than a guess."""
        self._block_tokens = info.block_size  # the same in every pool
        model = self.models.get(info.pool)
        if model is None:
            model = self.models[info.pool] = StepModel(
                Coefficients(*info.prior) if info.prior else UNKNOWN, seats=info.max_sessions
            )
        for sample in steps:
            model.observe(sample)
        if info.pool not in self._coefficients and (info.prior or model.count >= TRUSTED_STEPS):
            self._coefficients = {**self._coefficients, info.pool: model.coefficients}

    def coefficients(self, now_s: float) -> Mapping[str, Coefficients]:
        """What the steps of each pool take, as placement uses it: a new object only when it has changed."""
        if not self._learned_s <= now_s < self._learned_s + LEARN_EVERY_S:
            self._learned_s = now_s
            newest = {pool: self.models[pool].coefficients for pool in self._coefficients}
            self._coefficients = self._coefficients if newest == self._coefficients else newest
        return self._coefficients

    def steps_of(self, pool: str) -> Coefficients:
        """What the steps of a pool take, by everything that it has reported."""
        model = self.models.get(pool)
        return model.coefficients if model else UNKNOWN

    def placed(
        self, request: SessionRequest, replica_ids: Collection[str], hits: Mapping[str, int], now_s: float
    ) -> None:
        """A request was placed on these replicas: they are about to cache its prompt, and its affinity names them."""
        if request.hashes:
            self.computed(request.session_id, now_s)
            known = min(hits.get(replica_id, 0) for replica_id in replica_ids)
            number = self.index.expect(sorted(replica_ids), request.hashes, now_s, known)
            self._expectations[request.session_id] = number
        if request.affinity:
            self._affinities[request.affinity] = frozenset(replica_ids)
            self._affinities.move_to_end(request.affinity)
            if len(self._affinities) > AFFINITIES:
                self._affinities.popitem(last=False)

    def computed(self, session_id: str, now_s: float) -> None:
        """The prompt of a placed session is computed, or never will be there: its blocks are reported soon, or never.

        Idempotent.
        """
        number = self._expectations.pop(session_id, None)
        if number is not None:
            self.index.computed(number, now_s)

    def describe(self) -> dict[str, Any]:
        """What was learned and how good it is, for the status page.

        `{"steps": {pool: {name_s: seconds, "seen", "trusted"}}, "lengths": {coverage and error}, "index_blocks"}`
        """
        steps = {
            pool: model.coefficients._asdict() | {"seen": model.count, "trusted": model.count >= TRUSTED_STEPS}
            for pool, model in self.models.items()
        }
        return {"steps": steps, "lengths": self.lengths.calibration(), "index_blocks": len(self.index)}
