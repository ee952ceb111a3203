"""What 00 and 01 let a reader build: the stored notebooks' answers are right, and classic mistakes are told by name."""

import re
import time
from collections import defaultdict

import nbformat
import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from labkit import course
from tests.paths import REPO


def folded_answer(stem: str, number: str, **given):
    """The names that the folded answer of an exercise defines."""
    cells = nbformat.read(REPO / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    [task] = [
        cell.source for cell in cells if cell.source.startswith(f"**{number}**") or f"\n**{number}**" in cell.source
    ]
    answer = re.search(r"<summary>Answer</summary>.*?```python\n(.*?)\n```", task, re.DOTALL)
    assert answer, "no folded answer"
    names = {"time": time, **given}
    exec(answer[1], names)  # noqa: S102 - our own notebooks
    return names


def share(
    *, start_counts="no", end_counts="no", numerator="wait", denominator="all", skipped=None, restart=False, n=None
):
    """A training's share of waiting, with the mistakes that are asked for."""

    def wait_share(loader, step):
        begun = time.perf_counter()
        batches, waits_s, steps_s = iter(loader), [], []
        batch = next(batches)
        first_s = time.perf_counter() - begun
        while batch is not None:
            asked = time.perf_counter()
            step(*batch)
            done = time.perf_counter()
            steps_s.append(done - asked)
            batch = next(iter(loader)) if restart else next(batches, None) if len(steps_s) != n else None
            waits_s.append(time.perf_counter() - done)
        end_s, whole_s = waits_s.pop(), 0.0
        waits_s.append(
            (first_s if start_counts == "in the wait" else 0) + (end_s if end_counts == "in the wait" else 0)
        )
        whole_s = sum(waits_s) + sum(steps_s) - (0 if skipped is None else steps_s[skipped])
        whole_s += first_s if start_counts == "in the whole" else 0
        whole_s += end_s if end_counts == "in the whole" else 0
        parts_s = {"wait": sum(waits_s), "all": whole_s, "step": sum(steps_s)}
        return parts_s[numerator] / parts_s[denominator]

    return wait_share


WRONG_SHARES = {
    "start in the wait": (share(start_counts="in the wait"), "the start is in it"),
    "start in the whole": (share(start_counts="in the whole"), "the start is in the whole time"),
    "start and end": (share(start_counts="in the wait", end_counts="in the wait"), "the start is in it"),
    "end in the wait": (share(end_counts="in the wait"), "the request after the last batch counts as waiting"),
    "end in the whole": (share(end_counts="in the whole"), "the request after the last batch is in the whole time"),
    "no first step": (share(skipped=0), "the first step is left out of the whole time"),
    "no last step": (share(skipped=-1), "the last step is left out of the whole time"),
    "the step": (share(numerator="step"), "that is the share of the steps"),
    "by the steps": (share(denominator="step"), "the wait is divided by the steps alone"),
    "begun anew": (share(restart=True), "it begins the loader anew for each batch"),
    "one batch": (share(n=1), "it trained on 1 of 4 batches"),
    "start in both, no last step": (
        share(start_counts="in the wait", skipped=-1),
        "the start is in it: let the clock begin when the first batch has come; and the last step is left out",
    ),
    "end in the wait, by the steps": (
        share(end_counts="in the wait", denominator="step"),
        "counts as waiting: let the clock end with the last step; and the wait is divided by the steps alone",
    ),
    "no clock": (
        lambda loader, step: [step(*batch) for batch in loader] and 0.6,
        "it does not read `time.perf_counter`",
    ),
    "a guess": (lambda loader, step: share()(loader, step) * 0 + 0.6, "gave 0.6; 0.33 is right"),
    "no number": (lambda loader, step: [share()(loader, step)], "gave [0.3"),
}


class TestWaitShare:
    def test_the_folded_answer_is_right(self, said):
        answer = folded_answer("00_measure", "00.1")["wait_share"]
        assert said(answer, course.judge_wait_share) == "right\n"

    def test_other_ways_are_right_too(self, said):
        def by_a_for_loop(loader, step):
            waited_s, start, asked = 0.0, None, 0.0
            for images, labels in loader:
                came = time.perf_counter()
                start, waited_s = start or came, waited_s + (came - asked if start else 0)
                step(images, labels)
                asked = time.perf_counter()
            return waited_s / (asked - start)

        assert said(share(), course.judge_wait_share) == "right\n"
        assert said(by_a_for_loop, course.judge_wait_share) == "right\n"

    @pytest.mark.parametrize("kind", [torch.tensor, np.float32, np.array])
    def test_numbers_of_torch_and_numpy_are_right_too(self, said, kind):
        assert said(lambda loader, step: kind(share()(loader, step)), course.judge_wait_share) == "right\n"

    def test_nanoseconds_are_right_too(self, said):
        def in_nanoseconds(loader, step):
            waited_ns, start_ns, done_ns = 0, None, 0
            for batch in loader:
                came_ns = time.perf_counter_ns()
                start_ns, waited_ns = start_ns or came_ns, waited_ns + (came_ns - done_ns if start_ns else 0)
                step(*batch)
                done_ns = time.perf_counter_ns()
            return waited_ns / (done_ns - start_ns)

        assert said(in_nanoseconds, course.judge_wait_share) == "right\n"

    @pytest.mark.parametrize("mistake", WRONG_SHARES)
    def test_a_classic_mistake_is_told(self, said, mistake):
        answer, told = WRONG_SHARES[mistake]
        clock = time.perf_counter
        assert told in said(answer, course.judge_wait_share)
        assert time.perf_counter is clock

    def test_the_skeleton_says_nothing(self, said):
        assert said(lambda loader, step: ..., course.judge_wait_share) == ""


KEPT: dict[str, float] = defaultdict(float)  # one for all batches


def load(*, kept=False, gaps=False, collate_timed=True, returned=True, order=1, swapped=False):
    """A batch and the seconds of its stages, with the mistakes that are asked for."""

    def load_batch(keys, stages, collate):
        seconds = KEPT if kept else defaultdict(float)
        samples, before = [], time.perf_counter()
        for item in keys:
            for name, stage in stages.items():
                before = time.perf_counter() if gaps else before
                item = stage(item)
                now = time.perf_counter()
                seconds["read" if swapped and name == "decode" else name] += now - before
                before = now
            samples.append(item)
        before = time.perf_counter() if gaps else before
        batch = collate(samples[::order])
        if collate_timed:
            seconds["collate"] += time.perf_counter() - before
        if swapped:
            seconds["decode"] = 0.0
        return (batch, seconds) if returned else batch

    return load_batch


WRONG_LOADS = {
    "elsewhere": (load(returned=False), "stays empty in the training's process when workers load"),
    "empty": (lambda keys, stages, collate: (None, {}), "stays empty in the training's process when workers load"),
    "one for all": (load(kept=True), "make a new dictionary for each batch"),
    "gaps": (load(gaps=True), "time is lost between them"),
    "no collate": (load(collate_timed=False), "the stages are read, decode, transform, collate"),
    "another order": (load(order=-1), "the batch is '3 read decode transform, 2"),
    "a stage in another": (load(swapped=True), "read took 320 s of the check's clock; about 80 s is right"),
}


class TestLoadBatch:
    def test_the_folded_answer_is_right(self, said):
        answer = folded_answer("01_naive_pil", "01.1")["load_batch"]
        assert said(answer, course.judge_load_batch) == "right\n"

    @pytest.mark.parametrize("mistake", WRONG_LOADS)
    def test_a_classic_mistake_is_told(self, said, mistake):
        answer, told = WRONG_LOADS[mistake]
        KEPT.clear()
        assert told in said(answer, course.judge_load_batch)

    def test_it_is_tried_in_workers_too(self, said):
        """This dictionary grows in workers alone."""

        def load_batch(keys, stages, collate):
            batch, seconds = load(kept=True)(keys, stages, collate)
            found = dict(seconds)
            if get_worker_info() is None:
                KEPT.clear()
            return batch, found

        KEPT.clear()
        assert "make a new dictionary for each batch" in said(load_batch, course.judge_load_batch)

    def test_the_skeleton_says_nothing(self, said):
        assert said(lambda keys, stages, collate: ..., course.judge_load_batch) == ""
