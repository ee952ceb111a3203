"""One sentence on a frame: it says what `summarize` found, and no more. Expected sentences are written by hand."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import labkit as lk
from labkit.measure import statistics as conclusion
from labkit.measure.statistics import format_ratio, quiet_summary

ROW = {"speedup": 1.0, "ci_low": 1.0, "ci_high": 1.0, "verdict": "baseline", "note": ""}
FASTER = {"speedup": 1.58, "ci_low": 1.45, "ci_high": 1.744, "verdict": "faster", "note": ""}
SLOWER = {"speedup": 0.62, "ci_low": 0.6, "ci_high": 0.64, "verdict": "slower", "note": ""}
UNCLEAR = {"speedup": 1.02, "ci_low": 0.95, "ci_high": 1.1, "verdict": "inconclusive", "note": ""}
UNJUDGED = {**FASTER, "verdict": ""}
BASE = "no worker"


@pytest.fixture
def conclude(frame_of, monkeypatch):
    """`conclude(rows, storage={})`: the sentence on a frame whose summary is given; `no worker` is the baseline."""

    def tell(rows, storage=(), **options):
        rows = {BASE: ROW, **rows}
        summary = pd.DataFrame(rows).T.infer_objects()
        monkeypatch.setattr(conclusion, "quiet_summary", lambda frame, baseline: summary)
        frame = frame_of({label: [1.0] for label in rows}, BASE)
        return lk.conclude(frame.assign(storage=frame["variant"].map(dict(storage))), **options)

    return tell


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (FASTER, '"2 workers" ran faster than "no worker": 1.58 times the speed (95 % interval 1.45 to 1.74).'),
        (SLOWER, '"2 workers" ran slower than "no worker": only 0.62 times the speed (95 % interval 0.60 to 0.64).'),
        (
            UNCLEAR,
            '"2 workers" against "no worker": 1.02 times the speed (95 % interval 0.95 to 1.10): '
            "these runs cannot tell them apart.",
        ),
        (UNJUDGED, '"2 workers" ran at 1.58 times the speed of "no worker" (95 % interval 1.45 to 1.74).'),
    ],
)
def test_one_comparison(conclude, row, sentence):
    assert conclude({"2 workers": row}) == sentence
    assert conclude({"2 workers": row, "other": FASTER}, variant="2 workers") == sentence


@pytest.mark.parametrize(
    ("notes", "added"),
    [
        (("unstable: spread 26%", ""), "; unstable: spread 26%."),
        (("not interleaved; unstable: spread 26%", "not interleaved"), "; not interleaved; unstable: spread 26%."),
        (("one run", "one run"), "; one run."),
        (("", ""), "."),
    ],
)
def test_notes_are_added_once(conclude, notes, added):
    own, base = notes
    sentence = conclude({"x": {**UNCLEAR, "note": own}, BASE: {**ROW, "note": base}})
    assert sentence.endswith(f"these runs cannot tell them apart{added}")


def test_one_round_has_no_interval(conclude):
    once = {**UNCLEAR, "speedup": 2.0, "ci_low": np.nan, "ci_high": np.nan, "note": "one run"}
    assert conclude({"x": once}) == (
        '"x" against "no worker": 2.00 times the speed (no interval): these runs cannot tell them apart; one run.'
    )


def test_several_variants_the_fastest_and_what_is_inconclusive(conclude):
    rows = {"a": FASTER, "read, decode free": {**FASTER, "speedup": 3.0}, "c": UNCLEAR, "d": SLOWER, "e": UNCLEAR}
    assert conclude(rows) == (
        '"read, decode free" ran faster than "no worker": 3.00 times the speed (95 % interval 1.45 to 1.74), '
        'the largest of 5 ratios; these runs cannot tell "c", "e" from "no worker".'
    )


def test_what_is_certain_comes_before_a_larger_ratio_that_is_not(conclude):
    sentence = conclude({"a": FASTER, "wild": {**UNCLEAR, "speedup": 9.0}})
    assert sentence.startswith('"a" ran faster')
    assert "largest" not in sentence
    assert 'cannot tell "wild" from "no worker"' in sentence


def test_several_variants_of_which_none_is_faster(conclude):
    many = {name: {**UNCLEAR, "speedup": 1 - number / 100} for number, name in enumerate("abcdefgh")}
    assert conclude(many).endswith(
        'these runs cannot tell them apart; these runs cannot tell "b", "c", "d", "e", "f", "g", "h" from "no worker".'
    )
    assert '"a" against "no worker": 1.00 times' in conclude(many)
    assert conclude({"a": SLOWER, "b": {**SLOWER, "speedup": 0.3}}).startswith('"a" ran slower than')
    assert conclude({"a": UNJUDGED, "b": UNJUDGED}).startswith('"a" ran at 1.58 times the speed of')


def test_simulated_storage_is_said_where_the_label_does_not(conclude):
    disk = "simulated hard disk"
    on_disk = conclude({"tar": FASTER}, storage={"tar": disk, BASE: "folder"})
    assert on_disk.startswith('"tar (simulated hard disk)" ran faster than "no worker": ')
    both = conclude({"tar": FASTER}, storage={"tar": disk, BASE: disk})
    assert '"no worker (simulated hard disk)": ' in both
    assert conclude({"tar, simulated": FASTER}, storage={"tar, simulated": disk}).startswith('"tar, simulated" ran')


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.584, "1.58"), (12.34, "12.3"), (288.4, "288"), (1288.4, "1,288"), (0.62, "0.62"), (0.0321, "0.032"),
        (1, "1.00"), (1.0031, "1.0031"), (0.9961, "0.9961"), (1.0051, "1.01"), (0.98, "0.98"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_ratios_keep_the_digits_that_matter(ratio, text):
    assert format_ratio(ratio) == text


def test_what_cannot_be_told_is_named(frame_of):
    frame = frame_of({"a": [1, 2], "b": [2, 3], "c": [2, 3]}, "a")
    for unknown in ("z", "a"):
        with pytest.raises(ValueError, match=f"variant must be one of b, c, got '{unknown}'"):
            lk.conclude(frame, unknown)
    with pytest.raises(ValueError, match="only its baseline 'a': there is nothing to compare it with"):
        lk.conclude(frame[frame["variant"] == "a"])
    with pytest.raises(ValueError, match="baseline 'z' is not in the frame"):
        lk.conclude(frame, baseline="z")
    assert '"a"' not in lk.conclude(frame, "b", baseline="c")


rates = st.lists(st.floats(50, 200), min_size=3, max_size=3)
labels = st.sampled_from(["2 workers", "read, decode free", 'Timer("next")', "files", "a; b: c", "x (1)", "y", "z"])


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(labels, rates, min_size=1, max_size=4), rates)
def test_any_frame_gets_a_sentence_that_says_what_summarize_says(frame_of, values, base):
    frame = frame_of({**values, "base": base}, "base")
    summary, sentence = quiet_summary(frame), lk.conclude(frame)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    label = next(label for label in values if sentence.startswith(f'"{label}" '))
    row = summary.loc[label]
    numbers = [float(number) for number in re.findall(r"[\d.]+\d", sentence.split('"base"')[1].replace("95 %", ""))[:3]]
    assert numbers == pytest.approx(row[["speedup", "ci_low", "ci_high"]].tolist(), abs=0.0051, rel=0.006)
    assert ("ran faster" in sentence) == (row["verdict"] == "faster")
    assert ("ran slower" in sentence) == (row["verdict"] == "slower")
    doubtful = set(summary.index[summary["verdict"] == "inconclusive"])
    assert ("cannot tell" in sentence) == bool(doubtful)
    assert (row["verdict"] == "faster") or not (summary["verdict"] == "faster").any()
    only = lk.conclude(frame, label)
    assert not [other for other in values if other != label and f'"{other}"' in only.replace(f'"{label}"', "")]
