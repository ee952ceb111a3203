"""What single lessons show: predictions, and the ladder."""

import re
import threading

import psutil
import pytest
import torch

import labkit as lk
from labkit import course
from labkit.course import ladder
from labkit.measure.compare import count_images
from labkit.measure.frames import load_frame
from labkit.measure.recorder import guesses
from labkit.util.machine import env_id
from tests.paths import REPO

STORED = REPO / "notebooks"
N_PHOTOS = 8


class TestPredictions:
    def test_a_prediction_is_kept_and_replaced(self):
        course.predict("a", 2, because="why not")
        assert "a: you expect 3x" in repr(course.predict("a", 3))
        assert guesses["a"].speedup == 3

    @pytest.mark.parametrize("speedup", [..., None])
    def test_an_open_prediction_prints_nothing_and_counts_as_none(self, capsys, speedup):
        assert course.predict("2 workers", speedup) is None
        assert guesses == {"2 workers": None}
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("speedup", [0, float("nan"), "fast"])
    def test_a_prediction_must_be_a_ratio_and_leaves_the_earlier_one(self, speedup):
        course.predict("a", 2)
        with pytest.raises(ValueError, match=f"speedup must be a number.*{speedup}"):
            course.predict("a", speedup)
        assert guesses["a"].speedup == 2

    def test_a_decimal_comma_is_refused(self):
        with pytest.raises(TypeError, match=r"1\.5, not 1,5"):
            course.predict("a", 1,5)  # fmt: skip
        assert "a" not in guesses

    def test_a_misspelt_label_is_named_once_where_the_variant_is_drawn(self, frame_of, recwarn):
        runs = frame_of({"none": [100, 101, 99], "2 workers": [200, 202, 199], "4 workers": [400, 401, 402]}, "none")
        course.predict("elsewhere", 2)
        course.predict("2 wrokers", 1.5)
        for _ in range(2):
            lk.plot_speedup(runs)
        [warning] = recwarn
        assert "you predicted '2 wrokers'" in str(warning.message)
        assert warning.filename == __file__


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

    @pytest.mark.exhaustive
    def test_every_rung_gives_each_photo_equally_often_and_leaves_nothing(self, sources):
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
                if not thread.name.startswith("labkit-batches") and thread.ident:  # idle, or about to start for one
                    thread.join(timeout=10)
                    assert not thread.is_alive(), (label, thread)
        assert kinds == [torch.float32] * 3 + [torch.uint8] * 4

    def test_the_photos_must_be_the_same(self, sources, first_photos):
        fewer = lk.FolderStore(first_photos(N_PHOTOS - 1))
        with pytest.raises(ValueError, match="8 raw pixels and 7 photos differ"):
            ladder.ladder_variants(fewer, sources[1], lk.scale())

    def test_measuring_takes_unequal_numbers_of_images_in_silence(self, recwarn):
        variants, n_threads = {"a": lambda: [4, 4], "b limit": lambda: [64]}, torch.get_num_threads()
        runs = ladder.measure_rungs(variants, experiment="x", factors={"photos": "p"})
        # Garbage of other tests may be collected here, and say so.
        assert [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning] == []
        assert set(runs.baseline) == {"a"}
        assert torch.get_num_threads() == n_threads
        assert set(runs.photos) == {"p"}

    def test_the_plot_has_rungs_in_rows_and_limits_as_lines(self, runs):
        ax = ladder.plot_rungs(runs)
        assert [label.get_text() for label in ax.get_yticklabels()] == ["naive", "quick"]
        assert [text.get_text() for text in ax.texts] == ["100", "400  4.0x", "decode limit 500"]
        drawn = sorted({float(x) for points in ax.collections for x, _ in points.get_offsets()})
        assert drawn == sorted({100.0, 101.0, 99.0, 400.0, 404.0, 396.0})
        assert [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [500]

    def test_ratios_are_those_of_the_printed_rates(self, frame_of):
        # Within a round it is 2, 0.5 and 2 times as fast, though both medians are 100.
        rates = {"naive": [100, 200, 50], "quick": [200, 100, 100]}
        runs = frame_of(rates, "naive", experiment=ladder.EXPERIMENT)
        assert ladder.summarize_rungs(runs).speedup.to_list() == [1.0, 1.0]
        assert ladder.summarize_rungs(runs, "quick").speedup.to_list() == [1.0, 1.0]
        assert "100  1.0x" in [text.get_text() for text in ladder.plot_rungs(runs).texts]
        assert "quick, 1.0 times" in ladder.tell_rungs(runs)

    def test_the_figure_says_which_machine_and_photos_it_shows(self, runs):
        title = " ".join(ladder.draw_figure(runs).axes[0].get_title("left").split())
        assert title.endswith(f" (small photos, {env_id()})")

    def test_the_readme_shows_the_stored_figure_of_the_stored_frame(self):
        notebook = (STORED / f"{ladder.NOTEBOOK}.ipynb").read_text().replace("\\", "")
        assert f'experiment="{ladder.EXPERIMENT}"' in notebook
        images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (REPO / "README.md").read_text())
        assert f"notebooks/{ladder.FIGURE}" in images
        assert all((REPO / image).is_file() for image in images)
        runs = load_frame(STORED / ladder.FRAME)
        assert ladder.is_ladder(runs)
        assert runs["variant"].iloc[0] == ladder.NAIVE
