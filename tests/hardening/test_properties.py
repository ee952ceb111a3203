"""What holds for any names of experiments and any rates."""

import os
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import example, given, strategies as st

from labkit.app.recording import file_stem
from labkit.measure.statistics import quiet_summary
from tests.hardening.searches import bounded, fewer

rates = st.floats(0.1, 1e5)
about_same = partial(np.testing.assert_allclose, rtol=1e-6, equal_nan=True)


@bounded
@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
@example("a b", "a_b")
@example("a, b", "a/b")
@example("\xe9", "\xfc")
@example("x" * 300, "x" * 299)
@example("../up", ".hidden")
@example("a\udcff", "a\udcfe")
def test_each_experiment_has_a_file_name_of_its_own(one, other):
    stem = file_stem(one)
    assert 0 < len(os.fsencode(stem)) < 200
    assert Path(stem).name == stem
    assert stem.isascii()
    assert not stem.startswith(".")
    assert (stem == file_stem(other)) == (one == other)


@fewer
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=6))
def test_the_other_baseline_inverts_the_speedup(frame_of, pairs):
    one, other = map(list, zip(*pairs, strict=True))
    frame = frame_of({"a": one, "b": other}, "a")
    there, back = quiet_summary(frame, "a").loc["b"], quiet_summary(frame, "b").loc["a"]
    about_same(there["speedup"], 1 / back["speedup"])
    about_same([there["ci_low"], there["ci_high"]], [1 / back["ci_high"], 1 / back["ci_low"]], rtol=0.05)
    assert {there["verdict"], back["verdict"]} in ({"inconclusive"}, {"faster", "slower"})
