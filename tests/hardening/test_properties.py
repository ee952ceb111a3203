"""What holds for any damaged image, any frame and any rates."""

import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import labkit as lk
from labkit.app.recording import file_stem
from labkit.course import oracle_files
from labkit.measure.frames import save_frame
from labkit.measure.statistics import quiet_summary
from tests.hardening.fuzz.images import decoders, headers
from tests.hardening.searches import bounded, fewer


@st.composite
def damaged_images(draw) -> bytes:
    """An image of `oracle_files` with bytes changed, removed or inserted; or any bytes."""
    data = bytearray(draw(st.sampled_from(list(oracle_files().values()))))
    for at, change in draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4)), max_size=6)):
        data[at % len(data) : at % len(data) + draw(st.integers(0, 4))] = change
    return draw(st.sampled_from([bytes(data), bytes(data[: len(data) // 2]), draw(st.binary(max_size=64))]))


@pytest.mark.slow
@bounded
@given(damaged_images(), st.integers(0, 255))
def test_a_damaged_image_is_an_image_or_an_error_in_every_decoder_and_has_pillows_size(data, options):
    decoders(bytes([options]) + data)
    headers(b"\0" + data)


# Frames.

labels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
rates = st.floats(0.1, 1e5)
# Rates of a baseline and one or two other variants, in n rounds each.
measured = st.integers(1, 6).flatmap(
    lambda n: st.dictionaries(labels, st.lists(rates, min_size=n, max_size=n), min_size=2, max_size=3)
)
about_same = partial(np.testing.assert_allclose, rtol=1e-6, equal_nan=True)
ODD_LABELS = (
    "1", "None", "NA", "nan", "True", " a ", 'q"', ",", "a\nb", "a\rb", "a\r\nb", "e\u0301", "\xe9", "#", "\u2028",
)  # fmt: skip


@bounded
@given(measured, labels, labels)
@example({label: [1.0, 2.0] for label in ODD_LABELS}, "None", "nan")
def test_a_frame_comes_back(frame_of, tmp_path, values, experiment, storage):
    frame = frame_of(values, next(iter(values)), experiment=experiment, storage=storage)
    again = lk.load_frame(save_frame(frame, tmp_path / "frame.csv"))
    for name in ("variant", "experiment", "baseline", "storage"):
        assert list(again[name]) == list(frame[name])
    np.testing.assert_allclose(again["images_per_s"], frame["images_per_s"], rtol=1e-15)


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


# Speed-ups.


@pytest.mark.slow
@fewer
@given(measured, st.floats(1e-3, 1e3), st.randoms(use_true_random=False))
def test_neither_a_faster_machine_nor_another_order_changes_speedups(frame_of, values, factor, random):
    frame = frame_of(values, next(iter(values)))
    rounds = sorted(frame["round"].unique())
    moved = frame.assign(round=frame["round"].map(dict(zip(rounds, random.sample(rounds, len(rounds)), strict=True))))
    ours = quiet_summary(frame)
    shuffled = quiet_summary(moved.sample(frac=1, random_state=random.randrange(99))).loc[ours.index]
    about_same(ours[["speedup", "images_per_s", "n_runs"]], shuffled[["speedup", "images_per_s", "n_runs"]])
    scaled = quiet_summary(frame.assign(images_per_s=frame["images_per_s"] * factor))
    about_same(ours[["speedup", "ci_low", "ci_high"]], scaled[["speedup", "ci_low", "ci_high"]])
    about_same(ours["images_per_s"] * factor, scaled["images_per_s"])


@fewer
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=6))
def test_the_other_baseline_inverts_the_speedup(frame_of, pairs):
    one, other = map(list, zip(*pairs, strict=True))
    frame = frame_of({"a": one, "b": other}, "a")
    there, back = quiet_summary(frame, "a").loc["b"], quiet_summary(frame, "b").loc["a"]
    about_same(there["speedup"], 1 / back["speedup"])
    about_same([there["ci_low"], there["ci_high"]], [1 / back["ci_high"], 1 / back["ci_low"]], rtol=0.05)
    assert {there["verdict"], back["verdict"]} in ({"inconclusive"}, {"faster", "slower"})


@pytest.mark.slow
@fewer
@given(measured)
def test_an_interval_holds_its_speedup_and_supports_its_verdict(frame_of, values):
    baseline, *others = values
    summary = quiet_summary(frame_of(values, baseline))
    assert summary.loc[baseline, "verdict"] == "baseline"
    for _, row in summary.loc[others].iterrows():
        if not math.isnan(row["ci_low"]):
            assert row["ci_low"] <= row["speedup"] * (1 + 1e-9)
            assert row["speedup"] <= row["ci_high"] * (1 + 1e-9)
        assert row["ci_low"] > 1 or row["ci_high"] < 1 or row["verdict"] == "inconclusive"
