"""The parts of the planner: what is predicted, forecast, measured and afforded."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from deployments.messages import Role, SessionRequest
from deployments.policy.scaling.budget import within
from deployments.policy.scaling.demand import Demand
from deployments.policy.scaling.forecast import Forecast
from deployments.policy.scaling.history import History
from deployments.policy.scaling.inputs import Now, PoolNow
from deployments.policy.scaling.predict import ClassLoad, Load, erlang_c, predict
from deployments.policy.scaling.starts import UNKNOWN_S, Starts
from tests.deployments.policy.scaling.world import BLOCK, BLOCKS, DECODE, PLACES, PREFILL, asked


def pool(role: Role = Role.PREFILL, **more: object) -> PoolNow:
    steps = PREFILL if role is Role.PREFILL else DECODE
    made = PoolNow(role.value, role, 2, 2, (), steps, BLOCKS, BLOCK, PLACES, 2048)
    return replace(made, **more)  # type: ignore[arg-type]


def chat(per_s: float, ttft_s: float = 1.0, rank: int = 0, prompt: float = 1000.0) -> ClassLoad:
    return ClassLoad("chat", rank, ttft_s, 0.05, asked(per_s, prompt))


def test_erlangs_formula_is_that_of_the_tables() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=1e-3)
    assert erlang_c(3, 3.0) == 1.0


def test_the_predicted_wait_is_that_of_a_simulated_queue() -> None:
    """99 of 100 waits of prompts of one length and chance arrivals, on three servers at 80%."""
    rng, servers, at_s, waits = random.Random(1), [0.0] * 3, 0.0, []
    per_s, takes_s = 0.8 * 3 / 0.11, 0.11
    for _ in range(40_000):
        at_s += rng.expovariate(per_s)
        first = min(range(3), key=servers.__getitem__)
        waits.append(max(0.0, servers[first] - at_s))
        servers[first] = max(servers[first], at_s) + takes_s
    real_s = sorted(waits)[int(0.99 * len(waits))]
    found = predict(pool(), Load((chat(per_s),)), 3, 1.0)
    assert found.ttft_s - takes_s == pytest.approx(real_s, rel=0.25)


def test_more_replicas_strain_less_and_more_load_strains_more() -> None:
    strains = [predict(pool(), Load((chat(20.0),)), replicas, 0.85).strain for replicas in range(1, 8)]
    assert strains == sorted(strains, reverse=True)
    loads = [predict(pool(), Load((chat(per_s),)), 4, 0.85).strain for per_s in range(1, 40)]
    assert loads == pytest.approx(sorted(loads))


def test_a_class_of_a_lower_rank_does_not_wait_for_the_others() -> None:
    behind = replace(chat(0.5, 60.0, rank=1, prompt=30_000.0), name="long")
    first = predict(pool(), Load((chat(5.0), behind)), 3, 0.85)
    last = predict(pool(), Load((replace(chat(5.0), rank=1), replace(behind, rank=0))), 3, 0.85)
    assert first.ttft_s < last.ttft_s


@pytest.mark.parametrize(
    ("load", "because", "code"),
    [
        (Load((chat(1.0),), answers=10, held=1e4, promised=1e9), "KV memory", "decode_memory"),
        (Load((chat(1.0),), answers=4 * PLACES, held=4.0, promised=4.0), "places", "decode_places"),
        (Load((chat(1.0),), answers=200, held=400_000, promised=400_000), "a token takes", "decode_tpot"),
    ],
)
def test_decode_is_short_of_memory_places_or_speed(load: Load, because: str, code: str) -> None:
    found = predict(pool(Role.DECODE), load, 2, 0.85)
    assert found.strain > 1.0
    assert because in found.because
    assert found.code == code


def test_nothing_needs_no_replica_and_something_needs_one() -> None:
    assert predict(pool(), Load(), 0, 0.85).strain == 0.0
    assert predict(pool(), Load((chat(0.1),)), 0, 0.85).strain > 1.0
    assert predict(pool(steps=None), Load((chat(50.0),)), 1, 0.85).strain == 1.0


def test_without_objectives_only_the_load_counts() -> None:
    loose = replace(chat(8.0), ttft_s=math.inf, tpot_s=math.inf)
    assert predict(pool(), Load((loose,)), 1, 0.85).strain < 1.0
    assert predict(pool(), Load((replace(loose, per_s=asked(9.0)),)), 1, 0.85).strain > 1.0


def test_fewer_replicas_make_answers_longer_and_so_more_at_once() -> None:
    """100 answers on two replicas, where a token takes 31 ms. On one, each of them would run for longer."""
    token_s = DECODE.step_s(0, 0, 50, 25_000)
    load = Load((chat(1.0),), answers=100, held=50_000, promised=100_000, token_s=token_s)
    same, fewer = (predict(pool(Role.DECODE), load, replicas, 0.85) for replicas in (2, 1))
    assert same.tpot_s == pytest.approx(token_s / (1.0 - same.busy))
    assert fewer.fill > 2.0 * same.fill
    hopeless = replace(load, answers=400, held=800_000, token_s=DECODE.step_s(0, 0, 50, 100_000))
    assert predict(pool(Role.DECODE), hopeless, 1, 0.85).because == "its tokens would come ever more slowly"


# ---- history and forecast


def looked(history: History, per_s: list[float]) -> History:
    total = 0.0
    for number, rate in enumerate(per_s):
        total += rate * 5.0
        history.look(Now(5.0 * number, (), {"chat": asked(total)}))
    return history


def test_a_sudden_change_shows_at_once_and_chance_does_not() -> None:
    assert looked(History(), [10.0] * 20).requests_per_s == pytest.approx(10.0)
    assert looked(History(), [10.0] * 20 + [40.0] * 3).requests_per_s == pytest.approx(40.0)
    assert looked(History(), [10.0] * 20 + [11.0] * 3).requests_per_s < 10.5


def test_few_requests_of_a_class_are_no_rate() -> None:
    history = looked(History(), [0.02] * 12)
    assert history.per_s() == {}


def test_a_new_manager_begins_anew() -> None:
    history = looked(History(), [10.0] * 20)
    history.look(Now(100.0, (), {"chat": asked(1.0)}))
    assert history.requests_per_s == 0.0


def test_herds_make_arrivals_uneven() -> None:
    even, herds = looked(History(), [10.0] * 100), looked(History(), [0.0, 0.0, 0.0, 40.0] * 50)
    assert even.burst == 1.0
    assert herds.burst > 2.0


def test_a_trend_grows_with_the_time_ahead() -> None:
    forecast, total = Forecast(None, 5.0), 0.0
    for number in range(40):
        total += (10.0 + number) * 5.0
        forecast.look(5.0 * number, total, 0.0)
    near, far = (forecast.growth(195.0, ahead_s) for ahead_s in (5.0, 60.0))
    assert 1.0 < near < far
    assert far == pytest.approx((10 + 39 + 12) / 43.5, abs=0.1), "43.5 is the mean of the last minute"


def rising(before: float, now: float, burst: float = 1.0) -> float:
    """The growth that is expected in a minute, where so many requests a second came in one minute and in the next."""
    forecast, total = Forecast(None, 5.0), 0.0
    for number in range(25):
        total += 5.0 * (before if number <= 12 else now) if number else 0.0
        forecast.look(5.0 * number, total, 0.0)
    return forecast.growth(120.0, 60.0, burst)


def test_a_trend_that_chance_may_have_made_counts_for_less() -> None:
    """From 20 to 22.7 a second is 3.2 standard deviations in minutes; from 2,000 to 2,270 it is 32."""
    whole = 1.0 + (2.7 / 60) * (60.0 + 30.0) / 22.7
    assert rising(2000.0, 2270.0) == pytest.approx(whole, abs=0.003)
    assert 1.0 + 0.5 * (whole - 1.0) < rising(20.0, 22.7) < 1.0 + 0.7 * (whole - 1.0)
    assert rising(20.0, 22.7, burst=1.3) == 1.0, "where arrivals vary more than independent ones, that is chance"
    assert rising(20.0, 21.0) == 1.0


def test_what_came_in_the_last_season_comes_again() -> None:
    season, plain = Forecast(400.0, 5.0), Forecast(None, 5.0)
    total = 0.0
    for number in range(115):
        rate = 40.0 if 200 <= 5 * number % 400 < 300 else 10.0
        total += rate * 5.0
        for each in (season, plain):
            each.look(5.0 * number, total, rate)
    at_s = 400.0 + 170.0
    assert season.growth(at_s, 60.0) > 2.0
    assert season.growth(at_s, 5.0) < 1.5
    assert plain.growth(at_s, 60.0) == 1.0


# ---- starts, demand, money


def test_starts_are_measured_and_given_up() -> None:
    starts, waiting = Starts(100.0), pool(ready=1, starting=(20.0, 5.0))
    assert starts.takes_s("prefill") == UNKNOWN_S
    assert not starts.look(waiting, 0.0)
    assert starts.look(replace(waiting, ready=2, starting=(10.0,)), 5.0)
    assert starts.takes_s("prefill") == pytest.approx(22.5)
    stuck = replace(waiting, ready=2, starting=(101.0, 50.0))
    starts.look(stuck, 10.0)
    assert starts.given_up(stuck) == 1
    assert starts.is_blocked("prefill", 109.0)
    assert not starts.is_blocked("prefill", 111.0)


def test_a_budget_is_divided_by_what_each_pool_wants() -> None:
    costs = {"a": 1.0, "b": 2.0}
    assert within({"a": 8, "b": 4}, {"a": 1, "b": 1}, costs, 8.0) == {"a": 4, "b": 2}
    assert within({"a": 8, "b": 4}, {"a": 1, "b": 1}, costs, 100.0) == {"a": 8, "b": 4}
    assert within({"a": 8, "b": 4}, {"a": 3, "b": 1}, costs, 1.0) == {"a": 3, "b": 1}


def test_demand_counts_what_no_cache_has_and_each_session_once() -> None:
    demand = Demand()
    demand.came(SessionRequest("1", 1000, 300, priority="chat"), 600, 120.0)
    demand.came(SessionRequest("1", 1100, 200, priority="chat", attempt=2), 0, 100.0)
    demand.came(SessionRequest("2", 1000, 300), 5000, 300.0)
    chat_, other = demand.arrived["chat"], demand.arrived[""]
    assert (chat_.requests, chat_.new, chat_.held, chat_.output) == (1, 400, 1300, 120)
    assert chat_.context == pytest.approx(sum(range(600, 1000)))
    assert (other.new, other.output) == (1, 0), "the last token is computed; the longest answer says nothing"
