"""The starts of a pool, and their ages."""

from __future__ import annotations

from deployments.manager.starts import StartsInFlight


def test_what_lacks_to_the_target_is_a_start() -> None:
    starts = StartsInFlight()
    assert starts.ages(1, 1, 0.0) == ()
    assert starts.ages(3, 1, 10.0) == (0.0, 0.0)
    assert starts.ages(3, 1, 15.0) == (5.0, 5.0)
    assert starts.ages(3, 3, 20.0) == ()


def test_the_oldest_start_becomes_ready_and_the_newest_is_given_up() -> None:
    starts = StartsInFlight()
    starts.ages(1, 0, 0.0)
    assert starts.ages(3, 0, 10.0) == (10.0, 0.0, 0.0)
    assert starts.ages(3, 1, 20.0) == (10.0, 10.0)
    starts.ages(4, 1, 30.0)
    assert starts.ages(3, 1, 40.0) == (30.0, 30.0), "the third was asked for at 30 and is wanted no more"


def test_a_replica_that_crashes_is_a_new_start_and_one_that_crashes_while_it_loads_is_the_same() -> None:
    starts = StartsInFlight()
    starts.ages(2, 2, 0.0)
    assert starts.ages(2, 1, 10.0) == (0.0,)
    assert starts.ages(2, 1, 20.0) == (10.0,), "Serve may have tried several times"


def test_one_becomes_ready_while_another_one_is_asked_for() -> None:
    starts = StartsInFlight()
    starts.ages(2, 1, 0.0)
    assert starts.ages(3, 2, 10.0) == (10.0,), "as many lack as before: which of them is ready cannot be told"


def test_more_replicas_than_the_target_are_no_starts() -> None:
    starts = StartsInFlight()
    starts.ages(2, 1, 0.0)
    assert starts.ages(1, 3, 10.0) == ()
    assert starts.ages(3, 2, 20.0) == (0.0,)
