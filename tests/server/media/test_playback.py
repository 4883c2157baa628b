"""The bit rate of an encoder, by its receivers' bandwidth estimates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.media.playback import FLOOR, SETTLE_S, BitrateController


def test_it_falls_when_lines_carry_less_than_is_sent_and_comes_back() -> None:
    governor = BitrateController(4_000_000)
    assert governor.decide([2_000_000, 2_000_000, 9_000_000], 4_000_000, 0.0) == 1_700_000
    assert governor.decide([1_000_000] * 3, 1_700_000, 1.0) is None, "too soon"
    now_s, rates = 0.0, []
    while governor.rate_bps < 4_000_000:
        now_s += SETTLE_S
        rates.append(governor.decide([int(1.5 * governor.rate_bps)], governor.rate_bps, now_s))
    assert rates == sorted(r for r in rates if r is not None)
    assert len(rates) <= 5, "an estimate is bounded by 1.5 times what is received; that is enough to get back up"


@pytest.mark.parametrize(
    ("estimates_bps", "sent_bps"), [([300_000, 6_000_000, 6_000_000], 4_000_000), ([700_000], 450_000), ([], 4_000_000)]
)
def test_one_bad_line_of_many_a_simple_picture_and_no_estimates_change_nothing(
    estimates_bps: list[int], sent_bps: int
) -> None:
    assert BitrateController(4_000_000).decide(estimates_bps, sent_bps, 0.0) is None


@given(st.lists(st.tuples(st.integers(1, 20_000_000), st.integers(1, 20_000_000)), max_size=50))
def test_it_stays_between_floor_and_configured_rate(looks: list[tuple[int, int]]) -> None:
    governor = BitrateController(3_000_000)
    for second, (line_bps, sent_bps) in enumerate(looks):
        before = governor.rate_bps
        rate_bps = governor.decide([line_bps], sent_bps, float(second))
        assert FLOOR * 3_000_000 <= governor.rate_bps <= 3_000_000
        if rate_bps is not None and rate_bps < before:
            assert line_bps < sent_bps, "it falls only for a line that does not carry what is sent"
