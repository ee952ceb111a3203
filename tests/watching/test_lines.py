"""Which lines a training's time goes into: by planted lines in every part of it, of which the place is known."""

import importlib
import inspect
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import albumentations
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.transforms import v2

import labkit as lk
from labkit.watching import worker
from labkit.watching.findings import lines_table
from labkit.watching.lines import MAKING, STEP, Line, LineSampler, Stack, line_of, lines_of
from tests.watching.trained import optimizer, train

SAMPLED, TORCH = LineSampler(), torch.__file__


def calls_here(depth=0):
    """The calls that this one is in, the innermost first, without so many of them."""
    return [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(sys._getframe(1 + depth))]


def look(*ignored, **ignored_too):
    """A sample of one second, of whoever calls this."""
    SAMPLED.add(calls_here(1), 1.0, MAKING)
    return ignored[0] if ignored else ignored_too


class Looks:
    """A transform of the script's own."""

    def __call__(self, image):
        look()
        return image


class LooksLast(v2.Transform):
    def forward(self, image):
        look()
        return image


class LooksAtArrays(albumentations.ImageOnlyTransform):
    def apply(self, image, **ignored):
        look()
        return image


@pytest.fixture
def sampled():
    SAMPLED.seconds.clear()
    return lambda: lines_of(SAMPLED.seconds)


def line_with(text):
    """Number of the one line of this file that ends so."""
    [number] = [number for number, line in enumerate(open(__file__), 1) if line.rstrip().endswith(text)]  # noqa: SIM115
    return number


class TestALine:
    @pytest.mark.parametrize(
        ("compose", "image", "what"),
        [
            (lambda: transforms.Compose([transforms.ToTensor(), Looks()]), Image.new("RGB", (8, 8)), "Looks"),
            (lambda: v2.Compose([v2.ToImage(), LooksLast()]), Image.new("RGB", (8, 8)), "LooksLast"),
            (lambda: v2.Compose([v2.Compose([LooksLast()]), v2.ToImage()]), Image.new("RGB", (8, 8)), "LooksLast"),
        ],
    )  # fmt: skip
    def test_within_a_compose_has_its_transforms_name(self, sampled, compose, image, what):
        compose()(image)
        [(line, seconds)] = sampled().items()
        assert (line.what, line.path, seconds) == (what, __file__, 1.0)

    def test_within_albumentations_compose_has_its_transforms_name(self, sampled):
        albumentations.Compose([LooksAtArrays(p=1)])(image=np.zeros((8, 8, 3), np.uint8))
        assert {line.what for line in sampled()} == {"LooksAtArrays"}

    @pytest.mark.parametrize("kind", [transforms, v2])
    def test_of_a_librarys_transform_is_that_which_calls_the_compose(self, sampled, monkeypatch, kind):
        monkeypatch.setattr(Image.Image, "transpose", look_within_pillow())
        kind.Compose([kind.RandomHorizontalFlip(p=1)])(Image.new("RGB", (8, 8)))  # here
        [line] = sampled()
        assert (line.what, line.path, line.number) == ("RandomHorizontalFlip", __file__, line_with("# here"))

    def test_names_the_librarys_function_that_it_calls(self, sampled, monkeypatch):
        monkeypatch.setattr(json.decoder.JSONDecoder, "raw_decode", look_within_pillow(result=({}, 2)))
        json.loads("{}")  # the call
        [line] = sampled()
        assert (line.what, line.number) == ("loads", line_with("# the call"))

    def test_is_one_of_the_data_sets_library_where_the_script_has_none(self, sampled, monkeypatch):
        monkeypatch.setattr(transforms.functional, "to_pil_image", look_within_pillow(result=Image.new("RGB", (8, 8))))
        fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
        fetcher(FakeData(4, (3, 8, 8)), True, list, False).fetch([0, 1])
        [line] = sampled()
        assert (line.what, line.path) == ("inner", inspect.getfile(FakeData))

    def test_of_what_calls_the_making_alone_is_none(self, sampled):
        fetch = torch.utils.data._utils.fetch
        code = compile("look()", fetch.__file__, "exec")
        exec(code, {"look": look})  # noqa: S102
        assert [line.what for line in sampled()] == [""]
        table = lines_table({**sampled(), Line(MAKING, "a", "b.py", 1): 1.0})
        assert [(row["what"], row["share"]) for row in table] == [("a", 0.5)], "its time is a part of the making"

    @pytest.mark.parametrize("installed", [True, False])
    def test_is_no_line_of_a_package_that_pip_has_put_elsewhere(self, sampled, tmp_path, monkeypatch, installed):
        (tmp_path / "tool.py").write_text("def use(call):\n    call()\n")
        if installed:
            (tmp_path / "tool-1.0.dist-info").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module("tool").use(look)  # of the script
        sys.modules.pop("tool")
        [line] = sampled()
        own = Line(MAKING, "use", __file__, line_with("# of the script"))
        assert line == (own if installed else Line(MAKING, "use", str(tmp_path / "tool.py"), 2))


def of_library(code, **names):
    """A function `f` in a file of torch's, whose lines are none of the script's."""
    exec(compile(code, TORCH, "exec"), names)  # noqa: S102
    return names["f"]


# Holds a line up until the sampling thread has looked at it.
until_sampled = of_library(
    """
def until_sampled():
    sampler = worker.making.lines
    for _ in range(2):  # one look may have begun before
        seen = sampler.cpu_s
        while sampler.cpu_s == seen:
            sum(range(1000))
f = until_sampled
""",
    worker=worker,
)


def own_numbers(watched, part=STEP):
    """Of this file's lines that were seen in a part."""
    found = lines_of(watched.record.stacks())
    return {line.number for line in found if line.path == __file__ and line.part == part}


class TestALoop:
    @pytest.fixture
    def steps(self):
        return optimizer()[1]

    def test_of_a_trainer_has_the_trainers_lines_and_the_scripts_within_it(self, steps):
        def own_step(batch):
            steps.step()
            until_sampled()  # in the step

        loop = of_library("def f(loader, step):\n    for batch in loader:\n        call(step, batch)\n",
                          call=of_library("def f(step, batch):\n    step(batch)\n"))  # fmt: skip
        of_torch = of_library("def f(batch):\n    step()\n    look()\n", step=steps.step, look=until_sampled)
        for step, path, number in ((of_torch, TORCH, 3), (own_step, __file__, line_with("# in the step"))):
            with lk.watch() as watched:
                loop(DataLoader(TensorDataset(torch.zeros(8, 4)), 2), step)
                found = lines_of(watched.record.stacks())
            assert (path, number) in {(line.path, line.number) for line in found if line.part == STEP}
            assert "pytest" not in str(found), "nothing outside of the loop"

    def test_that_was_left_has_no_more_lines(self, steps):
        def train():
            for (batch,) in DataLoader(TensorDataset(torch.arange(8)), 2):
                steps.step()
                until_sampled()  # of a loop
                if batch[0] >= 4:
                    break
            until_sampled()  # such as of an evaluation after it

        with lk.watch() as watched:
            train()
            train()
            own = own_numbers(watched)
        assert line_with("# of a loop") in own
        assert line_with("# such as of an evaluation after it") not in own

    def test_has_all_its_steps_whatever_is_seen_between_it_and_the_loader(self, steps):
        """Such as a progress bar that is drawn."""

        def shown(loader):
            for batch in loader:
                yield batch
                until_sampled()  # the bar

        with lk.watch() as watched:
            for _ in shown(DataLoader(TensorDataset(torch.zeros(8, 4)), 2)):
                steps.step()
                until_sampled()  # the loop
            assert {line_with("# the loop"), line_with("# the bar")} <= own_numbers(watched)

    def test_over_a_loader_that_does_not_train_is_in_no_line(self, steps):
        data = TensorDataset(torch.zeros(8, 4))
        with lk.watch() as watched:
            for _ in DataLoader(data, 2):
                steps.step()
                until_sampled()  # trains
            for _ in DataLoader(data, 2):
                until_sampled()  # does not
            own = own_numbers(watched)
        assert line_with("# trains") in own
        assert line_with("# does not") not in own


def look_within_pillow(result=None):
    """`look` as a function of a library's file."""
    space = {"look": look, "result": result}
    exec(compile("def inner(first, *a, **k):\n    look()\n    return result or first", Image.__file__, "exec"), space)  # noqa: S102
    return space["inner"]


class TestAStack:
    def test_counts_for_the_scripts_innermost_line_by_what_that_calls(self):
        own, wrapper = ("train", __file__, 3), ("Optimizer.profile_hook_step.<locals>.wrapper", TORCH, 1)
        assert line_of(Stack(STEP, (own, wrapper, ("Adam.step", TORCH, 2)))) == Line(STEP, "step", __file__, 3)
        assert line_of(Stack(STEP, (own, wrapper))).what == "train"
        listed = own, ("train.<locals>.<listcomp>", __file__, 4)
        assert line_of(Stack(STEP, listed)) == Line(STEP, "train", __file__, 4)
        assert line_of(Stack(STEP, (("lightning", TORCH, 9), own, ("help", __file__, 4)))) == Line(
            STEP, "help", __file__, 4
        )

    def test_is_kept_within_bounds_and_its_line_is_right(self, sampled, monkeypatch):
        def deep(calls, number=0):
            if calls:
                return deep(calls - 1, number)
            space = {"look": look}
            code = f"def f{number}():\n    look()\ndef called():\n    f{number}()"
            exec(compile(code, TORCH, "exec"), space)  # noqa: S102
            return space["called"]()  # deep

        monkeypatch.setattr("labkit.watching.lines._MOST_STACKS", 3)
        for number in range(9):
            deep(100, number)
        assert len(SAMPLED.seconds) <= 3 + 1
        assert all(len(stack.calls) <= 48 for stack in SAMPLED.seconds)
        assert {(line.number, line.path) for line in sampled()} == {(line_with("# deep"), __file__)}
        assert sum(sampled().values()) == 9


def collate_until_sampled(samples):
    until_sampled()  # collate
    return torch.stack([sample for (sample,) in samples])


class Photos(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        sum(range(10**5))  # worker
        return torch.zeros(4)


class TestASampler:
    def test_finds_slow_lines_of_collate_and_step_in_the_training_process(self):
        (_, steps), usual_s = optimizer(), sys.getswitchinterval()
        with lk.watch() as watched:
            for _ in DataLoader(TensorDataset(torch.zeros(20, 4)), 2, collate_fn=collate_until_sampled):
                steps.step()
                until_sampled()  # step
            assert line_with("# collate") in own_numbers(watched, MAKING)
            assert line_with("# step") in own_numbers(watched)
            assert sys.getswitchinterval() == usual_s
        assert not worker.making.lines.runs

    @pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.exhaustive)])
    def test_finds_those_of_workers_without_what_a_killed_one_left(self, start_method):
        with lk.watch() as watched:
            for _ in DataLoader(Photos(), 2, num_workers=1, multiprocessing_context=start_method):
                if line_with("# worker") in own_numbers(watched, MAKING):
                    break
            [written] = Path(watched.record.loaders[0].folder).glob("*.lines")
            with open(written, "a") as file:
                file.write('[["making a ba')
            assert line_with("# worker") in own_numbers(watched, MAKING)

    def test_counts_all_times_at_which_a_sample_was_due(self, monkeypatch):
        """A clock that a C call holds up for a second now and then."""
        clock, sampler = [0.0], LineSampler()

        def sleep(seconds):
            clock[0] += seconds + (1.0 if len(added) % 10 == 5 else 0.0)
            if len(added) >= 100:
                sampler.stop()

        added = []
        monkeypatch.setattr("time.sleep", sleep)
        monkeypatch.setattr("time.perf_counter", lambda: clock[0])
        sampler.add = lambda frame, seconds, *of: added.append(seconds)
        sampler._thread = os.getpid(), threading.current_thread()
        sampler.begin(STEP)
        sampler._run()
        assert sum(added) == pytest.approx(clock[0], abs=0.02)
        assert [number for number, seconds in enumerate(added) if seconds > 0.9] == list(range(5, 100, 10))

    def test_leaves_a_switch_interval_that_the_script_sets(self):
        sampler, usual_s = LineSampler(), sys.getswitchinterval()
        try:
            sampler.making(sys.setswitchinterval, 0.02)
            assert sys.getswitchinterval() == pytest.approx(0.02)
        finally:
            sys.setswitchinterval(usual_s)
        sampler.begin(STEP)
        sampler.making(lambda: None)
        assert sys.getswitchinterval() == pytest.approx(usual_s)

    def test_gives_it_back_whatever_other_threads_and_forks_do(self):
        sampler, usual_s = LineSampler(), sys.getswitchinterval()
        sampler.begin(STEP)
        other = threading.Thread(target=sampler.making, args=(sampler.begin, STEP))
        other.start()
        other.join()
        sampler.end()
        assert sys.getswitchinterval() == pytest.approx(usual_s)
        sampler.begin(STEP)
        with sampler._lock:  # as another thread may hold it, which a fork does not have
            sampler.forked()
        assert sys.getswitchinterval() == pytest.approx(usual_s)

    def test_keeps_it_short_while_a_thread_is_looked_at(self, request):
        sampler, usual_s, look = LineSampler(), sys.getswitchinterval(), lambda calls, seconds: None
        sampler.look_at(threading.get_ident(), look)
        assert sys.getswitchinterval() == pytest.approx(usual_s), "nothing is sampled"
        sampler.start()
        request.addfinalizer(sampler.stop)
        sampler.look_at(threading.get_ident(), look)
        shorter_s = sys.getswitchinterval()
        assert shorter_s < usual_s / 100
        sampler.making(lambda: None)
        assert sys.getswitchinterval() == pytest.approx(shorter_s)
        sampler.look_no_more(look)
        assert sys.getswitchinterval() == pytest.approx(usual_s)
        sampler.look_at(threading.get_ident(), look)
        sampler.forked()
        assert sys.getswitchinterval() == pytest.approx(usual_s)


def first_work(batch):
    time.sleep(0.005)


def second_work(batch):
    time.sleep(0.005)


def test_an_observer_within_another_has_the_lines_of_its_own_loaders_alone():
    def names(watched):
        return {name for stack in watched.record.stacks() for name, _, _ in stack.calls}

    with lk.watch() as outer:
        train(DataLoader(TensorDataset(torch.zeros(80, 4)), 2), first_work)
        with lk.watch() as inner:
            train(DataLoader(TensorDataset(torch.zeros(80, 4)), 2), second_work)
            of_inner = names(inner)
        of_outer = names(outer)
    assert {"first_work", "second_work"} & of_inner == {"second_work"}
    assert {"first_work", "second_work"} <= of_outer


def test_no_thread_samples_where_lines_are_not_wanted():
    with lk.watch(lines=False) as watched:
        train(DataLoader(TensorDataset(torch.zeros(80, 4)), 2, num_workers=1, multiprocessing_context="forkserver"))
        assert not worker.making.lines.runs
        assert not [each for each in threading.enumerate() if each.name == "labkit-lines"]
        assert not list(Path(watched.record.loaders[0].folder).glob("*.lines"))
    assert watched.report().to_dict()["lines"] == []
    with lk.watch():
        train(DataLoader(TensorDataset(torch.zeros(8, 4)), 2))
        assert worker.making.lines.runs


class TestTheReport:
    def test_tells_the_largest_lines_of_each_part(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        with lk.watch() as watched:
            train(DataLoader(TensorDataset(torch.zeros(80, 4)), 2))
            worker.making.lines.seconds.clear()
            key = watched.record.loaders[0].epochs[0].key
            for what, path, number, seconds in (
                ("ColorJitter", "/x/train.py", 41, 6.2), ("convert", str(tmp_path / "data.py"), 18, 2.1),
                ("open", "/x/train.py", 9, 0.9), ("crop", "/x/train.py", 11, 0.7), ("other", "/x/train.py", 12, 0.05),
            ):  # fmt: skip
                worker.making.lines.seconds[Stack(MAKING, ((what, path, number),), key)] = seconds
            worker.making.lines.seconds[Stack(STEP, (("backward", "/x/train.py", 50),), key)] = 0.1
        told = "Making a batch is 62% ColorJitter, /x/train.py:41; 21% convert, data.py:18; 9% open, /x/train.py:9; "
        report = watched.report()
        assert report.line_sentences == [f"{told}7% crop, /x/train.py:11."]
        assert told in " ".join(report.details)
        page = report.save_html(tmp_path / "page.html").read_text()
        assert told in page
        assert "<td>ColorJitter</td>" in page.partition("What making a batch is")[2]
        assert [row["what"] for row in report.to_dict()["lines"]] == ["ColorJitter", "convert", "open", "crop"]
        assert report.to_dict()["lines"][0]["share"] == pytest.approx(6.2 / 9.95)
