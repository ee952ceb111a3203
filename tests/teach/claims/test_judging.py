"""The claims ledger: rules of verdicts, readings against pandas by hand, planted frames, the command, the page."""

import json
import os
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app import cli, tour_page as report
from labkit.course import claim_trials, claim_trials as claim_frames
from labkit.course.claim_trials import VERDICTS, unchanged
from labkit.course.ledger import LEDGER, judged, lines_of
from labkit.data.simulated_disks import DISKS
from labkit.measure.frames import save_frame
from labkit.measure.recorder import RESULTS_VARIABLE

IDS = [
    "sizes-4000-20min", "sizes-6x", "workers-clamp", "persistent-zero", "marigold-tar", "decode-pil", "decode-cv2",
    "decode-read-image", "persistent-epoch2", "two-steps", "v2-tensors", "batched-transforms", "kornia-gpu",
    "cuda-prefetch", "wds-shards", "dali-2x", "mixup-free", "albumentations-cpu", "resize-once", "seeded-workers",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_recorded(tmp_path, monkeypatch):
    """No frames but the test's own, no photos, and each trial once for all tests."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    claim_trials._measure_detail.cache_clear()


def _runs(frame_of, experiment, rates, **factors):
    """Runs with a little scatter; the first label is the baseline."""
    scatter = np.array([0.99, 1.0, 1.02, 0.98, 1.01])
    rates = {label: list(rate * np.roll(scatter, place)) for place, (label, rate) in enumerate(rates.items())}
    return frame_of(rates, next(iter(rates)), experiment=experiment, **{"scale": "laptop", "device": "cpu", **factors})


def _transforms(frame_of, rate, **factors):
    return _runs(frame_of, "04 transforms", {"PIL": 100, "tensors": rate}, **factors)


def _row(name, *runs):
    return judged(runs).set_index("id").loc[name]


def _tests(name, *runs):
    tests = pd.DataFrame(judged(runs).attrs["tests"])
    return tests[tests["id"] == name].set_index("setting")


# The ledger


def test_every_claim_has_one_row_in_order():
    table = course.claims()
    assert list(table["id"]) == IDS
    assert set(table["verdict"]) <= set(VERDICTS)
    assert (table["because"].str.len() > 0).all()
    assert all(text.strip() for text in table["claim"])


def test_claimed_ratios_follow_from_the_figures():
    claimed = {claim.id: claim.claimed for claim in LEDGER}
    names = ["sizes-6x", "decode-read-image", "decode-cv2", "persistent-epoch2", "sizes-4000-20min"]
    assert [claimed[name] for name in names] == pytest.approx([6.32, 2.125, 1.1525, 1.179, 120], abs=0.01)


def test_without_any_frame_nothing_measured_is_invented():
    table = course.claims().set_index("id")
    assert table["measured"].isna().all()
    tried_here = {"persistent-zero", "workers-clamp", "seeded-workers"}
    assert set(table.index[~table["verdict"].isin(["not measured yet", "needs a GPU"])]) == tried_here
    assert "python -m labkit tour --only 04" in table.loc["v2-tensors", "because"]
    assert "python -m labkit reference" in table.loc["kornia-gpu", "because"]


def test_settings_are_unique_within_a_claim():
    for claim in LEDGER:
        settings = [test.setting for test in claim.tests]
        assert len(set(settings)) == len(settings)


# Verdicts from frames


def test_a_reading_is_the_paired_ratio_with_its_interval(frame_of):
    runs = _runs(frame_of, "04 transforms", {"PIL": 100, "tensors": 80, "tensors, normalised per batch": 96})
    rates = runs.pivot(index="round", columns="variant", values="images_per_s")
    ratios = rates["tensors, normalised per batch"] / rates["tensors"]
    row = _row("batched-transforms", runs)
    assert row["measured"] == pytest.approx(stats.gmean(ratios))
    assert row["ci_low"] < row["measured"] < row["ci_high"]
    assert (row["verdict"], row["n_runs"], row["experiment"]) == ("holds", 5, "04 transforms")


@pytest.mark.parametrize(
    ("rate", "verdict"),
    [
        (250, "holds"),
        (150, "smaller here"),
        (400, "larger here"),
        (60, "does not hold"),
        (101, "does not hold"),
        (157, "inconclusive"),
    ],
)
def test_a_planted_frame_changes_the_verdict(frame_of, rate, verdict):
    decoders = _runs(frame_of, "02 decoders, imagenet", {"pil": 100, "cv2": 120, "torchvision": rate})
    assert _tests("decode-read-image", decoders).loc["500 x 375, decoding alone", "outcome"] == verdict
    row = _row("decode-read-image", decoders)
    assert row["verdict"] == {"holds": "holds under a condition"}.get(verdict, verdict)  # the others are not measured
    assert ("inconclusive, though faster is certain" in row["because"]) == (rate == 157)


def test_a_condition_is_named(frame_of):
    quick = _runs(frame_of, "04 crop and flip alone", {"PIL": 100, "tensors": 130})
    slow = _transforms(frame_of, 90)
    row = _row("v2-tensors", quick, slow)
    assert (row["verdict"], row["condition"]) == ("holds under a condition", "crop and flip")
    assert row["measured"] == pytest.approx(1.3, rel=0.02)
    assert "color jitter, normalise: 0.90x" in row["because"]
    assert _row("v2-tensors", slow)["verdict"] == "does not hold"


def test_scatter_is_inconclusive(frame_of):
    rates = {"PIL": [100] * 4, "tensors": [60, 150, 80, 130]}
    wild = frame_of(rates, "PIL", experiment="04 transforms", scale="laptop")
    assert _row("v2-tensors", wild)["verdict"] == "inconclusive"


def test_ci_scale_is_a_rehearsal(frame_of):
    row = _row("v2-tensors", _transforms(frame_of, 200, scale="ci"))
    assert (row["verdict"], row["scale"]) == ("inconclusive", "ci")
    assert "rehearsal" in row["because"]
    both = [_runs(frame_of, "10 steps from 200 names", {"one search per image": 1, "+ processes": 2}, scale="ci"),
            _runs(frame_of, "10 steps from 500 names", {"one search per image": 1, "+ processes": 20})]  # fmt: skip
    assert _row("sizes-6x", *both)["experiment"] == _row("sizes-6x", *both[::-1])["experiment"] == both[1].experiment[0]


def test_cold_runs_have_to_have_been_cold(frame_of):
    rates = {"files": 100, "shards of 12": 110, "shards of 96": 150}
    cold = _tests("wds-shards", _runs(frame_of, "08 disk, cold", rates, page_cache="cold")).loc["a cold disk"]
    assert cold["outcome"] == "holds"
    assert cold["measured"] == pytest.approx(1.5, rel=0.02)  # the largest shards
    warm = _tests("wds-shards", _runs(frame_of, "08 disk, cold", rates, page_cache="unknown")).loc["a cold disk"]
    assert (warm["outcome"], warm["measured"]) == ("inconclusive", cold["measured"])


def test_a_ratio_of_two_experiments(frame_of):
    warm = _runs(frame_of, "10 sizes from headers", {"Pillow": 500, "lk.collect_sizes": 1000})
    cold = _runs(frame_of, "10 headers from a cold disk", {"one reader": 8, "lk chooses": 9}, page_cache="cold")
    tests = _tests("sizes-4000-20min", warm, cold)
    here, simulated = tests.iloc[0], tests.iloc[1]
    rates = [warm[warm.variant == "lk.collect_sizes"].images_per_s, cold[cold.variant == "one reader"].images_per_s]
    assert here["measured"] == pytest.approx(stats.gmean(rates[0]) / stats.gmean(rates[1]))
    welch = stats.ttest_ind(*map(np.log, rates), equal_var=False).confidence_interval()
    assert here["ci_low"] <= np.exp(welch.low) * 1.0001
    assert np.exp(welch.high) <= here["ci_high"] * 1.0001
    assert here["outcome"] == "holds"
    assert simulated["measured"] == pytest.approx(1 + 2 * DISKS["hdd"].seek_ms / 1e3 * 1000, rel=0.02)
    assert (simulated["kind"], simulated["outcome"]) == ("simulated", "not judged")


def test_a_simulated_disk_is_reckoned_from_the_measured_computing_and_decides_nothing(frame_of):
    runs = _runs(frame_of, "09 an iteration of Marigold", {"tarfile": 10, "folder": 16})
    tests = _tests("marigold-tar", runs)
    computing, seek = 32 / 16, 0.008
    first = (2 * 107_770 * seek + 64 * seek + computing) / (128 * seek + computing)
    assert list(tests["measured"])[1:] == pytest.approx([first, (64 * seek + 2) / (128 * seek + 2)], rel=0.02)
    assert list(tests["kind"]) == ["measured", "simulated", "simulated"]
    assert list(tests["outcome"]) == ["smaller here", "not judged", "not judged"]
    row = _row("marigold-tar", runs)
    assert (row["verdict"], row["measured"]) == ("smaller here", tests["measured"].iloc[0])
    assert "Simulated, later iterations from a rotating disk: " in row["because"]


def test_unequal_work_decides_nothing(frame_of):
    rates = {"PIL + ToTensor": 100, "cv2 + ToTensor": 70, "read_image, to float": 80, "read_image": 900}
    decoders = _runs(frame_of, "14 decoders at 224", rates)
    for name in ("decode-pil", "decode-read-image"):
        row = _row(name, decoders)
        assert row["verdict"] == "does not hold"
        assert re.search(r"^Unequal work, .*: 9\.\d+x .*: not judged\.$", row["because"], re.MULTILINE)


def test_what_is_not_judged_sets_no_condition_either(frame_of):
    rates = {"PIL + ToTensor": 100, "cv2 + ToTensor": 130, "read_image, to float": 150, "read_image": 90}
    row = _row("decode-pil", _runs(frame_of, "14 decoders at 224", rates))
    assert (row["verdict"], row["condition"]) == ("holds", "")


def test_only_measured_tests_have_a_rule():
    for test in (test for claim in LEDGER for test in claim.tests):
        assert (test.rule is not None) == (test.kind == "measured")


@pytest.mark.parametrize(
    ("rate", "verdict"), [(48, "holds"), (39.5, "does not hold"), (36, "does not hold"), (90, "larger here")]
)
def test_the_second_epoch(frame_of, rate, verdict):
    rates = {"default, epoch 1": 40, "default, epoch 2": 40, "persistent, epoch 1": 39, "persistent, epoch 2": rate}
    row = _row("persistent-epoch2", _runs(frame_of, "12 epochs 1 and 2 of ResNet-18", rates))
    assert row["verdict"] == verdict
    assert "Beside the claim, the whole first epoch: " in row["because"]


# GPU claims


def _stored(folder, *frames):
    folder.mkdir(exist_ok=True)
    save_frame(pd.concat(frames, ignore_index=True).assign(env_id="elsewhere"), folder / "elsewhere.csv")
    (folder / "elsewhere.json").write_text(json.dumps({"environment": {"gpu": "Some GPU", "cpu": ""}}))


def test_a_gpu_claim_looks_at_no_cpu_runs(frame_of):
    rates = {"CPU does all": 100, "CPU crops, device colors": 300, "CPU crops only": 400}
    cpu = _runs(frame_of, "06 who augments", rates)
    row = _row("kornia-gpu", cpu)
    assert row["verdict"] == "needs a GPU"
    assert np.isnan(row["measured"])
    assert re.search(r"Beside the claim, if colors were free: (3\.9|4\.0)", row["because"])
    assert _row("kornia-gpu", cpu.assign(device="cuda"))["verdict"] == "holds"


def test_reference_runs_answer_where_there_is_no_gpu(frame_of, tmp_path, monkeypatch):
    folder = tmp_path / "reference"
    real = claim_frames.reference_runs
    monkeypatch.setattr(claim_frames, "reference_runs", lambda experiment: real(experiment, folder))
    rates = {"DataLoader": 100, "DALI (GPU)": 150}
    _stored(folder, _runs(frame_of, "13 peers on a GPU", rates, device="cuda"))
    row = _row("dali-2x")
    assert (row["verdict"], row["device"]) == ("inconclusive", "cuda")
    assert row["measured"] == pytest.approx(1.5, rel=0.02)
    _stored(folder, _runs(frame_of, "13 peers on a GPU", rates, device="cpu"))  # a rehearsal
    assert _row("dali-2x")["verdict"] == "needs a GPU"


@pytest.mark.parametrize(("mixing", "verdict"), [(100_000, "holds"), (5000, "does not hold")])
def test_what_mixing_adds_to_a_step(frame_of, mixing, verdict):
    fed = _runs(frame_of, "07 feeding a training step", {"pageable": 500, "compute alone": 1000}, device="cuda")
    mixed = _runs(frame_of, "06 mixing on the device", {"v2.CutMix": mixing, "lk.mixup": mixing}, device="cuda")
    row = _row("mixup-free", fed, mixed)
    assert row["verdict"] == verdict
    assert row["measured"] == pytest.approx(1 + 1000 / mixing, rel=0.01)


# Trials


def test_trials_say_what_happens():
    assert claim_trials.persistent_without_workers()[0]
    assert claim_trials.clamped_on_one_cpu()[0]
    assert claim_trials.seeded_again()[0]
    assert not claim_trials.seeded_again(num_workers=1)[0]
    assert not claim_trials.seeded_again(own_generator=True)[0]
    assert not claim_trials.reading_back()[0]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_bound_process_asks_for_the_hosts_cores():
    assert claim_trials.clamped_where_bound()[0] is ((os.cpu_count() or 1) == 1)


def test_detail_is_lost_by_resizing_first_and_kept_where_nothing_is_resized(tmp_path, monkeypatch):
    lk.make_photos(course.photo_root("imagenet"), 4)
    reading = claim_trials.detail_kept("imagenet")(claim_frames.Frames([]))
    assert reading.n_runs == 4
    assert unchanged(reading) == "does not hold"
    assert claim_trials.detail_kept("camera")(claim_frames.Frames([])) is None
    monkeypatch.setattr(claim_trials, "SHORT_SIDE", 10_000)
    claim_trials._measure_detail.cache_clear()
    assert claim_trials.detail_kept("imagenet")(claim_frames.Frames([])).ratio == pytest.approx(1)


# Folders, the command, the page, the plot


def _folder(tmp_path, *frames):
    for number, frame in enumerate(frames):
        save_frame(frame, tmp_path / "results" / lk.env_id() / "frames" / f"{number}.csv")
    return tmp_path / "results"


def test_stored_frames_are_read_and_fresh_ones_replace_them(frame_of, tmp_path):
    stored = _transforms(frame_of, 80)
    results = _folder(tmp_path, stored)
    assert course.claims(results).equals(course.claims(results / lk.env_id()))
    assert course.claims(results).set_index("id").loc["v2-tensors", "verdict"] == "does not hold"
    fresh = _transforms(frame_of, 120)
    assert (
        course.claims(results, runs=[fresh]).set_index("id").loc["v2-tensors", "verdict"] == "holds under a condition"
    )


def test_copies_of_a_wheels_notebooks_find_the_results_beside_their_folder(tmp_path, frame_of, monkeypatch):
    _folder(tmp_path, _transforms(frame_of, 80))
    monkeypatch.delenv(RESULTS_VARIABLE)
    monkeypatch.setattr(claim_frames, "IS_CLONE", False)
    (tmp_path / "labkit-notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "labkit-notebooks")
    assert [frame["experiment"].iloc[0] for frame in claim_frames.read_folder(None)] == ["04 transforms"]


def test_runs_of_other_machines_are_refused(frame_of):
    runs = _transforms(frame_of, 80)
    with pytest.raises(ValueError, match=f"runs of elsewhere cannot be judged here: this machine is {lk.env_id()}"):
        course.claims(runs=[runs.assign(env_id="elsewhere")])
    mixed = runs.assign(env_id=np.where(runs["round"] > 2, "elsewhere", lk.env_id()))
    with pytest.raises(ValueError, match=r"runs of .*elsewhere.* cannot be judged"):
        course.claims(runs=[mixed])


def test_the_command_prints_every_claim_within_the_width(frame_of, tmp_path):
    results = _folder(tmp_path, _transforms(frame_of, 80))
    result = CliRunner().invoke(cli.app, ["claims", "--results", str(results)], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert re.findall(r"^([a-z]\S+) +[A-Z]{3}", result.output, re.MULTILINE) == IDS
    assert re.search(r"^v2-tensors +DOES NOT HOLD +0\.80x \[", result.output, re.MULTILINE)
    assert "20 claims: " in result.output
    for width, limit in ((10, 80), (100, 100), (300, 120)):
        assert max(map(len, lines_of(course.claims(results), width))) <= limit


@pytest.mark.parametrize("place", ["nowhere", "empty", "foreign"])
def test_a_bad_folder_is_one_line_and_exit_code_2(place, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "frames").mkdir(parents=True)
    (tmp_path / "foreign" / "frames" / "x.csv").write_text("a,b\n1,2\n")
    result = CliRunner().invoke(cli.app, ["claims", "--results", str(tmp_path / place)])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert ("x.csv is not a frame of runs" if place == "foreign" else "no frames of this machine") in result.output


def test_the_page_shows_the_table(frame_of, tmp_path):
    folder = _folder(tmp_path, _transforms(frame_of, 80)) / lk.env_id()
    page = report.write_index(folder, []).read_text()
    assert [name for name in IDS if f"<code>{name}</code>" not in page] == []
    assert "<strong>does not hold</strong>" in page
    assert "0.80x [" in page
    assert "laptop scale" in page


def test_the_page_survives_frames_that_cannot_be_judged(frame_of, tmp_path):
    runs = _transforms(frame_of, 80, env_id="elsewhere")
    assert "No verdicts: runs of elsewhere" in report.write_index(_folder(tmp_path, runs) / lk.env_id(), []).read_text()


def test_the_plot_says_every_outcome_in_words(frame_of):
    runs = _runs(frame_of, "02 decoders, imagenet", {"pil": 100, "cv2": 120, "torchvision": 150})
    table = course.claims(runs=[runs])
    ax = course.plot_claims(table)
    ax.figure.canvas.draw()
    tests = pd.DataFrame(table.attrs["tests"])
    texts = [text.get_text() for text in ax.texts]
    assert len(texts) == len(ax.get_yticklabels()) == len(tests)
    said = tests["outcome"].where(tests["outcome"] != "not judged", tests["kind"])
    assert all(one in text for one, text in zip(said, texts, strict=True))
    assert ax.get_xscale() == "log"
    handles = ax.get_legend().legend_handles
    assert len({handle.get_marker() for handle in handles}) == len(handles)


def test_a_wide_interval_does_not_hide_the_ratios(frame_of):
    wild = frame_of({"pil": [100, 100], "cv2": [20, 900]}, "pil", experiment="02 decoders, imagenet", scale="laptop")
    table = course.claims(runs=[wild, _transforms(frame_of, 90)])
    measured = pd.DataFrame(table.attrs["tests"])["measured"].dropna()
    low, high = course.plot_claims(table).get_xlim()
    assert 0.2 < low < measured.min()
    assert measured.max() < high < 10
    assert course.plot_claims(course.claims()).get_xlim() == (0.5, 2)


def test_the_plot_keeps_what_is_not_measured_apart(frame_of):
    table = course.claims(runs=[_runs(frame_of, "09 an iteration of Marigold", {"tarfile": 10, "folder": 16})])
    marks = [container[0] for container in course.plot_claims(table).containers]
    assert [mark.get_xdata()[0] > 0 for mark in marks] == [True] * 3
    looks = {(mark.get_marker(), mark.get_color(), mark.get_markerfacecolor() == "white") for mark in marks}
    assert len({marker for marker, _, _ in looks}) == len({color for _, color, _ in looks}) == 2
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True, True]
