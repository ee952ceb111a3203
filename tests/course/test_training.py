"""The stand-in behaves as a GPU, by a clock of its own; and `train.py`, the course's training, runs as a script."""

import re

import nbformat
import pytest
import torch

import labkit as lk
from labkit import course
from labkit.course import ladder, training
from labkit.course.training import StandInStep
from tests.forked import run_python
from tests.paths import REPO


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.slept = 100.0, 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + seconds


def step_of(clock, images_per_s=10):
    return StandInStep(images_per_s, clock=clock, sleep=clock.sleep)


class TestTheStandIn:
    def test_takes_two_batches_at_once_and_waits_for_the_first_with_the_third(self):
        clock = Clock()
        step = step_of(clock)
        for waited in (0, 0, 1, 2):
            step(torch.zeros(10, 3), None)
            assert clock.slept == pytest.approx(waited)
        step.wait()
        assert clock.now == pytest.approx(104)

    def test_lets_the_host_wait_where_it_asks_for_the_loss(self):
        clock = Clock()
        step = step_of(clock)
        losses = [step(torch.zeros(size, 3), None) for size in (10, 5)]
        losses[0].item()
        assert clock.now == pytest.approx(101)
        losses[1].item()
        assert clock.now == pytest.approx(101.5)
        losses[0].item()  # it is there
        assert clock.now == pytest.approx(101.5)

    def test_is_idle_while_no_batch_comes(self):
        clock = Clock()
        step = step_of(clock)
        step(torch.zeros(10, 3), None)
        clock.now += 5
        step(torch.zeros(10, 3), None).item()
        assert clock.now == pytest.approx(106)

    def test_trains_free_data_at_its_rate(self):
        clock = Clock()
        step = step_of(clock, images_per_s=2180)
        for _ in range(50):
            step(torch.zeros(64, 0), None)
        step.wait()
        assert 50 * 64 / (clock.now - 100) == pytest.approx(2180)

    def test_copies_a_batch_before_its_step_unless_that_was_done_ahead(self):
        images = [torch.zeros(10, 50), torch.zeros(10, 50)]  # 2,000 bytes: 2 s of copying, 1 s of step
        for ahead, seconds in ((False, 6), (True, 5)):
            clock = Clock()
            step = StandInStep(10, bus_bytes_per_s=1000, clock=clock, sleep=clock.sleep)
            batches = [(each, None) for each in images]
            for batch in course.copied_ahead(batches, step) if ahead else batches:
                step(*batch).item()
            assert clock.now == pytest.approx(100 + seconds)

    def test_copied_ahead_gives_all_batches_in_order_and_again(self):
        batches = [(torch.full((2, 3), number), number) for number in range(4)]
        loader = course.copied_ahead(batches, StandInStep())
        assert [[label for _, label in loader] for _ in range(2)] == [[0, 1, 2, 3]] * 2
        assert len(loader) == 4
        assert list(course.copied_ahead([], StandInStep())) == []

    def test_says_what_it_is(self):
        assert repr(StandInStep(2180)) == "a stand-in for a GPU that trains 2,180 images/s"

    @pytest.mark.parametrize("rate", [0, -1, "fast"])
    def test_refuses_what_is_no_rate(self, rate):
        with pytest.raises((ValueError, TypeError), match="images_per_s"):
            StandInStep(rate)


@pytest.mark.cuda
def test_with_cuda_a_resnet_trains_bytes_and_floats():
    step = course.make_step(10)
    images, labels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8), torch.arange(4)
    for batch in (images, images.float() / 255):
        assert torch.isfinite(step(batch, labels)).item()
    step.wait()
    assert repr(step).startswith("ResNet-50 on ")


RATES = {
    "PIL, loader alone": [120, 120], "PIL, training": [100, 110], "pixels, loader alone": [4000, 4200],
    "pixels, training": [400, 400], "batches in memory, training": [500, 500],
}  # fmt: skip


class TestTheTrainingNow:
    def test_its_ratios_and_shares_are_those_of_the_rates_that_stand_beside_them(self, frame_of):
        table = training.training_table(frame_of(RATES, "PIL, training"))
        assert table.index.to_list() == ["PIL", "pixels"]
        assert table[["alone", "training"]].to_numpy().tolist() == [[120, 105], [4100, 400]]
        assert table["speedup"].to_list() == pytest.approx([1, 400 / 105])
        assert table["waiting"].to_list() == pytest.approx([1 - 105 / 500, 1 - 400 / 500])
        assert table["ci_low"]["pixels"] < 400 / 105 < table["ci_high"]["pixels"]

    def test_no_training_waits_less_than_nothing(self, frame_of):
        rates = RATES | {"pixels, training": [501, 502]}
        assert training.training_table(frame_of(rates, "PIL, training"))["waiting"]["pixels"] == 0

    @pytest.mark.parametrize("thorough", [False, True])
    def test_it_shows_both_rates_and_waiting_and_says_what_the_step_is(self, thorough, monkeypatch):
        monkeypatch.setenv("LABKIT_THOROUGH", "1" if thorough else "")
        batches = [(torch.zeros(4, 3, 8, 8), torch.zeros(4))] * 3
        now = course.training_now({"one": batches, "other": batches}, experiment="x", step=StandInStep(4000))
        for shown in (repr(now), now._repr_html_()):
            for text in ("one", "other", "loader alone (images/s)", "training (images/s)", "waiting", "a stand-in for"):
                assert text in shown
            assert ("times as fast" in shown) == thorough
        assert now.frame["training"].le(4000 * 1.01).all()

    def test_it_needs_a_loader(self):
        with pytest.raises(ValueError, match="no loaders"):
            course.training_now({}, experiment="x")

    def test_torch_has_its_threads_again(self):
        before = torch.get_num_threads()
        batches = [(torch.zeros(4, 3, 8, 8), torch.zeros(4))]
        course.training_now({"one": batches}, experiment="x", step=StandInStep(1e6))
        assert torch.get_num_threads() == before


def test_train_py_runs_as_a_script_and_tells_rate_and_waiting(tmp_path):
    photos = lk.make_photos(tmp_path / "photos", 8, progress=False)
    done = run_python(str(REPO / "notebooks/train.py"), str(photos), "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("ResNet-50 on " if torch.cuda.is_available() else "a stand-in for a GPU")
    assert [re.sub(r"[\d,]+(?= images)|\d+(?=%)", "N", line) for line in said[1:]] == [
        f"epoch {epoch}: N images/s, N% of the time waiting for batches" for epoch in range(2)
    ]


@pytest.mark.parametrize("given", [["nowhere"], ["--data", "."], []])
def test_train_py_says_what_is_wrong_in_a_line(tmp_path, given):
    done = run_python(str(REPO / "notebooks/train.py"), *given, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search("nowhere|no folders train and val.*download.py|required", done.stderr.splitlines()[-1])


@pytest.mark.exhaustive
def test_the_accuracy_of_each_rungs_pixels_is_told_with_that_of_every_seed(tmp_path):
    for part, n_photos in (("train", 12), ("val", 10)):
        lk.make_photos(tmp_path / "data" / part, n_photos, progress=False)
    lines = list(course.accuracy_of_rungs(tmp_path / "data", 1, 2, batch_size=6, size=32))
    names = [ladder.NAIVE, ladder.THREADS, ladder.SMALL, ladder.PIXELS, ladder.QUICK]
    assert [line.partition(":")[0] for line in lines] == names
    for line in lines:
        mean, *each = map(float, re.findall(r"([\d.]+)%", line))
        assert mean == pytest.approx(sum(each) / 2, abs=0.06)
        assert len(each) == 2
        assert all(0 <= share <= 100 for share in each)


@pytest.mark.exhaustive
def test_a_model_that_has_seen_one_class_alone_is_right_about_that_class():
    step = training.ResNetStep(3, "cpu")
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    for _ in range(4):
        step(images, torch.full((6,), 2))
    assert step.accuracy([(images, torch.full((6,), 2))]) == 1
    assert step.accuracy([(images, torch.tensor([2, 2, 2, 0, 1, 1]))]) == 0.5


CHANGING = ["02_read_image", "03_persistent_workers", "04_tensor_transforms", "07_cuda_prefetch", "11_prepare_once"]


def changed(script: str, diff: str) -> str:
    """A script after a diff: each removed line is there once, and what is added takes its place."""
    lines, at = script.splitlines(), None
    for line in diff.splitlines():
        kind, text = line[:1], line[1:]
        if kind == "-":
            assert lines.count(text) == 1, f"{lines.count(text)} times in the script: {text}"
            at = lines.index(text)
            del lines[at]
        elif kind == "+":
            assert at is not None, f"nothing before it says where: {text}"
            lines.insert(at, text)
            at += 1
        elif text.strip():
            assert lines.count(text) == 1, text
            at = lines.index(text) + 1
    return "\n".join(lines) + "\n"


def test_the_chapters_change_train_py_one_after_the_other(tmp_path):
    """Each diff, of five lines at most, applies to what the one before left; the script then makes its batches."""
    photos = lk.make_photos(tmp_path / "photos", 6, progress=False)
    script = (REPO / "notebooks/train.py").read_text()
    for stem in CHANGING:
        cells = nbformat.read(REPO / f"notebooks/{stem}.ipynb", as_version=4).cells
        told = "\n".join(
            cell.source for cell in cells if cell.cell_type == "markdown" and "## The training now" in cell.source
        )
        [diff] = re.findall(r"```diff\n(.*?)```", told, re.DOTALL)
        assert sum(line.startswith("+") for line in diff.splitlines()) <= 5, stem
        script = changed(script, diff)
        names = {"__name__": "train"}
        exec(compile(script, stem, "exec"), names)  # noqa: S102 - our own
        images, labels = next(iter(names["make_loader"](str(photos), 3)))
        assert images.shape == (3, 3, 224, 224), stem
        assert images.dtype == (torch.float32 if stem[:2] in ("02", "03") else torch.uint8), stem
        assert len(labels) == 3, stem
        names["prefetched"] = lambda loader: loader
        images_per_s, waiting = names["train"](names["make_loader"](str(photos), 3), StandInStep())
        assert images_per_s > 0 < waiting < 1, stem


def test_train_py_is_short():
    assert len((REPO / "notebooks/train.py").read_text().splitlines()) <= 60
