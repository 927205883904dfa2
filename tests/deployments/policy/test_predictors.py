"""Predictors: what was learned reaches the next request, and only when it is more than a guess."""

from __future__ import annotations

from deployments.fleet.columns import UNKNOWN
from deployments.messages import CacheChange, ReplicaInfo, Role, SessionRequest, StepSample
from deployments.policy.predictors import LEARN_EVERY_S, TRUSTED_STEPS, Predictors

PRIOR = (5e-3, 1e-4, 0.0, 1e-4, 1e-7)


def info(prior: tuple[float, ...] = PRIOR) -> ReplicaInfo:
    return ReplicaInfo("d0", "small", Role.DECODE, "node", "engine", 16, 100, 8, 2048, prior=prior)


def samples(count: int) -> tuple[StepSample, ...]:
    return tuple(StepSample(0.02 + 1e-3 * (number % 7), decode_sequences=1 + number % 7) for number in range(count))


def test_a_prior_is_used_at_once_and_trusted_only_after_enough_steps() -> None:
    predictors, request = Predictors(0.0), SessionRequest("a", 100, 50)
    predictors.learn_steps(info(), ())
    assert tuple(predictors.coefficients(0.0)["small"]) == PRIOR
    assert predictors.knowledge(request).trusted == frozenset()
    predictors.learn_steps(info(), samples(2 * TRUSTED_STEPS))
    assert predictors.knowledge(request).trusted == {"small"}


def test_without_a_prior_a_pool_has_coefficients_once_enough_steps_were_seen() -> None:
    predictors = Predictors(0.0)
    predictors.learn_steps(info(()), samples(1))
    assert predictors.coefficients(0.0) == {}
    predictors.learn_steps(info(()), samples(2 * TRUSTED_STEPS))
    assert predictors.coefficients(1.0)["small"].base_s > 0.0
    assert predictors.steps_of("unknown") == UNKNOWN


def test_coefficients_are_a_new_object_only_when_they_changed_and_not_too_often() -> None:
    predictors = Predictors(0.0)
    predictors.learn_steps(info(), ())
    first = predictors.coefficients(0.0)
    assert predictors.coefficients(1.0) is first
    predictors.learn_steps(info(), samples(TRUSTED_STEPS))
    assert predictors.coefficients(1.0 + LEARN_EVERY_S / 2) is first
    assert predictors.coefficients(1.0 + 2 * LEARN_EVERY_S) is not first


def test_a_placed_prompt_is_expected_where_it_is_not_cached_and_its_affinity_is_kept() -> None:
    predictors = Predictors(1e9)
    predictors.index.apply("d0", CacheChange(1, (1, 2), whole=True), 0.0)
    request = SessionRequest("a", 64, 50, hashes=(1, 2, 3, 4), affinity="conversation")
    known = predictors.knowledge(request)
    assert (known.hits, known.pinned, known.link_bytes_per_s) == ({"d0": 2}, frozenset(), 1e9)
    predictors.placed(request, {"d0"}, known.hits, 0.0)
    again = predictors.knowledge(request)
    assert (again.hits, again.pinned) == ({"d0": 4}, frozenset({"d0"}))
    assert predictors.index.expected == 2
    assert predictors.describe()["index_blocks"] == 2
