"""Two tours side by side: which intervals overlap, and which side of a ratio changed."""

import pandas as pd
import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.lab.agreement import STORED, agreement, describe_agreement, read_comparisons, tabulate
from labkit.lab.cli import app

NAIVE, QUICK = [99, 101, 100, 101, 99], [198, 202, 200, 201, 199]


def keep(frame, results):
    lk.save_frame(frame, results / "frames" / f"{frame['experiment'].iloc[0]}.csv")


@pytest.fixture
def days(frame_of, tmp_path):
    """Results of two tours; on the second day `quick` is half as fast, and all else is as before."""
    for day, factor in (("monday", 1), ("tuesday", 0.5)):
        quick = [factor * rate for rate in QUICK]
        keep(frame_of({"naive": NAIVE, "quick": quick}, "naive", experiment="01 one"), tmp_path / day)
        keep(frame_of({"naive": NAIVE, "quick": QUICK}, "naive", experiment="02 two"), tmp_path / day)
    return tmp_path / "monday", tmp_path / "tuesday"


def test_an_interval_that_moved_away_is_named_with_the_side_that_changed(days):
    table = agreement(*map(read_comparisons, days))
    assert table[["experiment", "overlap"]].values.tolist() == [["01 one", False], ["02 two", True]]
    assert table.loc[0, ["baseline_change", "variant_change"]].tolist() == pytest.approx([1, 0.5])
    said = describe_agreement(table)
    assert said[0] == "1 of 2 intervals overlap (50.0%)."
    assert said[2].startswith("01 one, quick: 2.00 [")
    assert said[2].endswith("; its rate is 0.50 times the earlier one, its baseline's 1.00 times")
    assert len(said) == 3


def test_intervals_that_touch_overlap_whichever_is_the_earlier():
    def row(low, high):
        rates = {"images_per_s": [1.0], "baseline_images_per_s": [1.0]}
        interval = {"speedup": [low], "ci_low": [low], "ci_high": [high]}
        return pd.DataFrame({"scale": "ci", "experiment": "a", "variant": "b", **interval, **rates})

    for (first, second), overlap in {
        ((1, 2), (2, 3)): True, ((1, 2), (2.01, 3)): False, ((1, 4), (2, 3)): True,
    }.items():  # fmt: skip
        for tours in ((first, second), (second, first)):
            assert agreement(*(row(*ends) for ends in tours))["overlap"].tolist() == [overlap]


def test_tours_of_different_scales_have_nothing_in_common(days, monkeypatch, frame_of):
    monkeypatch.setenv("LABKIT_SCALE", "ci" if lk.scale().name != "ci" else "laptop")
    other = tabulate([frame_of({"naive": NAIVE, "quick": QUICK}, "naive", experiment="01 one")])
    said = describe_agreement(agreement(read_comparisons(days[0]), other))
    assert said == ["The two tours have no comparison in common: their scales or experiments differ."]


def test_a_limit_without_an_interval_is_not_compared(frame_of):
    assert tabulate([frame_of({"naive": [100], "quick": [200]}, "naive")]).empty


def test_the_command_compares_two_folders(days):
    ran = CliRunner().invoke(app, ["agreement", str(days[1]), "--earlier", str(days[0])])
    assert ran.exit_code == 0
    assert ran.stdout.splitlines() == describe_agreement(agreement(*map(read_comparisons, days)))


def test_the_command_compares_with_the_stored_tour_by_default(days):
    ran = CliRunner().invoke(app, ["agreement", str(days[1])])
    expected = describe_agreement(agreement(read_comparisons(STORED), read_comparisons(days[1])))
    assert (ran.exit_code, ran.stdout.splitlines()) == (0, expected)


def test_a_folder_without_a_tour_is_refused_by_name(tmp_path):
    ran = CliRunner().invoke(app, ["agreement", str(tmp_path)])
    assert ran.exit_code == 2
    assert f"in {tmp_path}: `python -m labkit tour` records them" in ran.stderr
    (tmp_path / "frames").mkdir()
    ran = CliRunner().invoke(app, ["agreement", str(tmp_path)])
    assert (ran.exit_code, ran.stderr) == (
        2,
        f"labkit: no comparisons in {tmp_path}: `python -m labkit tour` records them\n",
    )


def test_the_stored_tour_agrees_with_itself():
    stored = read_comparisons(STORED)
    assert agreement(stored, stored)["overlap"].all()
    assert len(stored) > 100
