"""What single lessons show: predictions, feeding a step, the ladder, and counted readbacks."""

import hashlib
import math
import re
import threading
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from PIL import Image

import labkit as lk
from labkit import course
from labkit.course import Feeding, ladder
from labkit.course.feeding import WAYS, step_seconds
from labkit.measure.compare import count_images
from labkit.measure.frames import save_frame
from labkit.measure.recorder import guesses
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

    @pytest.mark.parametrize("speedup", [0, -1, float("nan"), float("inf"), "fast"])
    def test_a_prediction_must_be_a_ratio_and_leaves_the_earlier_one(self, speedup):
        course.predict("a", 2)
        with pytest.raises(ValueError, match=f"speedup must be a number.*{speedup}"):
            course.predict("a", speedup)
        assert guesses["a"].speedup == 2


SLOW_COPY = Feeding(step_s=20e-3, load_s=10e-3, num_workers=4, batch_bytes=100_000_000, pcie_bytes_per_s=10e9,
                    staging_bytes_per_s=5e9)  # fmt: skip
BALANCED = Feeding(step_s=46.8e-3, load_s=51.5e-3, num_workers=1)  # loading takes a little longer than the step
RANGES = {
    "step_s": (1e-3, 0.2), "load_s": (1e-3, 0.5), "batch_bytes": (1e6, 4e8), "pcie_bytes_per_s": (1e9, 64e9),
}  # fmt: skip
LOOPS = st.builds(
    lambda num_workers, batch_bytes, **rates: Feeding(num_workers=num_workers, batch_bytes=round(batch_bytes), **rates),
    num_workers=st.integers(0, 16),
    **{name: st.floats(math.log(low), math.log(high)).map(math.exp) for name, (low, high) in RANGES.items()},
)


class TestFeeding:
    def test_what_each_way_takes(self):
        """Reckoned by hand: 20 ms to compute, 10 ms to copy, 20 ms to stage."""
        times = course.feeding_times(SLOW_COPY)
        ms = times.ms_per_step
        assert ms["pageable"] == pytest.approx(20 + 20, rel=0.01)  # staged, and copied meanwhile
        assert ms["pinned"] == ms["pinned, non_blocking"] == pytest.approx(20 + 10, rel=0.01)
        assert ms["prefetched"] == pytest.approx(20, rel=0.01)
        assert times.over_longest["prefetched"] < 1.05
        assert times.simulated.all()

    @given(LOOPS)
    @example(replace(SLOW_COPY, load_s=500e-3, num_workers=8))
    @example(replace(SLOW_COPY, load_s=500e-3, num_workers=16))
    @example(BALANCED)
    @settings(max_examples=10, deadline=None)
    def test_no_way_is_faster_than_the_longest_part_and_prefetched_is_as_fast(self, loop):
        """Copies, steps and each worker's loading are one after another."""
        over = course.feeding_times(loop).over_longest
        assert over.min() > 1 - 1e-5
        assert over["prefetched"] < 1.02  # kernels of a millisecond: launching them counts

    @pytest.mark.parametrize(
        ("load_s", "batch_bytes", "step_s"), [(0.2, 1e6, 2e-3), (1e-3, 4e8, 2e-3), (0.03, 1e6, 0.05)]
    )
    def test_prefetched_costs_as_much_as_its_longest_part(self, load_s, batch_bytes, step_s):
        loop = replace(SLOW_COPY, load_s=load_s, batch_bytes=round(batch_bytes), step_s=step_s)
        seconds = step_seconds(course.simulate_feeding("prefetched", loop, n_steps=16))
        assert seconds == pytest.approx(max(loop.parts_s.values()), rel=0.05)

    def test_without_workers_the_loop_loads(self):
        loop = replace(SLOW_COPY, num_workers=0)
        seconds = step_seconds(course.simulate_feeding("pinned", loop))
        assert seconds == pytest.approx(30e-3, rel=0.01)  # loading beside computing, then copying
        assert loop.parts_s["load"] == loop.load_s

    def test_the_timeline_says_that_it_is_simulated(self):
        frame = course.simulate_feeding("prefetched", replace(SLOW_COPY, load_s=60e-3))
        assert frame.simulated.all()
        assert {"host", "copy", "GPU", "worker 0"} <= set(frame.lane)
        assert course.plot_timeline(frame).get_title(loc="right") == "simulated"

    def test_published_rates_name_their_source(self):
        for one in course.PUBLISHED_TRAINING.values():
            assert one.source
            assert one.step_s(64) == 64 / one.images_per_s

    def test_loops_that_cannot_be(self):
        with pytest.raises(ValueError, match=r"way must be one of pageable, pinned, .*, got 'telepathy'"):
            course.simulate_feeding("telepathy", SLOW_COPY)
        with pytest.raises(ValueError, match="step_s must be a number > 0, got 0"):
            Feeding(step_s=0, load_s=1)
        with pytest.raises(ValueError, match="num_workers must be an integer >= 0, got -1"):
            Feeding(step_s=1, load_s=1, num_workers=-1)

    @pytest.mark.cuda
    def test_a_real_device_takes_as_long_as_the_simulated_one(self):
        """Given the real one's rates. Pageable copies are left out: how a driver stages them differs."""
        pinned = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory()
        stamps = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64).pin_memory()
        copy_s = seconds_of(lambda: pinned.to("cuda", non_blocking=True))
        step = lambda batch=None: torch.cuda._sleep(20_000_000)  # noqa: E731
        loop = Feeding(
            step_s=seconds_of(step), load_s=1e-6, num_workers=1, batch_bytes=pinned.nbytes,
            pcie_bytes_per_s=pinned.nbytes / copy_s,
        )  # fmt: skip
        for way, (is_pinned, copy) in WAYS.items():
            if is_pinned:
                spans = course.trace([(pinned, stamps)] * 18, step, n_batches=16, device="cuda", copy=copy)
                simulated_s = step_seconds(course.simulate_feeding(way, loop, n_steps=16))
                assert step_seconds(spans) == pytest.approx(simulated_s, rel=0.15), way


def seconds_of(work, n=20):
    """Of one call among many, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    torch.cuda.synchronize()
    start.record()
    for _ in range(n):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / n


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


class TestReadbacks:
    X = torch.arange(6.0)

    @pytest.mark.parametrize(
        ("ask", "count"),
        [
            (lambda x: x[0].item(), 1),
            (lambda x: int(x[1]), 1),
            (lambda x: x[x > 2], 1),
            (lambda x: bool((x > 2).any()), 1),
            (lambda x: torch.equal(x, x), 1),
            (lambda x: x.nonzero(), 1),
            (lambda x: [x[0].item(), bool(x[1] > 0), x[x > 2]], 3),
        ],
    )
    def test_asking_a_tensor_for_its_value_is_counted_each_time(self, ask, count):
        assert course.count_readbacks(ask, self.X)[1] == count

    def test_arithmetic_is_not(self):
        total, reads = course.count_readbacks(
            lambda x, y: torch.where(x > y, x[x.argsort()], y).sum(dtype=torch.float64), self.X, self.X.flip(0)
        )
        assert (float(total), total.dtype, reads) == (24.0, torch.float64, 0)
