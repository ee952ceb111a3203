"""What single lessons show: predictions, and the ladder."""

import re
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

import labkit as lk
from labkit import course
from labkit.course import ladder
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


def rates_of(**rungs):
    """Rates of a ladder's runs, from (those of the loader alone, those of the training) by rung."""
    rates = {}
    for name, (alone, training) in rungs.items():
        rates |= {f"{name}, loader alone": alone, f"{name}, training": training}
    return rates | {"batches in memory, training": [500, 500, 500], "decoding, limit": [700, 700, 700]}


class TestLadder:
    @pytest.fixture(scope="class")
    @classmethod
    def sources(cls, first_photos, tmp_path_factory):
        """Photos, the same as small JPEGs, and those as raw pixels."""
        folder = tmp_path_factory.mktemp("prepared")
        store = lk.FolderStore(first_photos(N_PHOTOS))
        lk.tile_jpegs(store, folder / "small", short_side=256, progress=False)
        pixels = lk.PixelStore.build(store, folder / "pixels", short_side=256, engine="threads", progress=False)
        return store, lk.FolderStore(folder / "small"), pixels

    @pytest.fixture
    def runs(self, frame_of):
        rates = rates_of(naive=([100, 101, 99], [90, 91, 89]), quick=([900, 910, 890], [450, 455, 445]))
        told = {"photos": "small photos", "step": "a GPU", "rung": False}
        return frame_of(rates, "naive, training", experiment=ladder.EXPERIMENT, **told)

    @pytest.mark.exhaustive
    def test_every_rung_gives_each_photo_equally_often_and_leaves_nothing(self, sources):
        processes, threads = set(psutil.Process().children()), set(threading.enumerate())
        kinds, kept = [], []  # somebody still holds the loaders
        for label, loader in ladder.ladder_loaders(*sources, lk.scale(), course.make_step()).items():
            kept.append(loader)
            batches = list(loader)
            kinds.append(batches[0][0].dtype)
            assert batches[0][0].shape[1:] == (3, 224, 224), label
            assert torch.cat([own for _, own in batches]).bincount().tolist() == [1] * N_PHOTOS, label
            assert set(psutil.Process().children()) <= processes, label
            for thread in set(threading.enumerate()) - threads:
                if not thread.name.startswith("labkit-batches") and thread.ident:  # idle, or about to start for one
                    thread.join(timeout=10)
                    assert not thread.is_alive(), (label, thread)
        assert kinds == [torch.float32] * 3 + [torch.uint8] * 6

    def test_the_ways_give_the_same_middles_but_for_what_they_leave_out(self, sources):
        found = ladder.same_crops(*sources)
        for way in (ladder.TENSORS, ladder.THREADS, ladder.PIXELS):
            assert found[way] < 0.1, way
        assert 0.1 < found[ladder.SMALL] < 5  # a second JPEG
        assert found[ladder.QUICK] < 5

    def test_a_way_that_gives_other_pixels_is_seen(self, sources, first_photos, tmp_path):
        store, small, _ = sources
        keys = list(store.keys())
        for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(store.read(other))
        swapped = lk.PixelStore.build(lk.FolderStore(tmp_path), tmp_path / "x.pixels", short_side=256, progress=False)
        assert ladder.same_crops(store, small, swapped)[ladder.PIXELS] > 20

    @pytest.mark.parametrize(("place", "what"), [(1, "small photos"), (2, "raw pixels")])
    def test_the_photos_must_be_the_same(self, sources, first_photos, place, what):
        others = [*sources]
        others[0] = lk.FolderStore(first_photos(N_PHOTOS - 1))
        others[3 - place] = others[0] if place == 2 else ladder_pixels(others[0])
        with pytest.raises(ValueError, match=f"8 {what} and 7 photos differ"):
            ladder.ladder_loaders(*others, lk.scale(), course.make_step())

    def test_all_are_timed_in_one_run_of_one_baseline(self, recwarn):
        batches, n_threads = [(torch.zeros(4, 3, 8, 8), torch.zeros(4))] * 2, torch.get_num_threads()
        runs = ladder.measure_rungs(
            {"a": batches, "b": batches * 2}, course.make_step(), experiment="x",
            limits={"b limit": lambda: [64]}, factors={"photos": "p"},
        )  # fmt: skip
        # Garbage of other tests may be collected here, and say so.
        assert [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning] == []
        names = [f"{name}, {what}" for name in "ab" for what in ("loader alone", "training")]
        assert set(runs.variant) == {*names, "batches in memory, training", "b limit"}
        assert runs.groupby("round").variant.nunique().eq(6).all()
        assert set(runs.baseline) == {"a, training"}
        assert set(runs.photos) == {"p"}
        assert set(runs.step) == {repr(course.make_step())}
        assert torch.get_num_threads() == n_threads

    def test_the_plot_has_both_rates_in_a_row_and_limits_as_lines(self, runs):
        ax = ladder.plot_rungs(runs)
        assert [label.get_text() for label in ax.get_yticklabels()] == ["naive", "quick"]
        texts = [text.get_text() for text in ax.texts]
        assert {"90  1.0x  82%", "450  5.0x  10%", "decoding 700", "step alone 500"} <= set(texts)
        drawn = {float(x) for points in ax.collections for x, _ in points.get_offsets()}
        assert drawn == {100.0, 101.0, 99.0, 90.0, 91.0, 89.0, 900.0, 910.0, 890.0, 450.0, 455.0, 445.0}
        assert sorted(line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--") == [500, 700]
        assert ax.get_title("left") == "The training becomes 5.0 times as fast, its loader 9 times"

    def test_a_rung_says_in_plot_and_table_what_it_does_without(self, frame_of):
        rates = rates_of(**{ladder.NAIVE: ([100, 101, 99],) * 2, ladder.PIXELS: ([900, 910, 890],) * 2})
        runs = frame_of(rates, f"{ladder.NAIVE}, training", experiment=ladder.EXPERIMENT, step="a GPU")
        assert ladder.ladder_table(runs)["without"].to_list() == ["", "decoding"]
        labels = [label.get_text() for label in ladder.plot_rungs(runs).get_yticklabels()]
        assert labels == [ladder.NAIVE, f"{ladder.PIXELS}\n(without decoding)"]
        assert set(ladder.LEAVES_OUT) < {ladder.BYTES, ladder.SMALL, ladder.PIXELS, ladder.QUICK, "x"}

    def test_ratios_are_those_of_the_printed_rates(self, frame_of):
        # Within a round it is 2, 0.5 and 2 times as fast, though both medians are 100.
        both = ([100, 200, 50],) * 2, ([200, 100, 100],) * 2
        runs = frame_of(
            rates_of(naive=both[0], quick=both[1]), "naive, training", experiment=ladder.EXPERIMENT, step="s"
        )
        row = ladder.ladder_table(runs).loc["quick"]
        assert row["training (images/s)"] == "100"
        assert row["training, times as fast"].startswith("1.0 [")
        assert ladder.alone_over(runs, "quick", "naive")["speedup"] == 1.0
        assert "100  1.0x  80%" in [text.get_text() for text in ladder.plot_rungs(runs).texts]
        assert "quick, 1.0 times" in ladder.tell_rungs(runs)

    def test_an_interval_holds_the_ratio_beside_it(self, frame_of):
        # In most rounds it is as fast; by the medians of the rates, it is not.
        rates = rates_of(naive=([100, 101, 99, 300, 301],) * 2, quick=([100, 101, 300, 301, 302],) * 2)
        runs = frame_of(rates, "naive, training", step="s")
        row = ladder.alone_over(runs, "quick", "naive")
        assert row["ci_low"] <= row["speedup"] <= row["ci_high"]

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
        assert runs["variant"].iloc[0] == f"{ladder.NAIVE}, loader alone"


def ladder_pixels(store):
    """The photos of a store as raw pixels, as far as the ladder asks before it loads any."""
    return SimpleNamespace(keys=list(store.keys()), __len__=lambda: len(list(store.keys())))
