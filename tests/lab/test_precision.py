"""How wide a tour's intervals are, beside its noise floor."""

import numpy as np

import labkit as lk
from labkit.lab import report


def test_the_page_says_how_precise_the_run_was_beside_its_noise_floor(frame_of, tmp_path):
    rates = {"a": [100, 101, 99, 100], "b": [200, 198, 202, 201], "c": [150, 152, 149, 148]}
    for experiment in ("00 twins", "01 else"):
        runs = frame_of(rates, "a", experiment=experiment)
        lk.save_frame(runs, tmp_path / "frames" / f"{experiment}.csv")
    table = lk.summarize(runs, "a").drop(index="a")
    widths = (table["ci_high"] / table["ci_low"]) ** 0.5 - 1
    middle, most = np.quantile([*widths, *widths], [0.5, 0.9])
    said = report.recorded_precision(tmp_path)
    assert f"Half of the 4 intervals reach at most {middle:.1%} to either side, nine in ten {most:.1%}." in said
    twin = table.loc["b"]
    assert f"(00 twins): {twin.speedup:.2f} (95 % interval {twin.ci_low:.2f} to {twin.ci_high:.2f})." in said
    assert said in report.write_index(tmp_path, []).read_text()


def test_without_frames_there_is_no_precision(tmp_path):
    assert report.recorded_precision(tmp_path) == ""


def test_without_its_twins_a_tour_has_no_noise_floor(frame_of, tmp_path):
    runs = frame_of({"a": [100, 101], "b": [200, 198]}, "a", experiment="02 else")
    lk.save_frame(runs, tmp_path / "frames" / "x.csv")
    said = report.recorded_precision(tmp_path)
    assert said.startswith("Half of the 1 intervals reach at most")
    assert "noise floor" not in said


def test_a_single_round_has_no_interval_to_count(frame_of, tmp_path):
    lk.save_frame(frame_of({"a": [100], "b": [200]}, "a", experiment="02 else"), tmp_path / "frames" / "x.csv")
    assert report.recorded_precision(tmp_path) == ""
