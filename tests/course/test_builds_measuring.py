"""What 00 and 01 let a reader build: classic mistakes are told by name."""

import time
from collections import defaultdict

import pytest
import torch
from torch.utils.data import get_worker_info

from labkit import course


def share(*, start_counts=False, end_counts=False, by_steps=False, restart=False, n=None):
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
        end_s = waits_s.pop()
        waits_s.append((end_s if end_counts else 0) + (first_s if start_counts else 0))
        return sum(waits_s) / (sum(steps_s) + (0 if by_steps else sum(waits_s)))

    return wait_share


WRONG_SHARES = {
    "start": (share(start_counts=True), "the start is in it"),
    "end": (share(end_counts=True), "the request after the last batch counts as waiting"),
    "by the steps": (share(by_steps=True), "the wait is divided by the steps alone"),
    "begun anew": (share(restart=True), "it begins the loader anew for each batch"),
    "one batch": (share(n=1), "it trained on 1 of 4 batches"),
    "no clock": (
        lambda loader, step: [step(*batch) for batch in loader] and 0.6,
        "it does not read `time.perf_counter`",
    ),
    "a guess": (lambda loader, step: share()(loader, step) * 0 + 0.6, "gave 0.6; 0.33 is right"),
    "no number": (lambda loader, step: [share()(loader, step)], "gave [0.3"),
}


class TestWaitShare:
    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_a_number_of_torch_is_right_too(self, said, kind):
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
