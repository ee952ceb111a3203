"""Frames: made from rows and timers, and the same after a round trip to disk."""

import timeit

import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.magics.execution import TimeitResult
from torch.utils.benchmark import Timer

import labkit as lk
from labkit.measure.frames import COLUMNS, load_frame, make_frame, save_frame
from labkit.measure.statistics import quiet_summary
from labkit.util.machine import env_id


def test_a_frame_says_where_it_comes_from_and_what_a_row_says_itself_stays():
    rows = [{"variant": "a", "device": "cuda", "extra": 1}, {"variant": "b", "device": "cpu", "extra": 2}]
    frame = make_frame(rows, seed=3, device="other", rung=False)
    assert list(frame) == [*COLUMNS, "extra", "scale", "rung"]
    assert frame.device.tolist() == ["cuda", "cpu"]
    assert (frame.seed.tolist(), frame.rung.tolist()) == ([3, 3], [False, False])
    bare = make_frame([{"variant": "https://me:secret@host/a.tar?sig=abc"}]).iloc[0]
    assert bare.variant == "https://host/a.tar?..."
    assert (bare.env_id, bare.scale, bool(bare.rung)) == (env_id(), lk.scale().name, True)
    assert bare.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert np.isnan(bare.order)


def test_runs_of_timeit_and_of_torchs_timer_are_frames_without_an_order():
    result = TimeitResult(loops=4, repeat=2, best=0, worst=0, all_runs=[2.0, 4.0], compile_time=0, precision=3)
    frame = lk.from_timeit(result, "loop", n_images=8)
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    columns = ["variant", "round", "is_warmup", "n_images", "steady_s", "images_per_s", "experiment"]
    rows = [["loop", 0, False, 8, 0.5, 16, "timeit"], ["loop", 1, False, 8, 1.0, 8, "timeit"]]
    assert frame[columns].to_numpy().tolist() == rows
    measurement = Timer("sum(range(100))", timer=timeit.default_timer).timeit(50)
    one, two = lk.from_timer(measurement, "a", 10), lk.from_timer(measurement, "b", 20)
    assert (one.experiment[0], one.variant[0], one.n_images[0]) == ("timer", "a", 10)
    assert one.images_per_s[0] == 10 / measurement.times[0]
    row = lk.summarize(pd.concat([one, two], ignore_index=True), "a").loc["b"]
    assert row.speedup == pytest.approx(2.0)
    assert "not interleaved" in row.note


LABELS = ["a\rb", "a\nb", 'a"b', "a,b", "naïve, PIL", "1", "None", "nan", ""]
TEXT = ("variant", "baseline", "storage", "page_cache", "experiment", "device", "env_id")


@pytest.mark.parametrize("labels", [LABELS, ["1", "2"], ["nan", "None"]], ids=["odd", "numbers", "nothing"])
def test_a_frame_survives_the_disk(frame_of, tmp_path, labels):
    frame = frame_of({label: [1.0, 2.0] for label in labels}, labels[0], storage="").assign(peak_mem_mb=np.nan)
    path = save_frame(frame, tmp_path / "deep" / "frame.csv")
    assert list((tmp_path / "deep").iterdir()) == [path]
    again = load_frame(path)
    assert list(again) == list(frame)
    assert list(again["variant"]) == list(frame["variant"])
    assert set(again["baseline"]) == {labels[0]}
    assert again["peak_mem_mb"].isna().all()
    pd.testing.assert_frame_equal(quiet_summary(again), quiet_summary(frame))
    bare = frame_of({"a": [1.5]}, "a", seed=None).assign(**dict.fromkeys(TEXT, ""))  # text that is missing
    [row] = load_frame(str(save_frame(bare, path))).to_dict("records")
    assert [row[name] for name in TEXT] == [""] * len(TEXT)
    assert row["images_per_s"] == 1.5
    assert np.isnan(row["seed"])


@pytest.mark.parametrize("missing", [["seed", "order"], ["storage"], ["n_looks", "has_verdict"], ["cpu_s"]])
def test_a_file_that_is_older_than_a_column_can_be_read_and_summarized(frame_of, tmp_path, missing):
    frame = frame_of({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.3, 2.4]}, "a", storage="")
    again = load_frame(save_frame(frame.drop(columns=missing), tmp_path / "frame.csv"))
    assert list(again) == list(frame)
    assert again[missing].isin([""]).all().all() if missing == ["storage"] else again[missing].isna().all().all()
    columns = ["n_runs", "images_per_s", "peak_mem_mb"]
    pd.testing.assert_frame_equal(quiet_summary(again)[columns], quiet_summary(frame)[columns])
    assert lk.conclude(again).startswith('"b" ')


@pytest.mark.parametrize("column", ["variant", "is_warmup", "env_id"])
def test_a_file_without_what_makes_it_a_frame_is_refused(frame_of, tmp_path, column):
    path = save_frame(frame_of({"a": [1.0]}, "a").drop(columns=column), tmp_path / "frame.csv")
    with pytest.raises(ValueError, match=rf"frame\.csv is not a frame of runs: it lacks {column}$"):
        load_frame(path)


@pytest.mark.parametrize("text", ["", "\x00\xff"])
def test_a_foreign_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "not.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"not\.csv is not a frame of runs"):
        load_frame(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("images_per_s", "fast", "images_per_s must hold finite numbers"), ("steady_s", "inf", "steady_s must hold"),
        ("images_per_s", "0", "images_per_s must hold numbers > 0"), ("images_per_s", "-1", "must hold numbers > 0"),
        ("images_per_s", "", "must hold numbers > 0"), ("is_warmup", "maybe", "is_warmup must hold True or False"),
        ("scale", "ci,more", ""),
    ],
)  # fmt: skip
def test_what_cannot_have_been_measured_is_refused(frame_of, tmp_path, column, value, message):
    frame = frame_of({"a": [0.5, 2.0], "b": [3.0, 4.0]}, "a").astype(str)
    path = save_frame(frame, tmp_path / "a.csv")
    assert len(load_frame(path)) == 4
    frame.loc[1, column] = value
    path.write_text(frame.to_csv(index=False).replace(f'"{value}"', value))
    with pytest.raises(ValueError, match=f"a.csv is not a frame of runs: .*{message}"):
        load_frame(path)
