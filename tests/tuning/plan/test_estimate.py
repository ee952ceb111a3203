"""Numbers with an interval: what is accepted, and what is drawn."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from labkit.planning.formulas import Estimate, as_estimate, format_number, of_draws

sizes = st.floats(1e-3, 1e6)


class TestEstimate:
    @given(sizes, st.floats(1, 10), st.floats(1, 10))
    def test_draws_have_its_median_and_interval(self, value, below, above):
        estimate = Estimate(value, value / below, value * above)
        found = of_draws(estimate.draw("any"))
        assert found == pytest.approx((value, *estimate.interval), rel=0.01)
        assert found[0] == value

    def test_each_name_has_draws_of_its_own(self):
        estimate = Estimate(2, 1, 4)
        first, again, other = estimate.draw("a"), estimate.draw("a"), estimate.draw("b")
        assert (first == again).all()
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.06
        assert sorted(first) == sorted(other)

    def test_an_exact_one_is_constant(self):
        assert set(Estimate(3).draw("any")) == {3.0}
        assert set(Estimate(0).draw("any")) == {0.0}

    @pytest.mark.parametrize("limits", [(2, 3, 4), (2, 1, 1.5), (2, 0, 3), (-1, None, None), (np.inf, None, None)])
    def test_wrong_limits_are_refused(self, limits):
        with pytest.raises(ValueError, match="0 < low <= value <= high"):
            Estimate(*limits)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="kind must be one of measured here, entered"):
            Estimate(1, kind="guessed")


class TestAsEstimate:
    def test_a_number_and_limits(self):
        assert as_estimate("kb", 2) == Estimate(2.0, 2.0, 2.0)
        assert as_estimate("kb", [1, 4]) == Estimate(2.0, 1.0, 4.0)
        assert as_estimate("kb", (1, 3, np.float64(4))) == Estimate(3.0, 1.0, 4.0)
        assert as_estimate("kb", own := Estimate(2, source="a run")) is own

    @pytest.mark.parametrize("given_", ["2", [], [1, 2, 3, 4], None, True, [1, "2"], float("nan"), {"low": 1}])
    def test_anything_else_is_refused(self, given_):
        with pytest.raises(ValueError, match=r"kb must be a number, \(low, high\) or"):
            as_estimate("kb", given_)

    def test_the_error_names_the_argument(self):
        with pytest.raises(ValueError, match="kb: an estimate must be"):
            as_estimate("kb", (4, 1))


@pytest.mark.parametrize(
    ("value", "text"), [(57234, "57,200"), (0.12345, "0.123"), (0, "0"), (7, "7"), (1.5, "1.5"), (999.6, "1,000")]
)
def test_three_digits(value, text):
    assert format_number(value) == text
