"""Exercises of notebooks 12, 13 and 14: each classic mistake is told by name."""

import math
import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io
from torchvision.transforms import v2

from labkit import course


class Labeled(Dataset):
    """Photos with labels by `find(name)`."""

    def __init__(self, names, read_photo, find):
        self.names, self.read_photo, self.find = names, read_photo, find

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return self.read_photo(name), self.find(name)


def loaded(names, read_photo, find, **options):
    return DataLoader(
        Labeled(names, read_photo, find), 4, **({"num_workers": 2, "multiprocessing_context": "fork"} | options)
    )


def planted(names, read_photo, read_labels):
    return loaded(names, read_photo, lambda name: read_labels()[name])


def cached_by_process(names, read_photo, read_labels):
    kept: dict = {}

    def find(name):
        if not kept:
            kept.update(read_labels())
        return kept[name]

    return loaded(names, read_photo, find, persistent_workers=True)


class Loop:
    """A loader whose labels are added by the process that trains."""

    def __init__(self, names, read_photo, read_labels):
        self.names, self.read_labels = names, read_labels
        self.loader = loaded(names, read_photo, names.index)

    def __iter__(self):
        for images, numbers in self.loader:
            labels = self.read_labels()
            yield images, torch.tensor([labels[self.names[number]] for number in numbers])


def by_order(names, read_photo, read_labels):
    labels = dict(zip(names, read_labels().values(), strict=True))
    return loaded(names, read_photo, labels.__getitem__)


def short(names, read_photo, read_labels):
    return loaded(names[:-1], read_photo, read_labels().__getitem__)


def read_in_advance(names, read_photo, read_labels):
    photos = {name: read_photo(name) for name in names}
    return loaded(names, photos.__getitem__, read_labels().__getitem__)


def read_twice(names, read_photo, read_labels):
    read_labels()
    return loaded(names, read_photo, read_labels().__getitem__)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (planted, "`read_labels` was called 24 times in worker processes, for 24 photos"),
        (cached_by_process, "`read_labels` was called 2 times in worker processes"),
        (Loop, "the work only moved into the training loop: .* called `read_labels` 6 more times"),
        (by_order, "the result changed: 12 of 12 photos have the label of another"),
        (short, "the result changed: an epoch has 11 photos, not each of 12 once"),
        (read_in_advance, "photos are read before the loop asks for them"),
        (read_twice, "`read_labels` was called 2 times; once is enough"),
        (lambda names, photo, labels: loaded(names, photo, labels().__getitem__, num_workers=0,
                                             multiprocessing_context=None), "it has to read photos in worker"),
        (lambda names, photo, labels: DataLoader(range(4)), "it has to give pairs of photos and labels"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_slow_line_is_mended_once_and_for_all_workers(said, answer, told):
    assert re.fullmatch(f"not yet: {told}.*\n", said(answer, course.mended_loader))


def adapter(*, drop_last=False, label=int):
    def epoch(work):
        flipped = v2.Compose([v2.RandomResizedCrop(work.size, antialias=True), v2.RandomHorizontalFlip()])
        read = lambda path: io.decode_image(path, io.ImageReadMode.RGB)  # noqa: E731
        photos = datasets.ImageFolder(work.root, flipped, loader=read, target_transform=label)
        return DataLoader(photos, work.batch_size, shuffle=True, drop_last=drop_last)

    return epoch


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (adapter(drop_last=True), "6 of 70 images, the first .* never came in an epoch"),
        (adapter(label=lambda _: 0), "46 of 70 labels are not those of the image's folder"),
        (lambda work: [torch.zeros(2)], "gives Tensor, not a pair"),
    ],
    ids=["drop_last", "no labels", "no pairs"],
)
def test_an_adapter_gives_all_images_their_pixels_and_their_labels(said, answer, told):
    assert re.match(f"not yet: the loader's work: {told}", said(answer, course.peer_adapter))


def plan(images_per_s, core_ms, kb, request_ms):
    cores = images_per_s * core_ms / 1e3 + 1
    return cores, images_per_s * request_ms / 1e3, images_per_s * kb * 8 / 1e6


def changed(*factors, rounded=math.ceil):
    def answer(*measured):
        cores, in_flight, gbit_per_s = plan(*measured)
        return rounded(cores), in_flight * factors[0], gbit_per_s * factors[1]

    return answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (changed(1, 1 / 8), r".* 2\.3 Gbit/s are needed, not 0\.2875; a byte has 8 bits"),
        (changed(1, 1, rounded=float), r".* 6\.50 cores are needed, rounded up 7, not 6\.5"),
        (changed(1000, 1), ".* 75 requests are in flight, not 75000; latencies are in ms"),
        (changed(1, 1, rounded=lambda cores: math.ceil(cores) - 1 + 3), ".* rounded up 7, not 9"),
        (lambda *_: 7, "it has to return cores, requests and Gbit/s"),
    ],
)
def test_a_plan_rounds_cores_up_and_keeps_units(said, answer, told):
    assert re.match(f"not yet: {told}", said(answer, course.training_plan))


def test_a_plan_may_round_requests_up_or_not(said):
    assert said(changed(1, 1), course.training_plan) == "right\n"
    rounded = lambda *measured: tuple(map(math.ceil, plan(*measured)[:2])) + plan(*measured)[2:]  # noqa: E731
    assert said(rounded, course.training_plan) == "right\n"
