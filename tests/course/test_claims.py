"""The claims of write-ups: rules of verdicts, readings beside pandas by hand, the checklist, the command, the plot."""

import json
import os
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app.cli import app
from labkit.course import DISKS, claim_trials
from labkit.course.claim_trials import (
    VERDICTS,
    Frames,
    Reading,
    agreeing_range,
    faster,
    reaches,
    reckoned,
    separate,
    together,
    unchanged,
)
from labkit.course.ledger import LEDGER, lines_of
from labkit.course.reference import reference_runs
from labkit.measure.frames import save_frame
from labkit.measure.recorder import RESULTS_VARIABLE

IDS = [
    "sizes-4000-20min", "sizes-6x", "workers-clamp", "persistent-zero", "marigold-tar", "decode-pil", "decode-cv2",
    "decode-read-image", "persistent-epoch2", "two-steps", "v2-tensors", "batched-transforms", "kornia-gpu",
    "cuda-prefetch", "wds-shards", "dali-2x", "mixup-free", "albumentations-cpu", "resize-once", "seeded-workers",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_recorded(tmp_path, monkeypatch):
    """No frames but the test's own, and no photos."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    claim_trials._measure_detail.cache_clear()  # it is kept for the process, whose photos are always the same


@pytest.fixture
def runs(frame_of):
    """Builds runs with a little scatter; the first label is the baseline."""

    def build(experiment, rates, **factors):
        scatter = np.array([0.99, 1.0, 1.02, 0.98, 1.01])
        rates = {label: list(rate * np.roll(scatter, place)) for place, (label, rate) in enumerate(rates.items())}
        return frame_of(rates, next(iter(rates)), experiment=experiment, scale="laptop", device="cpu", **factors)

    return build


@pytest.fixture
def transforms(runs):
    """Builds the runs of one claim's experiment: tensors are so many percent as fast as PIL images."""
    return lambda rate: runs("04 transforms", {"PIL": 100, "tensors": rate})


def row(name, *runs):
    return course.claims(runs=runs).set_index("id").loc[name]


def settings_of(name, *runs):
    tests = pd.DataFrame(course.claims(runs=runs).attrs["tests"])
    return tests[tests["id"] == name].set_index("setting")


class TestRules:
    @pytest.mark.parametrize(
        ("rule", "low", "high", "expected"),
        [
            (faster, 1.1, 1.4, "holds"),
            (faster, 0.5, 0.9, "does not hold"),
            (faster, 0.9, 1.1, "inconclusive"),
            (reaches, 1.5, 3.0, "holds"),
            (reaches, 3.1, 338.0, "larger here"),
            (reaches, 1.1, 1.4, "smaller here"),
            (reaches, 0.9, 1.4, "does not hold"),
            (reaches, 1.2, 1.6, "inconclusive"),
            (reaches, 2.0, 3.5, "inconclusive"),
            (reaches, 0.9, 3.5, "inconclusive"),
            (unchanged, 0.98, 1.02, "holds"),
            (unchanged, 1.06, 1.2, "does not hold"),
            (unchanged, 0.6, 0.9, "does not hold"),
            (unchanged, 0.97, 1.2, "inconclusive"),
            *[(rule, float("nan"), float("nan"), "inconclusive") for rule in (faster, reaches, unchanged)],
        ],
    )
    def test_an_outcome_follows_from_the_interval(self, rule, low, high, expected):
        assert rule(Reading(2.0, low, high), agreeing_range(2.0)) == expected

    @pytest.mark.parametrize(
        ("outcomes", "verdict"),
        [
            (["holds", "holds"], "holds"),
            (["holds", "does not hold"], "holds under a condition"),
            (["holds", "not measured yet"], "holds under a condition"),
            (["holds", "larger here", "smaller here"], "holds under a condition"),
            (["does not hold", "inconclusive"], "does not hold"),
            (["larger here", "smaller here", "does not hold"], "does not hold"),
            (["larger here", "smaller here", "not measured yet"], "larger and smaller here"),
            (["larger here", "inconclusive"], "larger here"),
            (["smaller here", "inconclusive"], "smaller here"),
            (["inconclusive", "needs a GPU"], "inconclusive"),
            (["needs a GPU", "not measured yet"], "needs a GPU"),
            (["not measured yet"], "not measured yet"),
        ],
    )
    def test_a_claim_is_judged_by_all_its_tests(self, outcomes, verdict):
        assert together(outcomes) == together(outcomes[::-1]) == verdict

    def test_a_ratio_of_rates_lies_in_its_interval_which_counts_the_looks_at_both_frames(self, frame_of):
        burst = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 1]  # the last run was disturbed
        rates = {"a": burst, "b": np.linspace(49, 51, 10)}
        one, two = (frame_of(rates, "b", experiment=name, scale="laptop", device="cpu") for name in ("one", "two"))
        frames = Frames([one.assign(n_looks=3), two])
        looked, once = (separate((name, "a"), ("two", "b"))(frames) for name in ("one", "two"))
        for found in (looked, once, reckoned("one", "a", lambda rates: rates / 50, "reckoned")(frames)):
            assert found.low <= found.ratio <= found.high
            assert found.ratio == pytest.approx(2, rel=0.02)
        assert looked.ratio == once.ratio
        assert looked.high / looked.low > once.high / once.low


class TestLedger:
    def test_every_claim_has_one_row_in_order(self):
        table = course.claims()
        assert list(table["id"]) == IDS
        assert set(table["verdict"]) <= set(VERDICTS)
        assert (table["because"].str.len() > 0).all()
        assert table["claim"].str.strip().all()
        claimed = table.set_index("id")["claimed"]
        names = ["sizes-6x", "decode-read-image", "decode-cv2", "persistent-epoch2", "sizes-4000-20min"]
        assert claimed[names].tolist() == pytest.approx([6.32, 2.125, 1.1525, 1.179, 120], abs=0.01)

    def test_a_claims_settings_are_unique_and_only_measured_ones_have_a_rule(self):
        tests = [(claim.id, test) for claim in LEDGER for test in claim.tests]
        assert len({(name, test.setting) for name, test in tests}) == len(tests)
        assert all((test.rule is not None) == (test.kind == "measured") for _, test in tests)

    def test_without_any_frame_nothing_measured_is_invented(self):
        table = course.claims().set_index("id")
        assert table["measured"].isna().all()
        tried_here = {"persistent-zero", "workers-clamp", "seeded-workers"}
        assert set(table.index[~table["verdict"].isin(["not measured yet", "needs a GPU"])]) == tried_here
        assert "python -m labkit tour --only 04" in table.loc["v2-tensors", "because"]
        assert "python -m labkit reference" in table.loc["kornia-gpu", "because"]

    def test_what_needs_no_clock_is_tried_on_the_spot(self):
        assert row("persistent-zero")["verdict"] == "holds"
        assert settings_of("seeded-workers")["outcome"].tolist() == ["holds", "does not hold", "does not hold"]
        assert not claim_trials.reading_back()[0]
        one_cpu, _, bound = settings_of("workers-clamp")["outcome"]
        assert one_cpu == "holds"
        if hasattr(os, "sched_setaffinity"):  # a bound process asks for the host's cores
            assert bound == ("holds" if os.cpu_count() == 1 else "does not hold")

    def test_detail_is_lost_by_resizing_first_and_kept_where_nothing_is_resized(self):
        lk.make_photos(course.photo_root("imagenet"), 4, progress=False)
        course.photo_root("camera").mkdir(parents=True)
        for number in range(4):
            Image.effect_noise((120, 90), 50).save(course.photo_root("camera") / f"{number}.png")
        found = settings_of("resize-once")
        assert found["outcome"].tolist() == ["not measured yet", "does not hold", "holds"]
        assert found["n_runs"].tolist() == [0, 4, 4]
        assert found["measured"].iloc[2] == pytest.approx(1)


class TestReadings:
    def test_a_reading_is_the_paired_ratio_with_its_interval(self, runs):
        normalized = "tensors, normalised per batch"
        frame = runs("04 transforms", {"PIL": 100, "tensors": 80, normalized: 96})
        rates = frame.pivot(index="round", columns="variant", values="images_per_s")
        found = row("batched-transforms", frame)
        assert found["measured"] == pytest.approx(stats.gmean(rates[normalized] / rates["tensors"]))
        assert found["ci_low"] < found["measured"] < found["ci_high"]
        assert (found["verdict"], found["n_runs"], found["experiment"]) == ("holds", 5, "04 transforms")

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
    def test_a_planted_frame_changes_the_verdict(self, runs, rate, verdict):
        decoders = runs("02 decoders, imagenet", {"pil": 100, "cv2": 120, "torchvision": rate})
        assert settings_of("decode-read-image", decoders).loc["500 x 375, decoding alone", "outcome"] == verdict
        found = row("decode-read-image", decoders)
        assert found["verdict"] == {"holds": "holds under a condition"}.get(verdict, verdict)  # others are not measured
        assert ("inconclusive, though faster is certain" in found["because"]) == (rate == 157)

    def test_a_condition_is_named(self, runs, transforms):
        slow = transforms(90)
        found = row("v2-tensors", runs("04 crop and flip alone", {"PIL": 100, "tensors": 130}), slow)
        assert (found["verdict"], found["condition"]) == ("holds under a condition", "crop and flip")
        assert found["measured"] == pytest.approx(1.3, rel=0.02)
        assert "color jitter, normalise: 0.90x" in found["because"]
        assert row("v2-tensors", slow)["verdict"] == "does not hold"

    def test_scatter_and_a_rehearsal_are_inconclusive(self, frame_of, runs, transforms):
        wild = frame_of({"PIL": [100] * 4, "tensors": [60, 150, 80, 130]}, "PIL", experiment="04 transforms")
        assert row("v2-tensors", wild.assign(scale="laptop"))["verdict"] == "inconclusive"
        found = row("v2-tensors", transforms(200).assign(scale="ci"))
        assert (found["verdict"], found["scale"]) == ("inconclusive", "ci")
        assert "rehearsal" in found["because"]

    def test_runs_of_the_largest_scale_count_whatever_the_order(self, runs):
        few = runs("10 steps from 200 names", {"one search per image": 1, "+ processes": 2})
        many = runs("10 steps from 500 names", {"one search per image": 1, "+ processes": 20})
        assert row("sizes-6x", few.assign(scale="ci"), many)["experiment"] == many["experiment"].iloc[0]
        assert row("sizes-6x", many, few.assign(scale="ci"))["experiment"] == many["experiment"].iloc[0]

    @pytest.mark.parametrize(("page_cache", "expected"), [("cold", "holds"), ("unknown", "inconclusive")])
    def test_cold_runs_have_to_have_been_cold(self, runs, page_cache, expected):
        rates = {"files": 100, "shards of 12": 110, "shards of 96": 150}
        found = settings_of("wds-shards", runs("08 disk, cold", rates, page_cache=page_cache)).loc["a cold disk"]
        assert found["outcome"] == expected
        assert found["measured"] == pytest.approx(1.5, rel=0.02)  # the largest shards

    def test_a_ratio_of_two_experiments(self, runs):
        warm = runs("10 sizes from headers", {"Pillow": 500, "lk.collect_sizes": 1000})
        cold = runs("10 headers from a cold disk", {"one reader": 8, "lk chooses": 9}, page_cache="cold")
        here, simulated = settings_of("sizes-4000-20min", warm, cold).iloc
        rates = [warm[warm.variant == "lk.collect_sizes"].images_per_s, cold[cold.variant == "one reader"].images_per_s]
        assert here["measured"] == pytest.approx(stats.gmean(rates[0]) / stats.gmean(rates[1]))
        welch = stats.ttest_ind(*map(np.log, rates), equal_var=False).confidence_interval()
        assert here["ci_low"] <= np.exp(welch.low) * 1.0001
        assert np.exp(welch.high) <= here["ci_high"] * 1.0001
        assert here["outcome"] == "holds"
        assert simulated["measured"] == pytest.approx(1 + 2 * DISKS["hdd"].seek_ms / 1e3 * 1000, rel=0.02)
        assert (simulated["kind"], simulated["outcome"]) == ("simulated", "not judged")

    def test_a_simulated_disk_is_reckoned_from_the_measured_computing_and_decides_nothing(self, runs):
        frame = runs("09 an iteration of Marigold", {"tarfile": 10, "folder": 16})
        tests = settings_of("marigold-tar", frame)
        computing, seek = 32 / 16, 0.008
        first = (2 * 107_770 * seek + 64 * seek + computing) / (128 * seek + computing)
        assert list(tests["measured"])[1:] == pytest.approx([first, (64 * seek + 2) / (128 * seek + 2)], rel=0.02)
        assert list(tests["kind"]) == ["measured", "simulated", "simulated"]
        assert list(tests["outcome"]) == ["smaller here", "not judged", "not judged"]
        found = row("marigold-tar", frame)
        assert (found["verdict"], found["measured"]) == ("smaller here", tests["measured"].iloc[0])
        assert "Simulated, later iterations from a rotating disk: " in found["because"]

    def test_unequal_work_decides_nothing_and_sets_no_condition(self, runs):
        rates = {"PIL + ToTensor": 100, "cv2 + ToTensor": 70, "read_image, to float": 80, "read_image": 900}
        for name in ("decode-pil", "decode-read-image"):
            found = row(name, runs("14 decoders at 224", rates))
            assert found["verdict"] == "does not hold"
            assert re.search(r"^Unequal work, .*: 9\.\d+x .*: not judged\.$", found["because"], re.MULTILINE)
        rates |= {"cv2 + ToTensor": 130, "read_image, to float": 150, "read_image": 90}
        found = row("decode-pil", runs("14 decoders at 224", rates))
        assert (found["verdict"], found["condition"]) == ("holds", "")

    @pytest.mark.parametrize(
        ("rate", "verdict"), [(48, "holds"), (39.5, "does not hold"), (36, "does not hold"), (90, "larger here")]
    )
    def test_the_second_epoch(self, runs, rate, verdict):
        rates = {"default, epoch 1": 40, "default, epoch 2": 40, "persistent, epoch 1": 39, "persistent, epoch 2": rate}
        found = row("persistent-epoch2", runs("12 epochs 1 and 2 of ResNet-18", rates))
        assert found["verdict"] == verdict
        assert "Beside the claim, the whole first epoch: " in found["because"]

    def test_a_gpu_claim_looks_at_no_cpu_runs(self, runs):
        rates = {"CPU does all": 100, "CPU crops, device colors": 300, "CPU crops only": 400}
        cpu = runs("06 who augments", rates)
        found = row("kornia-gpu", cpu)
        assert found["verdict"] == "needs a GPU"
        assert np.isnan(found["measured"])
        assert re.search(r"Beside the claim, if colors were free: (3\.9|4\.0)", found["because"])
        assert row("kornia-gpu", cpu.assign(device="cuda"))["verdict"] == "holds"

    @pytest.mark.parametrize(("device", "verdict"), [("cuda", "inconclusive"), ("cpu", "needs a GPU")])
    def test_reference_runs_answer_where_there_is_no_gpu_but_no_rehearsals(
        self, runs, tmp_path, monkeypatch, device, verdict
    ):
        monkeypatch.setattr(claim_trials, "reference_runs", partial(reference_runs, folder=tmp_path))
        stored = runs("13 peers on a GPU", {"DataLoader": 100, "DALI (GPU)": 150}).assign(env_id="there", device=device)
        save_frame(stored, tmp_path / "there.csv")
        (tmp_path / "there.json").write_text(json.dumps({"environment": {"gpu": "Some GPU", "cpu": ""}}))
        found = row("dali-2x")
        assert found["verdict"] == verdict
        if device == "cuda":
            assert (found["measured"], found["device"]) == (pytest.approx(1.5, rel=0.02), "cuda")

    @pytest.mark.parametrize(("mixing", "verdict"), [(100_000, "holds"), (5000, "does not hold")])
    def test_what_mixing_adds_to_a_step(self, runs, mixing, verdict):
        fed = runs("07 feeding a training step", {"pageable": 500, "compute alone": 1000})
        mixed = runs("06 mixing on the device", {"v2.CutMix": mixing, "lk.mixup": mixing})
        found = row("mixup-free", *(frame.assign(device="cuda") for frame in (fed, mixed)))
        assert found["verdict"] == verdict
        assert found["measured"] == pytest.approx(1 + 1000 / mixing, rel=0.01)
        assert found["ci_low"] < found["measured"] < found["ci_high"]


class TestChecklist:
    def test_measured_gains_are_ranked_and_the_rest_is_left_open(self, runs_of):
        decoders = runs_of("02 decoders, imagenet", torchvision=1.2).replace({"base": "pil"})
        formats = runs_of("11 formats", **{"JPEG at 256": 3}).replace({"base": "JPEG folder"})
        fed = runs_of("07 feeding a training step", prefetched=9).replace({"base": "pinned"}).assign(device="cpu")
        table = course.checklist(runs=[decoders, formats, fed]).set_index("step")
        assert list(table["place"]) == list(range(1, 10))
        assert dict(table["place_by_gain"].dropna()) == {"read_image": 2, "resize once": 1}
        assert table["measured"].dropna().to_dict() == pytest.approx({"read_image": 1.2, "resize once": 3}, rel=0.02)
        assert list(table.loc["resize once", ["ci_low", "ci_high"]]) == pytest.approx([3, 3], rel=0.02)
        on_gpu = course.checklist(runs=[fed.assign(device="cuda")]).set_index("step")["measured"].dropna()
        assert dict(on_gpu) == pytest.approx({"prefetch to the GPU": 9}, rel=0.02)

    def test_without_frames_no_step_has_a_gain(self):
        table = course.checklist()
        assert table["measured"].isna().all()
        assert table["place_by_gain"].isna().all()


class TestFolders:
    @pytest.fixture
    def results(self, tmp_path, transforms):
        """The results of a tour on this machine."""
        save_frame(transforms(80), tmp_path / "results" / lk.env_id() / "frames" / "04.csv")
        return tmp_path / "results"

    def test_stored_frames_are_read_and_fresh_ones_replace_them(self, results, transforms):
        assert course.claims(results).equals(course.claims(results / lk.env_id()))
        assert course.claims(results).set_index("id").loc["v2-tensors", "verdict"] == "does not hold"
        table = course.claims(results, runs=[transforms(120)]).set_index("id")
        assert table.loc["v2-tensors", "verdict"] == "holds under a condition"

    def test_copies_of_a_wheels_notebooks_find_the_results_beside_their_folder(self, results, monkeypatch):
        monkeypatch.delenv(RESULTS_VARIABLE)
        monkeypatch.setattr(claim_trials, "IS_CLONE", False)
        (results.parent / "labkit-notebooks").mkdir()
        monkeypatch.chdir(results.parent / "labkit-notebooks")
        assert course.claims().set_index("id").loc["v2-tensors", "experiment"] == "04 transforms"

    def test_runs_of_other_machines_are_refused(self, transforms):
        runs = transforms(80)
        with pytest.raises(ValueError, match=f"runs of elsewhere cannot be judged here: this machine is {lk.env_id()}"):
            course.claims(runs=[runs.assign(env_id="elsewhere")])
        mixed = runs.assign(env_id=np.where(runs["round"] > 2, "elsewhere", lk.env_id()))
        with pytest.raises(ValueError, match=r"runs of .*elsewhere.* cannot be judged"):
            course.claims(runs=[mixed])

    def test_the_command_prints_every_claim_within_the_width(self, results):
        result = CliRunner().invoke(app, ["claims", "--results", str(results)], env={"COLUMNS": "80"})
        assert result.exit_code == 0
        assert re.findall(r"^([a-z]\S+) +[A-Z]{3}", result.output, re.MULTILINE) == IDS
        assert re.search(r"^v2-tensors +DOES NOT HOLD +0\.80x \[", result.output, re.MULTILINE)
        assert "20 claims: " in result.output
        for width, limit in ((10, 80), (100, 100), (300, 120)):
            assert max(map(len, lines_of(course.claims(results), width))) <= limit

    @pytest.mark.parametrize("place", ["nowhere", "empty", "foreign"])
    def test_a_bad_folder_is_one_line_and_exit_code_2(self, place, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "foreign" / "frames").mkdir(parents=True)
        (tmp_path / "foreign" / "frames" / "x.csv").write_text("a,b\n1,2\n")
        result = CliRunner().invoke(app, ["claims", "--results", str(tmp_path / place)])
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert ("x.csv is not a frame of runs" if place == "foreign" else "no frames of this machine") in result.output


class TestPlot:
    def test_it_says_every_outcome_in_words(self, runs):
        table = course.claims(runs=[runs("02 decoders, imagenet", {"pil": 100, "cv2": 120, "torchvision": 150})])
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

    def test_a_wide_interval_does_not_hide_the_ratios(self, frame_of, transforms):
        wild = frame_of({"pil": [100, 100], "cv2": [20, 900]}, "pil", experiment="02 decoders, imagenet")
        table = course.claims(runs=[wild.assign(scale="laptop"), transforms(90)])
        measured = pd.DataFrame(table.attrs["tests"])["measured"].dropna()
        low, high = course.plot_claims(table).get_xlim()
        assert 0.2 < low < measured.min()
        assert measured.max() < high < 10
        assert course.plot_claims(course.claims()).get_xlim() == (0.5, 2)

    def test_it_keeps_what_is_not_measured_apart(self, runs):
        table = course.claims(runs=[runs("09 an iteration of Marigold", {"tarfile": 10, "folder": 16})])
        marks = [container[0] for container in course.plot_claims(table).containers]
        assert [mark.get_xdata()[0] > 0 for mark in marks] == [True] * 3
        assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True, True]
        assert marks[0].get_color() != marks[1].get_color() == marks[2].get_color()
        assert marks[0].get_marker() != marks[1].get_marker() == marks[2].get_marker()
