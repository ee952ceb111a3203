"""Exercises of notebooks 12, 13 and 14: the folded answers are right, and each classic mistake is told by name."""

import math
import re

import nbformat
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, io
from torchvision.transforms import v2

from labkit import course
from tests.paths import REPO


def folded(number):
    """The function in an exercise's folded answer, made with its notebook's imports and skeleton."""
    (path,) = (REPO / "notebooks").glob(f"{number[:2]}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    (at,) = [at for at, cell in enumerate(cells) if f"**{number}**" in cell.source]
    task = cells[at].source
    skeleton = next(cell.source for cell in cells[at:] if "course.check(" in cell.source)
    code = re.search(r"```python\n(.*?)\n```", task.partition("**" + number)[2], re.DOTALL)[1]
    space: dict = {}
    exec(next(cell.source for cell in cells if cell.cell_type == "code"), space)  # noqa: S102 - our own notebooks
    exec(f"{skeleton}\n{code}", space)  # noqa: S102 - the answer may use what the skeleton gives
    return space[re.findall(r"^def (\w+)", code, re.MULTILINE)[-1]]


@pytest.mark.parametrize(
    ("number", "judge"), [("12.1", "mended_loader"), ("13.1", "peer_adapter"), ("14.1", "training_plan")]
)
def test_the_folded_answer_is_right_and_none_says_nothing(said, number, judge):
    assert said(folded(number), getattr(course, judge)) == "right\n"
    assert said(lambda *_: ..., getattr(course, judge)) == ""


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
        (planted, "the slow line is still there: `read_labels` was called 24 times for 24 photos"),
        (cached_by_process, "`read_labels` was called 2 times in worker processes: .* the first epoch still pays"),
        (Loop, "the work only moved into the training loop: .* called `read_labels` 6 more times"),
        (by_order, "the result changed: 12 of 12 photos have the label of another"),
        (short, "the result changed: an epoch has 11 photos, not each of 12 once"),
        (read_in_advance, "photos are read before the loop asks for them"),
        (read_twice, "`read_labels` was called 2 times; once is enough"),
        (lambda names, photo, labels: loaded(names, photo, labels().__getitem__, num_workers=0,
                                             multiprocessing_context=None), "it has to read photos in worker"),
        (lambda names, photo, labels: Labeled(names, photo, labels), "it has to return a loader, not a Labeled"),
        (lambda names, photo, labels: DataLoader(range(4)), "it has to give pairs of photos and labels"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_slow_line_is_mended_once_and_for_all_workers(said, answer, told):
    assert re.fullmatch(f"not yet: {told}.*\n", said(answer, course.mended_loader))


def adapter(*, drop_last=False, shuffle=True, label=int, transform=None):
    def epoch(work):
        crop = transform or v2.RandomResizedCrop(work.size, antialias=True)
        flipped = v2.Compose([crop, v2.RandomHorizontalFlip()])
        read = lambda path: io.decode_image(path, io.ImageReadMode.RGB)  # noqa: E731
        photos = datasets.ImageFolder(work.root, flipped, loader=read, target_transform=label)
        return DataLoader(photos, work.batch_size, shuffle, drop_last=drop_last)

    return epoch


SQUARE = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (adapter(drop_last=True), "the batches lack images: 64 of 70 came"),
        (adapter(label=lambda _: 0), "labels were lost: classes have {0: 70} images, not {0: 24, 1: 23, 2: 23}"),
        (adapter(label=lambda label: -label % 3), "labels were lost: "),
        (adapter(transform=SQUARE), "other pixels: the area of crops hardly varies"),
        (adapter(transform=v2.Compose([v2.RandomResizedCrop(224), v2.Grayscale(3)])), "other pixels: "),
        (adapter(shuffle=False), "images come in the order of their names: nothing is shuffled"),
        (lambda work: [torch.zeros(2)], "it has to give pairs of images and labels"),
    ],
    ids=["drop_last", "no labels", "swapped labels", "one crop", "gray", "in order", "no pairs"],
)
def test_an_adapter_gives_all_images_their_pixels_and_their_labels(said, answer, told):
    assert said(answer, course.peer_adapter).startswith(f"not yet: {told}")


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
        (changed(1, 1 / 8), r"these are bytes, not bits: 0\.2875 GB/s for 2500 images/s"),
        (changed(1, 1, rounded=float), r"cores are not rounded up: .* 6\.50 are needed, not 6\.5"),
        (changed(1, 1, rounded=math.floor), r"cores are not rounded up: .* 6\.50 are needed, not 6"),
        (changed(1000, 1), "the latency in ms was taken as seconds: 75000 requests"),
        (changed(1, 1, rounded=lambda cores: math.ceil(cores) - 1 + 3), ".* 7 cores are needed, not 9"),
        (changed(2, 1), ".* 75 are in flight, not 150"),
        (changed(1, 2), r".* 2\.3 Gbit/s are needed, not 4\.6"),
        (lambda *_: 7, "it has to return cores, requests and Gbit/s"),
    ],
)
def test_a_plan_rounds_cores_up_and_keeps_units(said, answer, told):
    assert re.match(f"not yet: {told}", said(answer, course.training_plan))


def test_a_plan_may_round_requests_up_or_not(said):
    assert said(changed(1, 1), course.training_plan) == "right\n"
    rounded = lambda *measured: tuple(map(math.ceil, plan(*measured)[:2])) + plan(*measured)[2:]  # noqa: E731
    assert said(rounded, course.training_plan) == "right\n"
