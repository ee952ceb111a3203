"""The decision tree: it names what there is, reads its gains from frames, and its picture can be read."""

import itertools
import re
from math import isnan

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyBboxPatch

import labkit as lk
from labkit.core import NOTEBOOK_FOLDER
from labkit.lab.notebooks import find_notebooks
from labkit.measure.recording import RESULTS_VARIABLE
from labkit.teach import start
from labkit.teach.claims import checklist
from labkit.teach.claims.steps import _STEPS
from labkit.teach.start_tree import ASK, NOT_WAITING, PARTS, SPLIT, TAUGHT, gains

CHOICES = [choice for part in (NOT_WAITING, *PARTS) for choice in part.choices]


@pytest.fixture(autouse=True)
def own_frames(tmp_path, monkeypatch):
    """Nothing is recorded here; what is stored lies in a folder of the test's own."""
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr(start, "NOTEBOOK_FOLDER", tmp_path)


def row(tree, call):
    return tree.frame.set_index("call").loc[call]


class TestTheDescription:
    def test_every_call_and_notebook_is_there(self):
        names = {notebook.name for notebook in find_notebooks()}
        for choice in CHOICES:
            assert set(choice.notebooks) <= names
            assert choice.call.removeprefix("lk.") in lk.__all__
        asked = re.findall(r"lk\.(\w+)|labkit (\w+)", " ".join([*ASK, SPLIT]))
        assert asked == [("", "watch"), ("ReplayLoader", ""), ("StageClock", "")]
        assert {"ReplayLoader", "StageClock"} <= set(lk.__all__)

    def test_every_notebook_of_the_walk_is_named(self):
        named = {TAUGHT, *itertools.chain.from_iterable(choice.notebooks for choice in CHOICES)}
        assert {notebook.name for notebook in find_notebooks()} - named == set()

    def test_every_notebook_uses_the_call_that_it_teaches(self):
        for choice in CHOICES:
            texts = [(NOTEBOOK_FOLDER / f"{name}.ipynb").read_text() for name in choice.notebooks]
            assert any(choice.call in text for text in texts), choice.call

    def test_every_experiment_is_measured_in_one_of_its_notebooks(self):
        """Names may have parts in braces; those of peers and the ladder are arguments in the notebooks, too."""
        for choice in CHOICES:
            if choice.gain and not choice.gain.needs_gpu:
                text = "".join((NOTEBOOK_FOLDER / f"{name}.ipynb").read_text() for name in choice.notebooks)
                named = re.findall(r'experiment=f?\\"(.*?)\\"', text)
                patterns = [".+".join(map(re.escape, re.split(r"\{.*?\}", name))) for name in named]
                asked = {choice.gain.experiment.replace("*", anything) for anything in ("", "1,000")}
                assert any(re.fullmatch(one, name) for one in patterns for name in asked), asked

    def test_every_step_of_the_checklist_has_its_place(self):
        assert sorted(choice.step for choice in CHOICES if choice.step) == sorted(step.name for step in _STEPS)

    def test_a_call_is_named_once(self):
        assert len({choice.call for choice in CHOICES}) == len(CHOICES)


class TestGains:
    def test_a_gain_is_read_from_this_machines_runs(self, runs_of):
        runs = runs_of("02 decoders, imagenet", turbojpeg=2.5).replace({"base": "pil"})
        found = row(lk.where_to_start(runs=[runs]), "lk.ImageDataset")
        assert found.gain == pytest.approx(2.5, rel=0.02)
        assert found.ci_low <= 2.5 <= found.ci_high
        assert (found.n_runs, found.origin) == (5, "this machine")

    def test_the_stored_run_stands_in_and_is_named(self, runs_of, tmp_path):
        stored = runs_of("02 decoders, imagenet", turbojpeg=3).replace({"base": "pil"}).assign(env_id="their-box")
        lk.save_frame(stored, tmp_path / start.FRAME)
        tree = lk.where_to_start()
        assert row(tree, "lk.ImageDataset").origin == "stored run on their-box"
        assert row(tree, "lk.ImageDataset").gain == pytest.approx(3, rel=0.02)
        own = runs_of("02 decoders, imagenet", turbojpeg=2).replace({"base": "pil"})
        assert row(lk.where_to_start(runs=[own]), "lk.ImageDataset").gain == pytest.approx(2, rel=0.02)

    def test_without_runs_it_says_what_measures_them(self):
        tree = lk.where_to_start()
        assert tree.frame["gain"].isna().all()
        assert row(tree, "lk.make_loader").origin == "not measured yet: labkit tour --only 03"
        assert row(tree, "lk.CUDAPrefetcher").origin == "needs a GPU"
        assert row(tree, "lk.plan").compared == ""

    def test_a_gain_on_the_gpu_needs_runs_there(self, runs_of):
        runs = runs_of("07 feeding a training step", prefetched=1.5).replace({"base": "pinned"})
        assert isnan(row(lk.where_to_start(runs=[runs.assign(device="cpu")]), "lk.CUDAPrefetcher").gain)
        found = row(lk.where_to_start(runs=[runs.assign(device="cuda")]), "lk.CUDAPrefetcher")
        assert (round(found.gain, 1), found.origin) == (1.5, "this machine")

    def test_runs_of_another_machine_are_refused(self, runs_of):
        with pytest.raises(ValueError, match="runs of elsewhere cannot be judged here"):
            lk.where_to_start(runs=[runs_of("03 workers", many=2).assign(env_id="elsewhere")])

    def test_what_is_stored_gives_the_same_gains(self, runs_of, tmp_path):
        frames = [runs_of("02 decoders, imagenet", turbojpeg=3, cv2=2).replace({"base": "pil"}), runs_of("x", a=2)]
        rows = start.runs_behind(frames)
        assert set(rows["variant"]) == {"pil", "turbojpeg"}
        lk.save_frame(rows, tmp_path / start.FRAME)
        own, stored = lk.where_to_start(runs=frames).frame, lk.where_to_start().frame
        assert own["gain"].count() == 1
        pd.testing.assert_series_equal(own["gain"], stored["gain"])
        assert start.runs_behind([frames[1]]) is None


class TestText:
    def test_the_text_has_every_branch(self, runs_of):
        tree = lk.where_to_start(runs=[runs_of("03 workers", **{"one per core": 2}).replace({"base": "no worker"})])
        text = str(tree)
        assert [choice.call for choice in CHOICES if choice.call not in text] == []
        assert re.search(r"lk\.make_loader, 03_persistent_workers: .*: 2\.00x \[[\d.]+, [\d.]+\], this machine", text)
        assert "[03_persistent_workers](03_persistent_workers.ipynb)" in tree.to_markdown()
        html = tree.to_html(lambda name: f"<a>{name}</a>")
        assert html.count("<li>") == html.count("</li>") == len(CHOICES) + len(PARTS) + 1
        assert "<a>03_persistent_workers</a>" in html

    def test_rehearsals_are_in_doubt(self, runs_of):
        runs = runs_of("03 workers", **{"one per core": 2}).replace({"base": "no worker"}).assign(scale="ci")
        assert "in doubt: ci scale is a rehearsal" in str(lk.where_to_start(runs=[runs]))

    def test_a_notebook_shows_the_picture_and_the_list(self, monkeypatch):
        shown = []
        monkeypatch.setattr("IPython.display.display", lambda *objects: shown.extend(objects))
        lk.where_to_start()._ipython_display_()
        assert [type(one).__name__ for one in shown] == ["Image", "Markdown"]


class TestJudging:
    def test_the_checklist_helps_each_part_in_its_place(self, runs_of):
        runs = [runs_of("02 decoders, imagenet", turbojpeg=3, torchvision=1.2).replace({"base": "pil"})]
        table = lk.where_to_start(runs=runs).judge(checklist(runs=runs))
        first = {part.name: min([place for place, step in enumerate(_STEPS, 1)
                                 if step.name in {one.step for one in part.choices}], default=None)
                 for part in PARTS[:-1]}  # fmt: skip
        assert {name: None if pd.isna(place) else place for name, place in table["place"].items()} == first
        assert table.loc["decode", ["first_step", "best_call"]].tolist() == ["read_image", "lk.ImageDataset"]
        assert table.loc["decode", ["measured", "best_gain"]].tolist() == pytest.approx([1.2, 3], rel=0.02)
        assert f"step {first['read']} for read" in table.attrs["sentence"]

    def test_an_order_without_steps_of_a_part(self):
        steps = pd.DataFrame({"step": ["workers"], "place": [1], "measured": [np.nan]})
        table = lk.where_to_start().judge(steps)
        assert table["place"].count() == 1
        assert "No step is for a training which waits for read, augment" in table.attrs["sentence"]


class TestPicture:
    @pytest.fixture(params=["measured", "not measured"])
    def figure(self, request, runs_of):
        frames = [] if request.param != "measured" else [
            runs_of(gain.experiment.replace("*", "1000"), **{gain.variant.replace("*", "1000"): 123.4})
            .replace({"base": gain.baseline.replace("*", "1000")}).assign(scale="ci", device="cuda") for gain in gains()
        ]  # fmt: skip
        figure = lk.where_to_start(runs=frames).figure()
        FigureCanvasAgg(figure).draw()
        return figure

    def test_every_text_lies_in_one_box_and_none_overlaps(self, figure):
        ax = figure.axes[0]
        boxes = [box.get_window_extent() for box in ax.patches if isinstance(box, FancyBboxPatch)]
        texts = [text.get_window_extent() for text in ax.texts]
        assert len(boxes) == len(CHOICES) + len(PARTS) + 1 + 2
        assert not [1 for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
        assert not [1 for one, other in itertools.combinations(texts, 2) if one.overlaps(other)]
        for text, extent in zip(ax.texts, texts, strict=True):
            inside = [box for box in boxes if box.x0 <= extent.x0 and extent.x1 <= box.x1
                      and box.y0 <= extent.y0 and extent.y1 <= box.y1]  # fmt: skip
            assert len(inside) == 1, text.get_text()

    def test_it_can_be_read_at_600_pixels(self, figure):
        pixels_a_point = 600 / (figure.get_figwidth() * 72)
        assert min(text.get_size() for text in figure.axes[0].texts) * pixels_a_point >= 10

    def test_the_background_is_opaque(self, figure):
        assert figure.get_facecolor() == (1, 1, 1, 1)
