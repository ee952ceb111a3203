"""Results, claims and where to start: tables over what notebooks found."""

import json
import re

import numpy as np
import pytest

import labkit as lk
from labkit import course
from labkit.app.cli import main
from labkit.app.recording import FolderRecorder
from labkit.course import ledger, results
from labkit.course.results import Ratio, Result, known_results, stored_results
from labkit.course.starting import start_from
from labkit.measure.recorder import RESULTS_VARIABLE, set_recorder
from tests.paths import REPO, invoke


@pytest.fixture(autouse=True)
def nothing_stored(tmp_path, monkeypatch):
    """No results but the test's own."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "frames"))
    monkeypatch.setattr(stored_results, "__defaults__", (tmp_path / "stored.json",))


@pytest.fixture
def found(recorded_frames, monkeypatch):
    """Records what a notebook found, at a scale that counts."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(recorded_frames))
    monkeypatch.setenv("LABKIT_SCALE", "laptop")

    def found(notebook, **figures):
        given = {
            name: dict(zip(("speedup", "ci_low", "ci_high"), numbers, strict=True)) for name, numbers in figures.items()
        }
        return course.result(notebook, f"{notebook} found it.", figures=given)

    return found


class TestResults:
    def test_a_result_says_what_was_found_where_and_what_the_run_does_not_show(self, found, monkeypatch):
        shown = course.result("01_x", "It is so.", ("It is faster.", False), ("It is slower.", True), figures={"n": 3})
        told = shown._repr_markdown_()
        assert told.startswith(
            "**Result of this run.** It is so. It is faster. (This run does not confirm all of this.) It is slower. *("
        )
        assert f"{lk.usable_cores()} cores of " in told
        assert repr(shown).startswith("Result of this run. It is so.")
        assert "measurement" not in told
        monkeypatch.setenv("LABKIT_SCALE", "ci")
        assert "; a trial at `ci` scale, no measurement)" in course.result("01_x", "It is so.")._repr_markdown_()
        assert "Stored run" not in told

    def test_it_is_recorded_as_it_was(self, found, frame_of):
        runs = lk.summarize(frame_of({"a": [1, 1.1, 1.2], "b": [2, 2.1, 2.5]}, "a"))
        course.result("01_x", "One.", ("Two.", False), figures={"b over a": runs.loc["b"], "n": 12_345.6})
        kept = known_results()["01_x"]
        assert (kept.sentences, kept.not_here, kept.scale) == (("One.", "Two."), ("Two.",), "laptop")
        row = runs.loc["b", ["speedup", "ci_low", "ci_high"]].astype(float)
        ratio = kept.figures["b over a"]
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx(tuple(row), rel=1e-3)
        assert np.isnan(kept.figures["n"].low)
        assert str(kept.figures["n"]) == "12,350"
        assert str(ratio) == f"{row.iloc[0]:.3g} [{row.iloc[1]:.3g}, {row.iloc[2]:.3g}]"

    def test_this_machines_take_the_place_of_stored_ones(self, found, tmp_path):
        record = Result("01_x", ("Stored.",), (), {"f": Ratio(2, 1.5, 3)}, "their box", "laptop").to_record()
        content = {"machine": "their box", "notebooks": {"01_x": record, "02_y": record}}
        (tmp_path / "stored.json").write_text(json.dumps(content))
        assert "**Stored run.** Stored. *(their box)*" in found("01_x", f=(4, 3, 5))._repr_markdown_()
        known = known_results()
        assert (known["01_x"].origin, known["01_x"].figures["f"].value) == ("this machine", 4)
        assert (known["02_y"].origin, known["02_y"].figures["f"].value) == ("the stored run on their box", 2)

    def test_runs_at_ci_scale_do_not_count(self, found, monkeypatch):
        found("01_x")
        monkeypatch.setenv("LABKIT_SCALE", "ci")
        found("02_y")
        assert list(known_results()) == ["01_x"]

    def test_a_damaged_file_is_named_with_the_remedy(self, found, recorded_frames, tmp_path):
        found("01_x")
        (recorded_frames.with_name("results") / "02_y.json").write_text('{"sentences": []}')
        with pytest.raises(ValueError, match=r"02_y\.json holds no result: delete it, and run its notebook again"):
            known_results()
        (tmp_path / "stored.json").write_text("[1]")
        with pytest.raises(ValueError, match=r"stored\.json holds no results .*restore it with git"):
            stored_results()

    def test_a_figure_that_is_no_number_is_left_out(self, tmp_path):
        set_recorder(FolderRecorder(tmp_path / "frames"))
        course.result("11_x", "It never pays.", figures={"epochs": float("nan"), "other": 2.0})
        figures = results.recorded_results(tmp_path / "results")["11_x"].figures
        assert {name: ratio.value for name, ratio in figures.items()} == {"other": 2.0}

    def test_sentences_are_filled_with_values(self, found):
        row = {"speedup": 1.514, "ci_low": 1.467, "ci_high": 1.552}
        fast = {"speedup": 26.6, "ci_low": 25.9, "ci_high": 27.8}
        texts = "{cores} cores: {row}, {row:interval}.", ("{fast:interval}; {row:.1f}; {share:.0%}.", False)
        told = course.result("01_x", *texts, cores=2, row=row, fast=fast, share=0.256)
        assert told.result.sentences == ("2 cores: 1.51, 1.51 [1.47, 1.55].", "27 [26, 28]; 1.5; 26%.")
        assert told.result.not_here == told.result.sentences[1:]
        assert (
            course.result("01_x", "{braces} stay where there are no values").result.sentences[0].startswith("{braces}")
        )

    def test_a_result_is_that_of_a_notebook(self):
        with pytest.raises(ValueError, match="must be a notebook's name, such as '03_persistent_workers'"):
            course.result("../x", "It is so.")


@pytest.mark.parametrize(
    ("interval", "claim", "expected"),
    [
        ((1.01, 1.5), (), "holds"), ((0.5, 0.9), (), "does not hold"), ((0.9, 1.1), (), "inconclusive"),
        ((0.96, 1.04), (1,), "holds"), ((1.06, 1.2), (1,), "does not hold"), ((0.96, 1.1), (1,), "inconclusive"),
        ((2.0, 5.0), (3,), "holds"), ((5.1, 6), (3,), "larger here"), ((1.2, 1.9), (3,), "smaller here"),
        ((0.9, 1.9), (3,), "does not hold"), ((1.9, 2.1), (3,), "inconclusive"),
        ((1.2, 2.9), (1.3, 2.0), "holds"), ((3.1, 4), (1.3, 2.0), "larger here"),
    ],
)  # fmt: skip
def test_an_interval_judges_a_claimed_ratio_range_sameness_or_direction(interval, claim, expected):
    assert ledger.outcome(*interval, *claim) == expected


class TestClaims:
    def test_each_claim_is_there_once_and_names_a_notebook_that_there_is(self):
        table = course.claims()
        assert table.index.is_unique
        assert len(table) == len(ledger.LEDGER)
        stems = {path.stem.split("_")[0] for path in (REPO / "notebooks").glob("*.ipynb")}
        assert {test.notebook for claim in ledger.LEDGER for test in claim.tests} <= stems
        assert set(table.verdict) <= set(ledger.VERDICTS)

    def test_the_stored_run_has_every_figure_that_is_asked_for(self):
        named = {name.split("_")[0]: found.figures for name, found in stored_results(results.STORED).items()}
        asked = [(test.notebook, test.figure) for claim in ledger.LEDGER for test in claim.tests if test.figure]
        assert [one for one in asked if one[1] not in named[one[0]]] == []

    @pytest.mark.parametrize(
        ("interval", "verdict"),
        [((1.3, 1.5), "smaller here"), ((1.8, 2.2), "holds"), ((0.5, 0.9), "does not hold"), ((9, 11), "larger here")],
    )
    def test_a_verdict_follows_what_was_found(self, found, interval, verdict):
        found("02_read_image", **{"read_image over PIL, floats from both": (sum(interval) / 2, *interval)})
        row = course.claims().loc["decode-read-image"]
        assert row.verdict == verdict
        assert (row.ratio, row.low, row.high) == pytest.approx((sum(interval) / 2, *interval))
        assert f"[{interval[0]:.3g}, {interval[1]:.3g}] ({verdict}, notebook 02)" in row.ours

    def test_of_several_settings_some_make_a_condition(self, found):
        two = {"tensors over PIL images": (0.8, 0.7, 0.9), "tensors over PIL images, crop and flip": (1.2, 1.1, 1.3)}
        found("04_tensor_transforms", **two)
        assert course.claims().loc["v2-tensors", "verdict"] == "holds under a condition"
        assert course.claims().loc["batched-transforms", "verdict"] == "not measured yet"
        assert course.claims().loc["dali-2x", "verdict"] == "needs a GPU"

    def test_the_page_is_that_of_the_stored_run_and_lists_what_can_be_looked_up(self):
        stored = json.loads(results.STORED.read_text())
        page = (REPO / "notebooks/guide/claims.md").read_text()
        assert page == ledger.page_of(ledger.judged(stored_results(results.STORED)), stored["machine"])
        rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| claim |")]
        assert len(rows) == sum("https://" in claim.source for claim in ledger.LEDGER) > 5
        assert all("](https://" in row for row in rows)
        for link in re.findall(r"\]\((\.\./[^)]+)\)", page):
            assert (REPO / "notebooks/guide" / link).is_file()

    def test_the_command_tells_each_claim(self, found):
        told = invoke(main, ["claims"])
        assert told.exit_code == 0
        assert [claim.id for claim in ledger.LEDGER if not re.search(rf"^{claim.id} ", told.output, re.MULTILINE)] == []


class Always(dict):
    """What is found under any name."""

    def __init__(self, found):
        self.get = lambda name: found


def all_faster():
    """Results of a run in which each change was certainly faster."""
    return Always(Result("", (), (), Always(Ratio(2, 1.5, 2.5)), "m", "laptop", "the stored run on m"))


class TestWhereToStart:
    def test_only_what_is_certainly_faster_has_a_row(self, found):
        def calls(*ratio):
            found("03_persistent_workers", **{"one worker per core over none": ratio})
            return course.where_to_start().frame["do"].str.extract("`(.*)`")[0].tolist()

        assert course.where_to_start().frame.empty
        assert calls(2, 1.5, 2.5) == ["lk.make_loader"]
        assert calls(0.5, 0.4, 0.6) == calls(1.2, 0.9, 1.3) == []

    def test_it_prints_a_table_that_names_whose_run_it_was(self, found, tmp_path):
        found("03_persistent_workers", **{"one worker per core over none": (2, 1.5, 2.5)})
        table = course.where_to_start()
        assert re.search(r"decode \| `lk\.make_loader`: .*2x \[1\.5, 2\.5\], one worker per core over none", str(table))
        assert str(table).endswith("Measured on this machine.")
        assert "[03_persistent_workers](03_persistent_workers.ipynb) |" in table._repr_markdown_()
        assert "03_persistent_workers</td>" in table.to_html(pages=["01_naive_pil"])
        assert '<a href="03_persistent_workers.html">03' in table.to_html(pages=["03_persistent_workers"])
        assert "the stored run on m; run `python -m labkit tour` for yours." in str(start_from(all_faster()))

    def test_calls_notebooks_and_figures_are_there(self):
        stored = stored_results(results.STORED)
        for row in start_from(all_faster()).frame.itertuples():
            name = re.match(r"`lk\.(\w+)`", row.do)[1]
            assert hasattr(lk, name)
            assert re.search(rf"\b{name}\b", (REPO / "notebooks" / f"{row.notebook}.ipynb").read_text()), row.do
            assert row.compared in stored[row.notebook].figures
