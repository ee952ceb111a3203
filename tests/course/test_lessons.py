"""What single lessons show: scored predictions, feeding a step, the ladder, where to start, and counted readbacks."""

import hashlib
import math
import re
import threading

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from PIL import Image

import labkit as lk
from labkit import course
from labkit.course import ladder, starting
from labkit.course.predictions import predictions
from labkit.measure.compare import count_images
from labkit.measure.frames import save_frame
from labkit.measure.recorder import RESULTS_VARIABLE
from tests.paths import REPO

STORED = REPO / "notebooks"
N_PHOTOS = 8


class TestPredictions:
    """Guesses are scored against what was measured: the expected figures are worked out by hand."""

    def test_a_prediction_is_kept_and_replaced(self):
        course.predict("a", 2, because="why not")
        assert "a: you expect 3x" in repr(course.predict("a", 3))
        assert predictions().to_dict("records") == [{"label": "a", "speedup": 3.0, "because": ""}]

    @pytest.mark.parametrize("speedup", [..., None])
    def test_an_open_prediction_prints_nothing_and_counts_as_none(self, runs_of, capsys, speedup):
        assert course.predict("2 workers", speedup) is None
        assert predictions().empty
        lk.plot_speedup(runs_of("00 step", **{"2 workers": 2.0}))
        assert course.score().walk.empty
        assert repr(course.score("00")) == repr(course.score())
        assert "write one into course.predict(label, ...)" in repr(course.score())
        course.score()._ipython_display_()  # nothing to show
        assert capsys.readouterr().out == ""
        course.predict("2 workers", 2)
        assert len(predictions()) == 1

    @pytest.mark.parametrize("speedup", [0, -1, float("nan"), float("inf"), "fast"])
    def test_a_prediction_must_be_a_ratio_and_leaves_the_earlier_one(self, speedup):
        course.predict("a", 2)
        with pytest.raises(ValueError, match=f"speedup must be a number.*{speedup}"):
            course.predict("a", speedup)
        assert list(predictions()["speedup"]) == [2]

    @pytest.fixture
    def found(self, runs_of):
        """The score of guesses that are twice, half, once and four times what is measured."""
        for number, (guess, measured) in enumerate([(4, 2), (1.5, 3), (2, 2), (8, 2)]):
            course.predict("fast", guess)
            lk.plot_speedup(runs_of(f"0{number} step", fast=measured))
        return course.score()

    def test_the_score_is_as_worked_out_by_hand(self, found):
        errors = [math.log(2), -math.log(2), 0, math.log(4)]
        mean = sum(errors) / 4
        deviation = (sum((error - mean) ** 2 for error in errors) / 3) ** 0.5
        assert found.bias == pytest.approx(math.exp(mean), rel=1e-3)
        assert found.spread == pytest.approx(math.exp(deviation), rel=1e-3)
        assert (found.inside, found.near) == (0.25, 0.25)
        assert found.bias_interval[0] < 1 < found.bias_interval[1]
        for words in (
            "fast (00 step): 4x guessed, 2x measured: 2 times too high.",
            "fast (01 step): 1.5x guessed, 3x measured: 2 times too low.",
            "fast (02 step): 2x guessed, 2x measured: inside the interval.",
            "Of 4 guesses so far, 25% lie inside",
            "1.41 times too high",
            "no leaning",
        ):
            assert words in repr(found)

    def test_a_notebook_scores_itself_and_names_the_score_walk(self, found):
        one = course.score("01")
        assert list(one.frame["experiment"]) == ["01 step"]
        assert len(one.walk) == 4
        assert "00 step" not in repr(one)
        assert "Of 4 guesses" in repr(one)
        assert "<img" not in one._repr_html_()
        assert "None of these experiments has a guess" in repr(course.score("12"))

    @pytest.mark.parametrize(("factor", "kind"), [(2, "an optimist"), (0.5, "a pessimist")])
    def test_a_leaning_is_named_where_it_is_certain(self, runs_of, factor, kind):
        for number, wobble in enumerate([0.9, 1.0, 1.1, 1.0, 0.95]):
            course.predict("fast", 3 * factor * wobble)
            lk.plot_speedup(runs_of(f"0{number} step", fast=3))
        assert kind in repr(course.score())

    def test_no_guess_and_a_single_one(self, runs_of):
        assert "course.predict(label, ...)" in repr(course.score())
        assert "<img" not in course.score()._repr_html_()
        course.predict("<fast>", 1.5)
        lk.plot_speedup(runs_of("00 step", **{"<fast>": 2.0}))
        html = course.score()._repr_html_()
        assert html.startswith("<img alt=")
        assert "&lt;fast&gt; (00 step): 1.5x guessed" in html
        assert "only guess so far" in html
        assert "nan" not in html
        assert "<img" not in course.score("00")._repr_html_()

    def test_the_plot_puts_right_guesses_on_the_diagonal(self, found):
        ax = plt.subplots()[1]
        assert found.plot(ax) is ax
        points = ax.collections[1].get_offsets()
        assert points.tolist() == found.frame[["measured", "guess"]].to_numpy().tolist()
        (diagonal,) = ax.lines
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
        assert ax.get_xlim() == ax.get_ylim()
        texts = {text.get_text() for text in ax.texts}
        assert {"00", "01", "02", "03", "guessed too high", "guessed too low"} <= texts
        assert course.score("12").plot().collections


class TestLadder:
    @pytest.fixture(scope="class")
    @classmethod
    def sources(cls, first_photos, tmp_path_factory):
        """Photos, and the same as raw pixels."""
        store = lk.FolderStore(first_photos(N_PHOTOS))
        path = tmp_path_factory.mktemp("pixels") / "x"
        return store, lk.PixelStore.build(store, path, engine="threads", progress=False)

    @pytest.fixture
    def runs(self, frame_of):
        rates = {"naive": [100, 101, 99], "quick": [400, 404, 396], "decode limit": [500, 500, 500]}
        return frame_of(rates, "naive", experiment=ladder.EXPERIMENT, photos="small photos", rung=False)

    @pytest.mark.slow
    def test_every_rung_gives_crops_and_every_photo_equally_often_and_leaves_no_worker_and_no_thread(self, sources):
        processes, threads = set(psutil.Process().children()), set(threading.enumerate())
        kinds, kept = [], []
        for label, factory in ladder.ladder_variants(*sources, lk.scale()).items():
            kept.append(factory())  # somebody still holds the loader
            batches = list(kept[-1])
            n_images = sum(map(count_images, batches))
            assert n_images % N_PHOTOS == 0, label
            if not label.endswith("limit"):
                kinds.append(batches[0][0].dtype)
                assert batches[0][0].shape[1:] == (3, 224, 224), label
                found = torch.cat([own for _, own in batches]).bincount()
                assert set(found.tolist()) == {n_images // N_PHOTOS}, label  # one photo per class
            assert set(psutil.Process().children()) <= processes, label
            for thread in set(threading.enumerate()) - threads:
                if not thread.name.startswith("labkit-batches"):  # idle
                    thread.join(timeout=10)
                    assert not thread.is_alive(), (label, thread)
        assert kinds == [torch.float32] * 3 + [torch.uint8] * 5

    def test_the_photos_must_be_the_same(self, sources, first_photos):
        fewer = lk.FolderStore(first_photos(N_PHOTOS - 1))
        with pytest.raises(ValueError, match="8 raw pixels and 7 photos differ"):
            ladder.ladder_variants(fewer, sources[1], lk.scale())

    def test_measuring_takes_unequal_numbers_of_images_in_silence(self, recwarn):
        variants = {"a": lambda: [4, 4], "b limit": lambda: [64]}
        runs = ladder.measure_rungs(variants, experiment="x", factors={"photos": "p"})
        # Garbage of other tests may be collected here, and say so.
        assert [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning] == []
        assert set(runs.baseline) == {"a"}
        assert not runs.rung.any()
        assert set(runs.photos) == {"p"}

    def test_the_plot_has_rungs_in_rows_and_limits_as_lines(self, runs):
        ax = ladder.plot_rungs(runs)
        assert [label.get_text() for label in ax.get_yticklabels()] == ["naive", "quick"]
        assert [text.get_text() for text in ax.texts] == ["100", "400  4.0x", "decode limit 500"]
        drawn = sorted({float(x) for points in ax.collections for x, _ in points.get_offsets()})
        assert drawn == sorted({100.0, 101.0, 99.0, 400.0, 404.0, 396.0})
        assert [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [500]

    def test_a_stored_figure_says_which_frame_it_shows(self, runs, tmp_path):
        frame = save_frame(runs, tmp_path / "frames" / ladder.FRAME)
        figure = ladder.store_figure(frame, tmp_path)
        assert (tmp_path / ladder.FRAME).read_bytes() == frame.read_bytes()
        assert ladder.drawn_from(figure) == hashlib.sha256(frame.read_bytes()).hexdigest()
        with Image.open(figure) as image:
            assert image.width > 600
        Image.new("RGB", (8, 8)).save(figure)
        assert ladder.drawn_from(figure) == ""
        title = " ".join(ladder.draw_figure(runs).axes[0].get_title("left").split())
        assert title.endswith(f" (small photos, {lk.env_id()})")

    def test_the_readme_shows_the_stored_figure_of_the_stored_frame(self):
        notebook = (STORED / f"{ladder.NOTEBOOK}.ipynb").read_text().replace("\\", "")
        assert f'experiment="{ladder.EXPERIMENT}"' in notebook
        images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (REPO / "README.md").read_text())
        assert images == [f"notebooks/{ladder.FIGURE}"]
        frame = STORED / ladder.FRAME
        assert ladder.drawn_from(STORED / ladder.FIGURE) == hashlib.sha256(frame.read_bytes()).hexdigest()
        runs = lk.load_frame(frame)
        assert ladder.is_ladder(runs)
        assert runs["variant"].iloc[0] == ladder.NAIVE


class TestWhereToStart:
    @pytest.fixture(autouse=True)
    def own_frames(self, tmp_path, monkeypatch):
        """Nothing is recorded here; what is stored lies in a folder of the test's own."""
        monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))
        monkeypatch.setattr(starting, "NOTEBOOK_FOLDER", tmp_path)

    @pytest.fixture
    def runs(self, runs_of):
        """Builds runs of an experiment with a baseline of this name."""
        return lambda experiment, base, **speedups: runs_of(experiment, **speedups).replace({"base": base})

    @pytest.fixture
    def decoders(self, runs):
        return lambda speedup, **others: runs("02 decoders, imagenet", "pil", turbojpeg=speedup, **others)

    @staticmethod
    def row(call, *runs):
        return course.where_to_start(runs=runs).frame.set_index("call").loc[call]

    def test_the_stored_table_names_calls_and_notebooks_that_there_are(self, monkeypatch):
        monkeypatch.setattr(starting, "NOTEBOOK_FOLDER", STORED)
        frame = course.where_to_start().frame
        assert len(frame) > 5
        assert (frame["ci_low"] > 1).all()
        for change in frame.itertuples():
            text = (STORED / f"{change.notebook}.ipynb").read_text()
            assert re.search(rf"\b{change.call.removeprefix('lk.')}\b", text), change.call

    def test_a_gain_is_read_from_this_machines_runs_and_else_from_the_stored_one_which_is_named(
        self, decoders, tmp_path
    ):
        save_frame(decoders(3).assign(env_id="their-box"), tmp_path / starting.FRAME)
        stored, own = self.row("lk.ImageDataset"), self.row("lk.ImageDataset", decoders(2.5))
        assert (stored.origin, stored.gain) == ("stored run on their-box", pytest.approx(3, rel=0.02))
        assert (own.origin, own.gain) == ("this machine", pytest.approx(2.5, rel=0.02))
        assert own.ci_low <= 2.5 <= own.ci_high
        assert (own.n_runs, own.waits_for) == (5, "decode")

    def test_only_what_is_certainly_faster_has_a_row(self, runs):
        def calls(ratio):
            frames = [runs("03 workers", "no worker", **{"one per core": ratio})]
            return course.where_to_start(runs=frames).frame["call"].tolist()

        assert course.where_to_start().frame.empty
        assert calls(2.0) == ["lk.make_loader"]
        assert calls(0.5) == calls(1.0) == calls(1.005) == []  # of the last, the interval contains 1

    def test_a_gain_on_the_gpu_needs_runs_there(self, runs):
        fed = runs("07 feeding a training step", "pinned", prefetched=1.5)
        assert course.where_to_start(runs=[fed.assign(device="cpu")]).frame.empty
        found = self.row("lk.CUDAPrefetcher", fed.assign(device="cuda"))
        assert (round(found.gain, 1), found.origin) == (1.5, "this machine")

    def test_what_is_stored_gives_the_same_gains(self, decoders, runs_of, tmp_path):
        frames = [decoders(3, cv2=2), runs_of("x", a=2)]
        rows = starting.runs_behind(frames)
        assert set(rows["variant"]) == {"pil", "turbojpeg"}
        save_frame(rows, tmp_path / starting.FRAME)
        own, stored = course.where_to_start(runs=frames).frame, course.where_to_start().frame
        assert len(own) == 1
        pd.testing.assert_series_equal(own["gain"], stored["gain"])
        assert starting.runs_behind([frames[1]]) is None

    def test_it_prints_a_table_and_shows_links_and_doubts(self, runs):
        table = course.where_to_start(runs=[runs("03 workers", "no worker", **{"one per core": 2}).assign(scale="ci")])
        assert re.search(r"decode +lk\.make_loader: .*workers over none: 2\.00x \[[\d.]+, [\d.]+\], this", str(table))
        assert "in doubt: ci scale is a rehearsal" in str(table)
        assert "[03_persistent_workers](03_persistent_workers.ipynb) |" in table._repr_markdown_()
        assert "03_persistent_workers</td>" in table.to_html(pages=["01_naive_pil"])
        assert '<a href="03_persistent_workers.html">03' in table.to_html(pages=["03_persistent_workers"])

    def test_the_checklist_comes_to_each_part_in_its_place(self, decoders):
        frames = [decoders(3, torchvision=1.2)]
        steps = course.checklist(runs=frames)
        table = course.where_to_start(runs=frames).judge(steps)
        places = steps.set_index("step")["place"]
        assert table["place"].dropna().tolist() == [places[name] for name in table["first_step"] if name]
        assert table.loc["decode", ["first_step", "best_call"]].tolist() == ["read_image", "lk.ImageDataset"]
        assert table.loc["decode", ["measured", "best_gain"]].tolist() == pytest.approx([1.2, 3], rel=0.02)
        assert f"step {table.loc['read', 'place']} for read" in table.attrs["sentence"]

    def test_an_order_without_steps_of_a_part_says_so(self):
        steps = pd.DataFrame({"step": ["workers"], "place": [1], "measured": [np.nan]})
        table = course.where_to_start().judge(steps)
        assert table["place"].count() == 1
        assert re.search("No step is for a training that waits for .*read", table.attrs["sentence"])
