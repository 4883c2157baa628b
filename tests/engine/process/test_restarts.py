from __future__ import annotations

from streamdiff.engine.process.supervisor import LONGEST_WAIT_S, RestartPolicy


def test_the_first_comes_at_once_and_each_further_one_waits_twice_as_long() -> None:
    restarts = RestartPolicy(most=4, window_s=100.0, wait_s=0.5)
    assert [restarts.fault(at_s) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 0.5, 1.0, 2.0, None]
    assert RestartPolicy(most=0, window_s=10.0, wait_s=1.0).fault(0.0) is None, "an engine that is never started again"
    long = RestartPolicy(most=1000, window_s=1e9, wait_s=0.5)
    assert [long.fault(float(number)) for number in range(1000)][-1] == LONGEST_WAIT_S


def test_what_is_older_than_the_window_does_not_count() -> None:
    restarts = RestartPolicy(most=2, window_s=10.0, wait_s=1.0)
    assert [restarts.fault(at_s) for at_s in (0.0, 9.0, 9.5)] == [0.0, 1.0, None]
    assert restarts.fault(10.0) == 1.0, "the first has left the window, the second has not"
    assert restarts.count == 2
    assert restarts.fault(100.0) == 0.0
