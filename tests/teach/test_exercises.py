"""The checks of the exercises: right answers pass, wrong ones fail, and nothing raises."""

import io
import random
import re
import struct
import tarfile

import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import labkit as lk
from labkit import course
from labkit.course.exercises import exercises
from labkit.data.sizes import parse_cache_name, sizes_from_caches
from labkit.planning.formulas import Estimate, LoaderCosts


def _size(data):
    return Image.open(io.BytesIO(data)).size


def _decoded_size(data):
    return Image.open(io.BytesIO(data)).convert("RGB").size


def _to_rgb(image):
    if image.dtype == torch.uint16:
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return image[:3] if image.shape[0] >= 3 else image[:1].expand(3, -1, -1)


def _low_byte(image):
    return _to_rgb((image.to(torch.int32) & 255).to(torch.uint8))


def _white(image):
    return torch.full((3, *image.shape[1:]), 255, dtype=torch.uint8)


def _global_draw(seed, epoch, index):
    torch.manual_seed(seed * 10**6 + epoch * 10**3 + index)
    return torch.rand(1).item()


def _flip_each(batch):
    chosen = torch.rand(len(batch), generator=torch.Generator().manual_seed(0)) < 0.5
    return torch.where(chosen[:, None, None, None], batch.flip(3), batch)


def _flip_in_place(batch):
    return batch.copy_(_flip_each(batch))


def _normalised(batch):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (batch / 255 - mean[:, None, None]) / std[:, None, None]


def _flip_by_chance(batch):
    return batch.flip(3) if torch.rand(()) < 0.5 else batch


def _flip_one_by_one(batch):
    return torch.where((torch.rand(len(batch)) < 0.5)[:, None, None, None], batch.flip(3), batch)


def _stages(*seconds, variant="mine"):
    names = [f"stage {number}" for number in range(len(seconds))]
    return pd.DataFrame({"variant": variant, "stage": names, "seconds": seconds})


def _own_files(*kinds):
    """Files in the forms of a reader's folder, by name."""
    return {kind: course.oracle_files()[kind] for kind in kinds}


def _to_tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _own_share(top, bottom, left, right, height, width):
    return 1 - (bottom - top) * (right - left) / (height * width)


def _brightened_one_by_one(batch):
    factors = torch.empty(len(batch)).uniform_(0.6, 1.4)
    return torch.stack([image * factor.item() for image, factor in zip(batch, factors, strict=True)])


class _Draws:
    """A data set whose samples are drawn by a function of its own generator."""

    def __init__(self, draw):
        self.generator, self.draw = random.Random(0), draw

    def __getitem__(self, index):
        return torch.tensor([self.draw(self.generator)]), index


GLOBAL, PRIVATE = _Draws(lambda generator: torch.rand(1).item()), _Draws(random.Random.random)
FEW, NONE = _Draws(lambda generator: torch.rand(1).item() < 0.5), _Draws(lambda generator: 0.5)


def _load(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork", **options})


def _load_here(dataset):
    return DataLoader(dataset, batch_size=8)


def _load_none(dataset):
    return _load(dataset, batch_size=100, drop_last=True)


def _mirrored_columns(width, new_width):
    return [width - 1 - int((column + 0.5) * width / new_width) for column in range(new_width)]


def _reversed_columns(width, new_width):
    return [int((column + 0.5) * width / new_width) for column in range(new_width)][::-1]


def _loader_costs(low, high, *, kind="measured here", data="photos"):
    cost = Estimate(1.0, low, high, source="a run", kind=kind)
    return LoaderCosts({data: {"cpu_ms_per_image": cost}})


def _sample_key(name):
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.split(".")[0]


def _part_of_shards(shards, rank, world_size, worker, num_workers):
    return shards[rank::world_size][worker::num_workers]


def _crop_of_memory(memory, start, shape, box):
    (height, width), (top, left, rows, columns) = shape, box
    return memory[start : start + height * width * 3].reshape(height, width, 3)[top : top + rows, left : left + columns]


def _png_size(data):
    is_png = len(data) >= 24 and data[:16] == b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    return struct.unpack(">II", data[16:24]) if is_png else None


def _lax_cache_name(name):
    """Anything with a size in it."""
    match = re.search(r"(.+)_(\d+)x(\d+)", name)
    return match and (match[1], int(match[2]), int(match[3]))


def _prefix_sizes(images, caches):
    """The merge's mistake: any cache that begins as the image does."""
    stems = {image: image.rpartition(".")[0] for image in images}
    found = {image: [name for name in sorted(caches) if name.startswith(stem)] for image, stem in stems.items()}
    return {image: parse_cache_name(names[0])[1:] for image, names in found.items() if names}


def _comparable(one, other):
    flags = {one[1], other[1]}
    return (one[0] == "raw pixels") == (other[0] == "raw pixels") and (len(flags) == 1 or None in flags)


def _verdict_on_a_ratio(low, high, claimed, up_to):
    lowest, highest = 1 + (claimed - 1) / 2, 1 + 2 * (up_to - 1)
    if low > highest:
        return "larger here"
    if high < lowest:
        return "smaller here" if low > 1 else "does not hold"
    return "holds" if lowest <= low and high <= highest else "inconclusive"


def _verdict_on_a_claim(outcomes):
    if set(outcomes) == {"holds"}:
        return "holds"
    if "holds" in outcomes:
        return "holds under a condition"
    order = ("does not hold", "larger here", "inconclusive", "needs a GPU", "not measured yet")
    return next(one for one in order if one in outcomes)


def _brightened(batch):
    return batch * torch.empty(len(batch), 1, 1, 1).uniform_(0.6, 1.4)


BATCH = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5) / 120
SIZES = pd.DataFrame({"path": list("abcdefgh"), "width": [600] * 4 + [400] * 4, "height": [400] * 4 + [600] * 4})


def _buckets(batch_size=4, *, sizes=SIZES, shapes=((600, 400), (400, 600)), **options):
    return lk.BucketBatchSampler(sizes, batch_size, buckets=lk.Buckets(shapes), rank=0, world_size=1, **options)


def _costs(low, value, high, kind="measured here"):
    return LoaderCosts({"photos": {"cpu_ms_per_image": Estimate(value, low, high, kind=kind)}})


OWN_SIZES = pd.DataFrame({"width": [1000, 768, 100, None], "height": [500, 1152, 200, None]}, dtype="Int64")
PHOTO = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)

WHOLE_NUMBERS = {
    "00.2": 128, "03.1": 10, "05.1": 250, "08b.1": 1000, "09.2": 20, "11.1": 4, "12.2": 6,
}  # fmt: skip
NUMBERS = {
    "00.1": 640, "01.1": 1.4286, "01.2": 2.5, "03.2": 4, "04.1": 28.9, "06.2": 0.75, "07.1": 75, "07.2": 40,
    "07.3": 4 / 3, "08.1": 0.667, "08b.3": 22, "09.1": 14.4, "09.3": 4 / 3.9, "10.1": 1692, "10.4": 10.07, "10b.1": 320,
    "11.2": 2.68, "11b.1": 335.5,
    "15.1": 3000, "11b.3": 83_333, "13.1": 6.4, "13.2": 1.19, "12.1": 2.5, "12.3": 0.8, "14.1": 1.18,
}  # fmt: skip

ANSWERS = {
    **{name: ([number], [number - 1, number + 1, "many"]) for name, number in WHOLE_NUMBERS.items()},
    **{name: ([number], [0.97 * number, 1.03 * number, "many"]) for name, number in NUMBERS.items()},
    "00.3": (["inconclusive"], ["faster", "slower", None]),
    "01.3": ([_size], [_decoded_size, lambda data: _size(data)[::-1], "function", lambda data: None]),
    "01.5": (
        [(_stages(1.0, 2.0), 3.1), [_stages(1.0, 2.0), 2.9], (_stages(0.5, 0.5, 0.09), 1.0)],
        [
            (_stages(1.0, 2.0), 4.0),
            (_stages(1.0, 2.0), 2.0),
            (_stages(3.0), 3.0),
            (_stages(1.0, 2.0, variant="naive"), 3.0),
            ({"stage": [1.0, 2.0]}, 3.0),
            (_stages(1.0, 2.0), 3.0, 3.0),
            _stages(1.0, 2.0),
        ],
    ),
    "02.1": ([_to_rgb], [_low_byte, _white, lambda image: image, lambda image: _to_rgb(image).flip(0), 3]),
    "02.2": ([{"cv2", "torchcodec"}, ["torchcodec", "cv2"]], [{"cv2"}, "torchcodec", {"cv2", "torchcodec", "pil"}]),
    "02.3": ([(375, 500), [375, 500]], [(500, 375), (256, 341), (188, 250), 375]),
    "02.5": (
        [
            (_own_files("subsampling 420.jpeg"), set(lk.DECODERS) - {"cv2", *course.missing_decoders()}),
            (_own_files("subsampling 420.jpeg", "exif 6.jpeg"), {"torchcodec"} - set(course.missing_decoders())),
            (_own_files("exif 6 as text.png"), set()),
        ],
        [
            (_own_files("subsampling 420.jpeg"), {"pil"}),
            (_own_files("subsampling 420.jpeg"), set(lk.DECODERS)),
            (_own_files("subsampling 420.jpeg", "exif 6.jpeg"), {"torchcodec", "torchvision"}),
            (_own_files("exif 6 as text.png"), "torchcodec"),
            (_own_files("exif 6 as text.png"), {"jpegli"}),
            ({"broken.png": course.broken_files()["bad chunk.png"]}, set()),
            ({}, set()),
            {"torchcodec"},
        ],
    ),
    "03.3": (
        [lambda *numbers: random.Random(str(numbers)).random()],
        [_global_draw, lambda *numbers: random.random(), lambda *numbers: 0.5, lambda seed, epoch, i: 0.01 * seed + i],
    ),
    "04.2": (
        [_flip_each],
        [_flip_in_place, lambda batch: batch, lambda batch: batch.flip(3), lambda batch: batch.flip(2), torch.sum],
    ),
    "04.3": (
        [_normalised],
        [lambda batch: batch / 255, lambda batch: batch, lambda batch: _normalised(batch * 1.0).double()],
    ),
    "04.5": (
        [(_flip_one_by_one, PHOTO), (lambda batch: _flip_one_by_one(batch) / 255, PHOTO)],
        [
            (_flip_by_chance, PHOTO),
            (lambda batch: batch.flip(3), PHOTO),
            (lambda batch: _flip_one_by_one(batch)[:8], PHOTO),
            (lambda batch: (batch, 0.3), PHOTO),
            (_flip_one_by_one, "photo"),
            _flip_one_by_one,
        ],
    ),
    "05.2": (
        [_to_tensor],
        [lambda pixels: _to_tensor(pixels).contiguous(), torch.from_numpy, lambda pixels: _to_tensor(pixels.copy())],
    ),
    "05.4": (
        [
            (GLOBAL, _load),
            (GLOBAL, lambda dataset: lk.make_loader(dataset, lk.LoaderConfig(8, 1, start_method="fork"))),
        ],
        [(PRIVATE, _load), (FEW, _load), (NONE, _load), (GLOBAL, _load_here), (GLOBAL, _load_none), GLOBAL, 3],
    ),
    "06.1": ([_own_share], [lambda *box: 1 - _own_share(*box), lambda *box: 0.5]),
    "06.3": (
        [_brightened],
        [_brightened_one_by_one, lambda batch: batch * 1.2, lambda batch: batch * torch.rand_like(batch), torch.sum],
    ),
    "06.5": (
        [(_brightened, BATCH), (_flip_each, BATCH), (_brightened_one_by_one, BATCH[:1])],
        [
            (lambda batch: batch * torch.rand(1), BATCH),
            (lambda batch: batch.mul_(torch.rand(len(batch), 1, 1, 1)), BATCH),
            (lambda batch: (batch, 0), BATCH),
            (torch.sum, BATCH),
            (_brightened, BATCH[0]),
            (_brightened, BATCH.numpy()),
            _brightened,
        ],
    ),
    "07.4": (["record_stream", "tensor.record_stream(stream)"], ["wait_stream", "clone"]),
    "08.2": ([_sample_key], [lambda name: name.split(".")[0], lambda name: name.rpartition(".")[0], str.upper]),
    "08b.2": (
        [
            _part_of_shards,
            lambda shards, rank, ranks, worker, workers: shards[worker * ranks + rank :: ranks * workers],
        ],
        [
            lambda shards, rank, ranks, worker, workers: shards[rank::ranks],
            lambda shards, rank, ranks, worker, workers: shards[rank + worker :: ranks * workers],
            lambda shards, rank, ranks, worker, workers: shards if rank == worker == 0 else [],
            len,
        ],
    ),
    "09.4": (
        [_mirrored_columns],
        [_reversed_columns, lambda *sides: _mirrored_columns(*sides)[::-1], lambda width, new_width: [0], 3],
    ),
    "10.2": ([parse_cache_name], [_lax_cache_name, lambda name: None, lambda name: ("cat", 768, 512), str.upper]),
    "10.3": (
        [lambda images, caches: {image: size for image, size in sizes_from_caches(images, caches).items() if size}],
        [_prefix_sizes, sizes_from_caches, lambda images, caches: {}, len],
    ),
    "10.5": (
        [
            (SIZES, _buckets()),
            (SIZES, _buckets(shapes=((576, 448), (448, 576)))),
            (SIZES, _buckets(2, remainder="drop")),
        ],
        [
            (SIZES, _buckets(shapes=((512, 512),))),
            (SIZES, _buckets(8)),
            (SIZES, _buckets(3, remainder="drop")),
            (SIZES, _buckets(sizes=SIZES.set_index(SIZES.index + 1))),
            (SIZES[:4], _buckets()),
            SIZES,
        ],
    ),
    "10b.2": (
        [_png_size],
        [
            lambda data: _png_size(data) and _png_size(data)[::-1],
            lambda data: _png_size(data[:16] + b"\0\0" + data[18:]) if _png_size(data) else None,
            lambda data: struct.unpack(">II", data[16:24]),
            lambda data: _png_size(data.ljust(24, b"\0")),
            lambda data: None,
            len,
        ],
    ),
    "11b.2": (
        [_crop_of_memory],
        [
            lambda *where: _crop_of_memory(*where).copy(),
            lambda memory, start, shape, box: _crop_of_memory(memory, 0, shape, box),
            lambda memory, start, shape, box: _crop_of_memory(memory, start, shape[::-1], box),
            lambda memory, start, shape, box: _crop_of_memory(memory, start, shape, (0, 0, *box[2:])),
            len,
        ],
    ),
    "11b.4": (
        [(OWN_SIZES, 3 * (256 * 512 + 256 * 384 + 100 * 200) / 1e9)],
        [
            (OWN_SIZES, (256 * 512 + 256 * 384 + 100 * 200) / 1e9),  # one channel
            (OWN_SIZES, 3 * (256 * 512 + 256 * 384 + 256 * 512) / 1e9),  # the small photo enlarged
            (OWN_SIZES, 3 * 3 * 256 * 256 / 1e9),
            (OWN_SIZES.iloc[3:], 0.0),
            (None, 1.0),
            3.0,
        ],
    ),
    "12.4": (
        [lambda step_s, loader_s, together_s: max(0.0, 1 - step_s / together_s)],
        [
            lambda step_s, loader_s, together_s: 1 - step_s / together_s,
            lambda step_s, loader_s, together_s: loader_s / together_s,
            lambda step_s, loader_s, together_s: max(0.0, (loader_s - step_s) / together_s),
            max,
        ],
    ),
    "13.3": (
        [_comparable],
        [
            lambda one, other: one == other,
            lambda one, other: one[1] == other[1],
            lambda one, other: _comparable(one, other) and None not in (one[1], other[1]),
            lambda one, other: _comparable(one, other) and one[0] == other[0],
        ],
    ),
    "14.2": (
        [_verdict_on_a_ratio],
        [
            lambda low, high, claimed, up_to: _verdict_on_a_ratio(low, high, claimed, claimed),
            lambda low, high, claimed, up_to: "holds" if low > 1 else "does not hold" if high < 1 else "inconclusive",
            lambda low, high, claimed, up_to: _verdict_on_a_ratio(max(low, 1.001), high, claimed, up_to),
            max,
        ],
    ),
    "14.3": (
        [_verdict_on_a_claim],
        [
            lambda outcomes: outcomes[0],
            lambda outcomes: "holds" if "holds" in outcomes else _verdict_on_a_claim(outcomes),
            lambda outcomes: "does not hold" if "does not hold" in outcomes else _verdict_on_a_claim(outcomes),
            len,
        ],
    ),
    "15.2": (
        [_loader_costs(0.9, 1.1)],
        [_loader_costs(0.6, 1.4), _loader_costs(0.9, 1.1, kind="entered"), _loader_costs(0.9, 1.1, data="pixels"), 1.0],
    ),
    "15.3": (
        [
            lk.plan(900, cores_per_node=8, cpu_ms_per_image=(0.8, 1.1)),
            lk.plan(900, vcpus_per_node=8, cpu_ms_per_image=1),
        ],
        [
            lk.plan(gpu="h100", cores_per_node=8, cpu_ms_per_image=1),
            lk.plan(900, gpu="h100", cpu_ms_per_image=1),
            lk.plan(900, cores_per_node=8, cpu_ms_per_image=Estimate(1, kind="published")),
            900,
        ],
    ),
}


# Exercises with a frame of two variants as their answer -> how many times as fast one must be, if that counts.
EXPERIMENTS = {
    "00.4": None, "01.4": 1.1, "03.4": 1.2, "04.4": None, "06.4": None, "07.5": 1.05, "08.3": 1.2, "08b.4": None,
    "09.5": 1.2, "10b.3": None, "11.3": 1.2,
}  # fmt: skip
BASE, FASTER = [100, 101, 99, 100, 100], [130, 131, 130, 129, 130]


@pytest.fixture
def judge(capsys):
    """What a check prints."""

    def judge(name, answer):
        course.check(name, answer)
        return capsys.readouterr().out

    return judge


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_pass_and_wrong_ones_fail(name, judge):
    right, wrong = ANSWERS[name]
    assert {judge(name, answer) for answer in right} == {f"{name}: right\n"}
    assert [answer for answer in wrong if "right\n" in judge(name, answer)] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_own_experiments_are_judged(name, frame_of, judge):
    assert judge(name, frame_of({"a": BASE, "b": FASTER}, "a")) == f"{name}: right\n"
    assert "inconclusive" in judge(name, frame_of({"a": BASE, "b": [101, 99, 100, 101, 99]}, "a"))
    if EXPERIMENTS[name]:
        for rates in ([103, 104, 102, 103, 103], [90, 91, 89, 90, 90]):
            needed = f"at least {EXPERIMENTS[name]}x is needed"
            assert needed in judge(name, frame_of({"a": BASE, "b": rates}, "a"))


STALL = {"a": BASE, "b": [150, 151, 150, 149, 150], "step alone": [160, 161, 160, 159, 160]}


@pytest.mark.parametrize(
    ("name", "rates", "said"),
    [
        ("00.4", {"a": BASE[:3], "b": FASTER[:3]}, "3 measured rounds; at least 5"),
        ("00.4", {"a": BASE}, "only the baseline"),
        ("00.4", {"a": BASE, "b": [115, 150, 120, 135, 130]}, "at most 10% is needed"),
        ("02.4", {"pil": BASE, "turbojpeg": [105] * 5}, "02.4: right"),
        ("02.4", {"pil": [100] * 5, "turbojpeg": [140] * 5}, "still 1.40x as fast"),
        ("02.4", {"pil": [100] * 2, "turbojpeg": [101] * 2}, "2 measured rounds"),
        ("02.4", {"a": BASE, "b": FASTER}, "variants"),
        ("05.3", {"v2": [100] * 5, "albumentations": [160, 161, 160, 160, 160]}, "05.3: right"),
        ("05.3", {"v2": [100] * 5, "albumentations": [60, 61, 60, 60, 60]}, "05.3: right"),
        ("05.3", {"v2": [100] * 5, "albumentations": [120] * 5}, "1.20x apart"),
        ("05.3", {"a": BASE, "b": FASTER}, "variants"),
        ("07.5", {"mine": BASE, "compute alone": [103, 104, 102, 103, 103]}, "07.5: right"),
        ("07.5", {"mine": BASE, "compute alone": FASTER}, "only the baseline"),
        ("07.5", {"mine": BASE, "b": [102] * 5, "compute alone": FASTER}, "at least 1.05x is needed"),
        ("07.5", {"mine": BASE[:2], "compute alone": [101, 100]}, "2 measured rounds"),
        ("12.5", STALL, "12.5: right"),
        ("12.5", {"a": BASE, "b": FASTER}, 'no variant "step alone"'),
        ("12.5", {"a": BASE, "step alone": FASTER}, "only one loader"),
        ("12.5", {**STALL, "step alone": [120, 121, 120, 119, 120]}, "not the same step"),
        ("12.5", {**STALL, "b": [110, 111, 110, 109, 110]}, "at least 1.2x is needed"),
        ("12.5", {"a": BASE, "step alone": [105, 106, 105, 104, 105]}, "12.5: right"),  # no loader can bring 1.2x
        ("12.5", {"a": BASE, "step alone": BASE[::-1]}, "12.5: right"),
        ("12.5", {"a": BASE, "b": [112, 113, 112, 111, 112], "step alone": [121, 122, 121, 120, 121]}, "12.5: right"),
        ("12.5", {"a": BASE, "b": [105, 106, 105, 104, 105], "step alone": [121, 122, 121, 120, 121]}, "at least 1.1"),
        ("12.5", {**STALL, "b": [250, 400, 190, 330, 250], "step alone": [400, 600, 300, 500, 400]}, "12.5: right"),
        ("12.5", {"step alone": FASTER, "a": BASE}, "make a loader the baseline"),
        ("12.5", {"a": BASE[:2], "step alone": BASE[:2]}, "2 measured rounds"),
        ("13.4", {"a": BASE, "b": FASTER}, "make it with course.compare_peers"),
        *[
            (name, rates, said)
            for name in ("13.4", "15.4")
            for rates, said in (
                ({"a": BASE[:2], "b": FASTER[:2]}, "2 measured rounds"),
                ({"a": BASE}, "only the baseline"),
                ({"a": BASE, "b": [100, 150, 90, 140, 115]}, "x lies in the interval of 'b', "),
            )
        ],
        ("15.4", {"a": BASE, "b": FASTER}, "15.4: right"),
        ("15.4", {"a": BASE, "b": BASE[::-1]}, "15.4: right"),  # one in flight is enough
        ("15.4", {"a": BASE, "b": BASE, "c": FASTER}, "15.4: right"),
        ("15.4", {"a": BASE, "b": [90, 91, 89, 90, 90]}, "15.4: right"),
    ],
)
def test_frames_are_judged(name, rates, said, frame_of, judge):
    assert said in judge(name, frame_of(rates, next(iter(rates))))


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("05.4", (PRIVATE, _load), "workers or epochs share a generator"),
        ("05.4", (FEW, _load), "add a transform with more outcomes"),
        ("05.4", (GLOBAL, _load_here), "no workers"),
        ("05.4", (GLOBAL, _load_none), "no batch of 64 samples"),
        ("06.5", (lambda batch: batch * torch.rand(1), BATCH), "draws once for the batch"),
        ("06.5", (lambda batch: batch.mul_(torch.rand(len(batch), 1, 1, 1)), BATCH), "changes its input"),
        ("06.5", (torch.sum, BATCH), "as many as it got; it gave ()"),
        ("10.5", (SIZES, _buckets(shapes=((512, 512),))), "33.3% of the pixels are cropped away"),
        ("10.5", (SIZES, _buckets(8)), "fill only 50% of the batches"),
        ("10.5", (SIZES, _buckets(3, remainder="drop")), "holds only 75% of the photos"),
        ("10.5", (SIZES, _buckets(sizes=SIZES.set_index(SIZES.index + 1))), "other images"),
        ("01.5", (_stages(1.0, 2.0), 4.0), "a step is outside of all stages"),
        ("01.5", (_stages(1.0, 2.0), 2.0), "a stage holds another one"),
        ("01.5", 3.0, "a float is not the pair"),
        ("02.5", (_own_files("subsampling 420.jpeg"), {"cv2"}), "cv2 differs for 'subsampling 420.jpeg'"),
        ("02.5", (_own_files("subsampling 420.jpeg"), {"pil"}), "more of the decoders give the right pixels for all 1"),
        ("02.5", ({"x.png": course.broken_files()["bad chunk.png"]}, {"pil"}), "leave 'x.png' out"),
        ("04.5", (_flip_by_chance, PHOTO), "draws once per call"),
        ("04.5", (lambda batch: batch.flip(3), PHOTO), "nothing in it is random"),
    ],
)
def test_what_is_wrong_with_ones_own_data_is_told(name, answer, said, judge):
    assert said in judge(name, answer)


def test_what_is_no_experiment_of_ones_own(frame_of, judge):
    assert "not a frame" in judge("00.4", 3)
    assert "of your own" in judge("00.4", frame_of({"a": BASE, "b": FASTER}, "a", experiment="00 two workers"))


def test_a_peer_of_your_own_is_judged_by_what_ran(frame_of, judge):
    rates, factors = {"naive": BASE[:3], "mine": FASTER[:3]}, {"source": "JPEG files", "antialias": True}
    good = frame_of(rates, "naive", **factors)
    good["kind"] = good["variant"].map({"naive": "baseline", "mine": "peer"})
    assert judge("13.4", good) == "13.4: right\n"
    assert "make it with course.compare_peers" in judge("13.4", frame_of(rates, "naive"))
    assert "2 measured rounds" in judge("13.4", good[good["round"] < 2])
    broken = frame_of(rates, "naive", kind="labkit", **factors)
    broken.attrs["left_out"] = [{"name": "mine", "state": "broke", "why": "no batch"}]
    assert "no peer has run: mine broke: no batch" in judge("13.4", broken)


PHOTOS = {"cat/a.jpg": b"one", "cat/b.jpg": b"two", "dog/a.jpg": b"three", "dog/b.jpg": b"three"}


class TestOwnShards:
    """08.4: whichever tool wrote them, under whichever names."""

    @pytest.fixture
    def judged(self, tmp_path, judge):
        for key, data in PHOTOS.items():
            path = tmp_path / "photos" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        def judged(*shards):
            for number, shard in enumerate(shards):
                with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
                    folder = tarfile.TarInfo("a folder")
                    folder.type = tarfile.DIRTYPE
                    tar.addfile(folder)
                    for place, data in enumerate(shard):
                        member = tarfile.TarInfo(f"{place}.bin")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
            return judge("08.4", (lk.FolderStore(tmp_path / "photos"), tmp_path))

        return judged

    def test_all_once(self, judged):
        assert judged([b"three", b"one", b"0", b"0"], [b"three", b"two", b"0", b"1"]) == "08.4: right\n"

    @pytest.mark.parametrize(
        ("shards", "said"),
        [
            ([], "ends in .tar"),
            (
                [[b"one"], [b"two", b"three"]],
                "2 of 4 photos are not in the shards, byte for byte: dog/a.jpg, dog/b.jpg\n",
            ),
            ([[b"ONE", b"two", b"three", b"three"]], "1 of 4 photos are not in the shards, byte for byte: cat/a.jpg\n"),
            ([[b""]], "4 of 4 photos are not in the shards, byte for byte: cat/a.jpg, cat/b.jpg, dog/a.jpg, ...\n"),
            (
                [[b"one", b"two"], [b"three", b"three", b"two"]],
                "1 of 4 photos are in the shards more than once: cat/b.jpg",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, shards, said, judged):
        assert said in judged(*shards)

    def test_the_shards_of_labkit(self, tmp_path, judge):
        photos = lk.FolderStore(lk.make_photos(tmp_path / "photos", 3))
        lk.write_shards(photos, tmp_path / "shards", max_count=2, engine="threads", progress=False)
        assert judge("08.4", (photos, tmp_path / "shards")) == "08.4: right\n"


def test_a_loader_on_your_own_photos_is_judged_by_the_class_that_it_states(frame_of, judge):
    for rates in (FASTER, BASE[::-1], [90, 91, 89, 90, 90]):
        own = frame_of({"theirs": BASE, "mine": rates}, "theirs", source="JPEG files", antialias=True)
        assert judge("13.4", own) == "13.4: right\n"


@pytest.mark.parametrize(
    ("rates", "claimed", "verdict", "said"),
    [
        (FASTER, 1.3, "holds", "right"),
        (FASTER, 2.0, "smaller here", "right"),
        (FASTER, 1.05, "larger here", "right"),
        ([90, 91, 89, 90, 90], 1.3, "does not hold", "right"),
        (FASTER, 1.3, "does not hold", "gives 'holds', not 'does not hold'"),
        (FASTER, 2.0, "holds", "gives 'smaller here', not 'holds'"),
        ([100, 150, 90, 140, 115], 1.3, "holds", "does not settle a claim of 1.3x"),
        ([100, 150, 90, 140, 115], 1.3, "inconclusive", "does not settle a claim of 1.3x"),
        (FASTER, 0.7, "holds", "make the other variant the baseline"),
        (FASTER[:4], 1.3, "holds", "4 measured rounds"),
    ],
)
def test_a_claim_of_your_own_is_judged_by_the_rule(rates, claimed, verdict, said, frame_of, judge):
    frame = frame_of({"a": BASE[: len(rates)], "b": rates}, "a")
    assert said in judge("14.4", (frame, claimed, verdict))


def test_a_claim_without_its_figure_or_with_three_variants_is_refused(frame_of, judge):
    assert "pass three things" in judge("14.4", frame_of({"a": BASE, "b": FASTER}, "a"))
    assert "not a frame" in judge("14.4", (1, 2, "holds"))
    assert "one is needed" in judge("14.4", (frame_of({"a": BASE, "b": FASTER, "c": FASTER}, "a"), 1.3, "holds"))


def test_every_exercise_has_answers_here():
    assert set(exercises()) == {*ANSWERS, *EXPERIMENTS, "02.4", "05.3", "08.4", "12.5", "13.4", "14.4", "15.4"}


def test_no_answer_prints_nothing_and_what_cannot_be_checked_says_what_is_asked_for(judge):
    assert judge("00.1", ...) == ""
    assert "What is asked for: A number, in images per second." in judge("00.1", "many")


def test_an_unknown_number_gives_the_list(judge):
    assert "no such exercise; there are 00.1" in judge("99.9", 1)
