"""What learners build around a device: each classic mistake is named."""

import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from labkit import course


class TestCopiesAhead:
    @pytest.mark.parametrize("way", ["keeps", "waits for the consumer"])
    def test_other_ways_to_keep_the_memory_are_right(self, capsys, way):
        course.check(prefetched(mistake=way), course.copies_ahead)
        assert capsys.readouterr().out == "right\n"

    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            ("no record_stream", "given to the next copy (`record_stream`)"),
            ("no wait_stream", "does not wait for its copy (`wait_stream`)"),
            ("waits too late", "nothing overlaps"),
            ("one stream", "nothing overlaps"),
            ("blocking", "nothing overlaps"),
            ("last one left", "11 batches came, and 12 were loaded"),
            ("all at once", "12 batches were loaded before the first step"),
            ("host", "not on the device"),
            ("outer ones copied", "tensors in a dict within the batch are not on the device"),
            ("outer ones recorded", "given to the next copy (`record_stream`)"),
            ("names of the next", "strings came with another batch's tensors"),
        ],
    )
    def test_a_mistake_is_named(self, capsys, mistake, said):
        course.check(prefetched(mistake), course.copies_ahead)
        assert said in capsys.readouterr().out

    def test_no_copy_ahead_does_not_overlap_where_the_loss_is_read(self, capsys):
        def not_ahead(loader):
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            for batch in loader:
                with torch.cuda.stream(side):
                    copied = each(batch, lambda tensor: tensor.to("cuda", non_blocking=True))
                here.wait_stream(side)
                each(copied, lambda tensor: tensor.record_stream(here))
                yield copied
                del copied

        course.check(not_ahead, course.copies_ahead)
        assert "a step takes 7.0 ms, its computing 5 and its copy 2: nothing overlaps" in capsys.readouterr().out


def each(part, do):
    """What `do` makes of each tensor of a batch."""
    if isinstance(part, dict):
        return {key: each(value, do) for key, value in part.items()}
    return do(part) if isinstance(part, torch.Tensor) else part


def prefetched(mistake=""):
    def run(loader):
        here, side, ahead, kept, names = torch.cuda.current_stream(), torch.cuda.Stream(), {}, [], []
        if mistake == "all at once":
            loader = list(loader)
        for batch in loader if mistake == "last one left" else chain(loader, [{}]):
            if mistake not in ("no wait_stream", "waits too late"):
                here.wait_stream(side)
            if mistake not in ("no record_stream", "keeps", "waits for the consumer", "host"):
                of_outer = {key: value for key, value in ahead.items() if isinstance(value, torch.Tensor)}
                each(of_outer if "outer" in mistake else ahead, lambda tensor: tensor.record_stream(here))
            if mistake == "waits for the consumer":
                side.wait_stream(here)
            with torch.cuda.stream(here if mistake == "one stream" else side):
                place = partial(torch.Tensor.to, device="cpu" if mistake == "host" else "cuda")
                copied = each(batch, partial(place, non_blocking=mistake != "blocking"))
                if batch and mistake == "outer ones copied":
                    copied |= {"target": batch["target"]}
                if batch and mistake == "names of the next":
                    copied["name"], names[:] = (names or ["0.jpg"])[0], [copied["name"]]
            if mistake == "waits too late":
                here.wait_stream(side)
            ready, ahead = ahead, copied
            if mistake == "keeps":
                kept.append(ready)
            if ready:
                yield ready
            del copied

    return run


class TestMixesWithoutWaiting:
    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            ("item", "the host reads 1 value(s) back"),
            ("distribution", "`validate_args=False` for torch.distributions"),
            ("randn", "not from 0 to 1 as torch.rand's"),
            ("numpy", "the host waits for a copy"),
            ("randperm", "the host waits for a copy"),
            ("one share", "all images have the same share"),
            ("no partner", "mixed with themselves"),
            ("hard labels", "targets of shape (16,), not (16, 16)"),
            ("partner's labels", "the labels' shares are not those of the pixels"),
            ("in place", "overwrites the batch"),
            ("seeded", "a second call mixes the same"),
            ("sum", "do not add up to 1"),
            ("images only", "images of shape"),
        ],
    )
    def test_a_mistake_is_named(self, capsys, mistake, said):
        course.check(mixup(mistake), course.mixes_without_waiting)
        assert said in capsys.readouterr().out

    @pytest.mark.parametrize("way", ["pinned", "unchecked distribution"])
    def test_other_draws_are_right(self, capsys, way):
        course.check(mixup(way), course.mixes_without_waiting)
        assert capsys.readouterr().out == "right\n"


def mixup(mistake):
    def run(x, y, num_classes):
        n, device = len(x), x.device
        if mistake == "seeded":
            torch.cuda.manual_seed(0)
        share = torch.rand(n, device=device)
        partner = torch.rand(n, device=device).argsort()
        if mistake == "randn":
            share = torch.randn(n, device=device)
        if mistake == "item":
            share = torch.full_like(share, share[0].item())
        if mistake == "one share":
            share = share[:1].expand(n)
        if "distribution" in mistake:
            one = torch.ones(n, device=device)
            checks = False if mistake == "unchecked distribution" else None
            share = torch.distributions.Beta(one, one, validate_args=checks).sample()
        if mistake == "numpy":
            share = torch.from_numpy(np.random.default_rng().beta(1, 1, n).astype(np.float32)).to(device)
        if mistake == "pinned":
            share = torch.rand(n).pin_memory().to(device, non_blocking=True)
        if mistake == "randperm":
            partner = torch.randperm(n)
        if mistake == "no partner":
            partner = torch.arange(n, device=device)
        one_hot = torch.eye(num_classes, device=device)[y]
        by_image = share[:, None, None, None]
        images = x[partner] * (1 - by_image) + x * (1 if mistake == "sum" else by_image)
        targets = torch.lerp(one_hot[partner], one_hot, share[:, None])
        if mistake == "in place":
            x.copy_(images)
        if mistake == "hard labels":
            targets = y
        if mistake == "partner's labels":
            targets = torch.lerp(one_hot, one_hot[partner], share[:, None])
        return images[:, :1] if mistake == "images only" else images, targets

    return run


class TestDrawsAnew:
    @pytest.mark.parametrize(
        ("mistake", "said"),
        [
            ("global", "workers draw the same from `random.Random`"),
            ("worker", "draws from `random.Random` what the first one drew"),
            ("numbered", "two pipelines draw the same"),
            ("same seed", "a pixel comes to 2 of 4 corners"),
            ("time", "the same seed of torch gives other draws"),
        ],
    )
    def test_a_mistake_is_named(self, capsys, mistake, said):
        course.check(start(mistake), course.draws_anew)
        assert said in capsys.readouterr().out


def start(mistake):
    def run(worker):
        seed, given = torch.initial_seed() % 2**32, get_worker_info().dataset
        if mistake == "worker":
            seed = worker
        if mistake == "time":
            seed = None
        for number, dataset in enumerate(given.datasets):
            dataset = getattr(dataset, "dataset", dataset)
            own = seed if mistake == "time" else seed + number * (1 if mistake == "numbered" else 1000)
            if mistake == "global":
                np.random.seed(own), random.seed(own)
            elif mistake == "same seed":
                dataset.compose.set_random_seed(own)
            else:
                dataset.compose.set_random_state(np.random.default_rng(own), random.Random(own))

    return run
