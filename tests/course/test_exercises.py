"""Exercises: a check passes right answers, says what is wrong with others, and never raises."""

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
from labkit.course import parse_cache_name
from labkit.course.exercises import exercises
from labkit.data.sizes import sizes_from_caches
from labkit.planning.formulas import Estimate, LoaderCosts


def _size(data):
    return Image.open(io.BytesIO(data)).size


def _to_rgb(image):
    if image.dtype == torch.uint16:
        image = (image.to(torch.int32) >> 8).to(torch.uint8)
    return image[:3] if image.shape[0] >= 3 else image[:1].expand(3, -1, -1)


def _stages(*seconds, variant="mine"):
    names = [f"stage {number}" for number in range(len(seconds))]
    return pd.DataFrame({"variant": variant, "stage": names, "seconds": seconds})


def _own_files(*kinds):
    """Files in the forms of a reader's folder, by name."""
    return {kind: course.oracle_files()[kind] for kind in kinds}


def _global_draw(*numbers):
    torch.manual_seed(hash(numbers))
    return torch.rand(1).item()


def _flip_each(batch):
    chosen = torch.rand(len(batch), generator=torch.Generator().manual_seed(0)) < 0.5
    return torch.where(chosen[:, None, None, None], batch.flip(3), batch)


def _flip_one_by_one(batch):
    return torch.where((torch.rand(len(batch)) < 0.5)[:, None, None, None], batch.flip(3), batch)


def _normalized(batch):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (batch / 255 - mean[:, None, None]) / std[:, None, None]


def _to_tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _own_share(top, bottom, left, right, height, width):
    return 1 - (bottom - top) * (right - left) / (height * width)


def _factors(batch, low=0.6, high=1.4):
    return torch.empty(len(batch), 1, 1, 1).uniform_(low, high)


def _brightened(batch):
    return batch * _factors(batch)


def _brightened_one_by_one(batch):
    return torch.stack([image * factor.item() for image, factor in zip(batch, _factors(batch), strict=True)])


class _Draws:
    """A data set whose samples are drawn by a function of its own generator."""

    def __init__(self, draw):
        self.generator, self.draw = random.Random(0), draw

    def __getitem__(self, index):
        return torch.tensor([self.draw(self.generator)]), index


GLOBAL, PRIVATE = _Draws(lambda generator: torch.rand(1).item()), _Draws(random.Random.random)
FEW = _Draws(lambda generator: torch.rand(1).item() < 0.5)


def _load(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork", **options})


def _load_by_labkit(dataset):
    return lk.make_loader(dataset, lk.LoaderConfig(8, 1, start_method="fork"))


def _mirrored_columns(width, new_width):
    return [width - 1 - int((column + 0.5) * width / new_width) for column in range(new_width)]


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


def _settled_sizes(images, caches):
    return {image: size for image, size in sizes_from_caches(images, caches).items() if size}


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


def _costs(low, high, *, kind="measured here", data="photos"):
    return LoaderCosts({data: {"cpu_ms_per_image": Estimate(1.0, low, high, source="a run", kind=kind)}})


BATCH = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5) / 120
PHOTO = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)
SIZES = pd.DataFrame({"path": list("abcdefgh"), "width": [600] * 4 + [400] * 4, "height": [400] * 4 + [600] * 4})
OWN_SIZES = pd.DataFrame({"width": [1000, 768, 100, None], "height": [500, 1152, 200, None]}, dtype="Int64")
S420, EXIF_6, EXIF_TEXT = "subsampling 420.jpeg", "exif 6.jpeg", "exif 6 as text.png"


def _buckets(batch_size=4, *, sizes=SIZES, shapes=((600, 400), (400, 600)), **options):
    return lk.BucketBatchSampler(sizes, batch_size, buckets=lk.Buckets(shapes), rank=0, world_size=1, **options)


WHOLE_NUMBERS = {
    "00.2": 128, "03.1": 10, "05.1": 250, "08b.1": 1000, "09.2": 20, "11.1": 4, "12.2": 6,
}  # fmt: skip
NUMBERS = {
    "00.1": 640, "01.1": 1.4286, "01.2": 2.5, "03.2": 4, "04.1": 28.9, "06.2": 0.75, "07.1": 75, "07.2": 40,
    "07.3": 4 / 3, "08.1": 0.667, "08b.3": 22, "09.1": 14.4, "09.3": 4 / 3.9, "10.1": 1692, "10.4": 10.07, "10b.1": 320,
    "11.2": 2.68, "11b.1": 335.5, "11b.3": 83_333, "12.1": 2.5, "12.3": 0.8, "13.1": 6.4, "13.2": 1.19, "14.1": 1.18,
    "15.1": 3000,
}  # fmt: skip
OFF = "times the right value"

# Exercise -> right answers, and wrong ones with words of what is said about them.
ANSWERS = {
    **{name: ([n], [(n - 1, OFF), (n + 1, OFF)]) for name, n in WHOLE_NUMBERS.items()},
    **{name: ([n], [(0.97 * n, OFF), (1.03 * n, OFF)]) for name, n in NUMBERS.items()},
    "00.3": (["inconclusive"], [("faster", "lie on both sides of 1")]),
    "01.3": (
        [_size],
        [
            (lambda data: _size(data)[::-1], "for a complete file of (80, 60) pixels (width, height)"),
            (lambda data: Image.open(io.BytesIO(data)).convert("RGB").size, "could not be checked (OSError"),
        ],
    ),
    "01.5": (
        [(_stages(1.0, 2.0), 3.1), [_stages(1.0, 2.0), 2.9], (_stages(0.5, 0.5, 0.09), 1.0)],
        [
            ((_stages(1.0, 2.0), 4.0), "a step is outside of all stages"),
            ((_stages(1.0, 2.0), 2.0), "a stage holds another one"),
            ((_stages(3.0), 3.0), "it has 1 stage"),
            ((_stages(1.0, 2.0, variant="naive"), 3.0), "time your own"),
            (({"stage": [1.0, 2.0]}, 3.0), "a dict is not a frame of stages"),
            (3.0, "a float is not the pair"),
        ],
    ),
    "02.1": (
        [_to_rgb],
        [
            (lambda image: _to_rgb((image.to(torch.int32) & 255).to(torch.uint8)), "of torch.uint16: a value is off"),
            (lambda image: image, "1 channels of torch.uint8 gave (1, 2, 3)"),
            (lambda image: _to_rgb(image).flip(0), "3 channels of torch.uint8: a value is off"),
        ],
    ),
    "02.2": (
        [{"cv2", "torchcodec"}, ["torchcodec", "cv2"]],
        [({"cv2", "torchcodec", "pil"}, "pil does not"), ({"cv2"}, "1 missing"), ("torchcodec", "1 missing")],
    ),
    "02.3": ([(375, 500), [375, 500]], [((500, 375), "(500, 375): libjpeg-turbo decodes at n/8")]),
    "02.5": (
        [
            (_own_files(S420), set(lk.DECODERS) - {"cv2", *course.missing_decoders()}),
            (_own_files(S420, EXIF_6), {"torchcodec"} - set(course.missing_decoders())),
            (_own_files(EXIF_TEXT), set()),
        ],
        [
            ((_own_files(S420), {"cv2"}), f"cv2 differs for {S420!r}"),
            ((_own_files(S420), {"pil"}), "more of the decoders give the right pixels for all 1"),
            ((_own_files(S420, EXIF_6), {"torchcodec", "torchvision"}), f"torchvision differs for {EXIF_6!r}"),
            ((_own_files(EXIF_TEXT), "pil"), f"pil differs for {EXIF_TEXT!r}"),
            ((_own_files(EXIF_TEXT), {"jpegli"}), "'jpegli' is none of pil"),
            (({"x.png": course.broken_files()["bad chunk.png"]}, set()), "leave 'x.png' out"),
            (({}, set()), "must be a dict"),
        ],
    ),
    "03.3": (
        [lambda *numbers: random.Random(str(numbers)).random()],
        [
            (_global_draw, "changes the state of a global generator"),
            (lambda *numbers: random.random(), "called again in another order"),
            (lambda *numbers: 0.5, "gave only 1 different numbers"),
            (lambda seed, epoch, index: (1000 * seed + 100 * epoch + index) / 1e4, "must spread over 0 to 1"),
        ],
    ),
    "04.2": (
        [_flip_each],
        [
            (lambda batch: batch.copy_(_flip_each(batch)), "changes its input"),
            (lambda batch: batch, "0% of the images of a batch are flipped"),
            (lambda batch: batch.flip(3), "100% of the images of a batch are flipped"),
            (lambda batch: batch.flip(2), "64 of 64 images are neither"),
            (torch.sum, "it returned () of torch.int64 instead of (64, 3, 2, 4)"),
        ],
    ),
    "04.3": (
        [_normalized],
        [
            (lambda batch: batch / 255, "a value is off by"),
            (lambda batch: _normalized(batch * 1.0).double(), "torch.float64 instead"),
        ],
    ),
    "04.5": (
        [(_flip_one_by_one, PHOTO), (lambda batch: _flip_one_by_one(batch) / 255, PHOTO)],
        [
            ((lambda batch: batch.flip(3) if torch.rand(()) < 0.5 else batch, PHOTO), "draws once per call"),
            ((lambda batch: batch.flip(3), PHOTO), "nothing in it is random"),
            ((lambda batch: _flip_one_by_one(batch)[:8], PHOTO), "a Tensor that is no batch of 16"),
            (_flip_one_by_one, "is not the pair"),
        ],
    ),
    "05.2": (
        [_to_tensor],
        [
            (lambda pixels: _to_tensor(pixels).contiguous(), "it copies"),
            (lambda pixels: _to_tensor(pixels).flip(1), "the pixels are not the same"),
            (torch.from_numpy, "gave (2, 5, 3)"),
        ],
    ),
    "05.4": (
        [(GLOBAL, _load), (GLOBAL, _load_by_labkit)],
        [
            ((PRIVATE, _load), "workers or epochs share a generator"),
            ((FEW, _load), "add a transform with more outcomes"),
            ((GLOBAL, lambda dataset: DataLoader(dataset, batch_size=8)), "no workers"),
            ((GLOBAL, lambda dataset: _load(dataset, batch_size=100, drop_last=True)), "no batch of 64 samples"),
        ],
    ),
    "06.1": ([_own_share], [(lambda *box: 1 - _own_share(*box), "for (0, 10, 0, 20, 20, 40) it returned 0.25")]),
    "06.3": (
        [_brightened],
        [
            (_brightened_one_by_one, "it reads 64 values back"),
            (lambda batch: batch * 1.2, "64 images got 1 different factors"),
            (lambda batch: batch * torch.rand_like(batch), "varies within an image"),
            (lambda batch: batch * _factors(batch, 0.2, 1.8), "instead of 0.6 to 1.4"),
            (torch.sum, "it returned ()"),
        ],
    ),
    "06.5": (
        [(_brightened, BATCH), (_flip_each, BATCH), (_brightened_one_by_one, BATCH[:1])],
        [
            ((lambda batch: batch * torch.rand(1), BATCH), "draws once for the batch"),
            ((lambda batch: batch.mul_(_factors(batch)), BATCH), "changes its input"),
            ((lambda batch: (batch, 0), BATCH), "as many as it got; it gave tuple"),
            ((torch.sum, BATCH), "as many as it got; it gave ()"),
            ((_brightened, BATCH[0]), "must be a tensor (N, C, H, W)"),
        ],
    ),
    "07.4": (["record_stream", "tensor.record_stream(stream)"], [("wait_stream", "which stream still reads")]),
    "08.2": (
        [_sample_key],
        [
            (lambda name: name.rpartition(".")[0], "it returned 'v1.0/dog/a.seg'"),
        ],
    ),
    "08b.2": (
        [
            _part_of_shards,
            lambda shards, rank, ranks, worker, workers: shards[worker * ranks + rank :: ranks * workers],
        ],
        [
            (lambda shards, rank, ranks, worker, workers: shards[rank::ranks], "one is read 2 times"),
            (lambda shards, rank, ranks, *worker: shards if rank == worker[0] == 0 else [], "and another 0"),
        ],
    ),
    "09.4": (
        [_mirrored_columns],
        [(lambda *sides: _mirrored_columns(*sides)[::-1], "column 0 is"), (lambda *sides: [0], "returned 1 columns")],
    ),
    "10.2": (
        [parse_cache_name],
        [
            (_lax_cache_name, "should give"),
            (lambda name: parse_cache_name(name) or ("cat", 512, 768), "'cat_te_outputs.npz' should give None"),
        ],
    ),
    "10.3": (
        [_settled_sizes],
        [(_prefix_sizes, "sd-scripts issue 1770")],
    ),
    "10.5": (
        [
            (SIZES, _buckets()),
            (SIZES, _buckets(shapes=((576, 448), (448, 576)))),
            (SIZES, _buckets(2, remainder="drop")),
        ],
        [
            ((SIZES, _buckets(shapes=((512, 512),))), "33.3% of the pixels are cropped away"),
            ((SIZES, _buckets(8)), "fill only 50% of the batches"),
            ((SIZES, _buckets(3, remainder="drop")), "holds only 75% of the photos"),
            ((SIZES, _buckets(sizes=SIZES.set_index(SIZES.index + 1))), "other images"),
            ((SIZES[:4], _buckets()), "other images"),
        ],
    ),
    "10b.2": (
        [_png_size],
        [
            (lambda data: _png_size(data) and _png_size(data)[::-1], "a PNG of 640 x 480: it gave (480, 640)"),
            (lambda data: _png_size(data[:16] + b"\0\0" + data[18:]) if _png_size(data) else None, "a PNG of 70000"),
            (lambda data: _png_size(data.ljust(24, b"\0")), "ends within its height"),
        ],
    ),
    "11b.2": (
        [_crop_of_memory],
        [
            (lambda *where: _crop_of_memory(*where).copy(), "was copied"),
            (lambda memory, start, shape, box: _crop_of_memory(memory, 0, shape, box), "has the wrong pixels"),
            (lambda memory, *where: memory, "has shape (177,)"),
        ],
    ),
    "11b.4": (
        [(OWN_SIZES, 3 * (256 * 512 + 256 * 384 + 100 * 200) / 1e9)],
        [
            ((OWN_SIZES, (256 * 512 + 256 * 384 + 100 * 200) / 1e9), "0.33 times the right value"),  # one channel
            ((OWN_SIZES, 3 * (2 * 256 * 512 + 256 * 384) / 1e9), "1.45 times"),  # the small photo enlarged
            ((OWN_SIZES.iloc[3:], 0.0), "the size of no photo"),
            ((None, 1.0), "a NoneType is not a frame"),
        ],
    ),
    "12.4": (
        [lambda step_s, loader_s, together_s: max(0.0, 1 - step_s / together_s)],
        [
            (lambda step_s, loader_s, together_s: 1 - step_s / together_s, "0.000 is lost; it returned -0.020"),
            (lambda step_s, loader_s, together_s: loader_s / together_s, "0.600 is lost; it returned 1.000"),
        ],
    ),
    "13.3": (
        [_comparable],
        [
            (lambda one, other: _comparable(one, other) and one[1] == other[1], "may be compared; it returned False"),
            (lambda one, other: _comparable(("", one[1]), ("", other[1])), "may not be compared; it returned True"),
        ],
    ),
    "14.2": (
        [_verdict_on_a_ratio],
        [
            (lambda low, high, claimed, up_to: _verdict_on_a_ratio(low, high, claimed, claimed), "should give 'holds'"),
            (lambda low, high, *claimed: "holds" if low > 1 else "does not hold", "should give 'smaller here'"),
        ],
    ),
    "14.3": (
        [_verdict_on_a_claim],
        [
            (lambda outcomes: "holds" if "holds" in outcomes else _verdict_on_a_claim(outcomes), "it gave 'holds'"),
        ],
    ),
    "15.2": (
        [_costs(0.9, 1.1)],
        [
            (_costs(0.6, 1.4), "80% wide: measure again"),
            (_costs(0.9, 1.1, kind="entered"), "was entered, not measured"),
            (_costs(0.9, 1.1, data="pixels"), "nothing about your photos"),
            (1.0, "it is a float"),
        ],
    ),
    "15.3": (
        [
            lk.plan(900, cores_per_node=8, cpu_ms_per_image=(0.8, 1.1)),
            lk.plan(900, vcpus_per_node=8, cpu_ms_per_image=1),
        ],
        [
            (lk.plan(gpu="h100", cores_per_node=8, cpu_ms_per_image=1), "its images_per_s_per_gpu is published"),
            (lk.plan(900, gpu="h100", cpu_ms_per_image=1), "its cores_per_node is published"),
            (lk.plan(900, cores_per_node=8, cpu_ms_per_image=Estimate(1, kind="published")), "its cpu_ms_per_image is"),
            (900, "it is a int"),
        ],
    ),
}

# Exercises with a frame of two variants as their answer -> how many times as fast one must be, if that counts.
EXPERIMENTS = {
    "00.4": None, "01.4": 1.1, "03.4": 1.2, "04.4": None, "06.4": None, "07.5": 1.05, "08.3": 1.2, "08b.4": None,
    "09.5": 1.2, "10b.3": None, "11.3": 1.2,
}  # fmt: skip
BASE, FASTER, SLOWER = [100, 101, 99, 100, 100], [130, 131, 130, 129, 130], [90, 91, 89, 90, 90]
WIDE = [100, 150, 90, 140, 115]
STALL = {"a": BASE, "b": [150, 151, 150, 149, 150], "step alone": [160, 161, 160, 159, 160]}

# Rates of a frame -> what is said of it.
FRAMES = [
    ("00.4", {"a": BASE[:3], "b": FASTER[:3]}, "3 measured rounds; at least 5"),
    ("00.4", {"a": BASE}, "only the baseline"),
    ("00.4", {"a": BASE, "b": [115, 150, 120, 135, 130]}, "at most 10% is needed"),
    ("02.4", {"pil": BASE, "turbojpeg": [105] * 5}, "right"),
    ("02.4", {"pil": [100] * 5, "turbojpeg": [140] * 5}, "still 1.40x as fast"),
    ("02.4", {"pil": [100] * 2, "turbojpeg": [101] * 2}, "2 measured rounds"),
    ("02.4", {"a": BASE, "b": FASTER}, "variants"),
    ("05.3", {"v2": [100] * 5, "albumentations": [160, 161, 160, 160, 160]}, "right"),
    ("05.3", {"v2": [100] * 5, "albumentations": [60, 61, 60, 60, 60]}, "right"),
    ("05.3", {"v2": [100] * 5, "albumentations": [120] * 5}, "differ by 1.20x"),
    ("05.3", {"a": BASE, "b": FASTER}, "variants"),
    ("07.5", {"mine": BASE, "compute alone": [103, 104, 102, 103, 103]}, "right"),
    ("07.5", {"mine": BASE, "compute alone": FASTER}, "only the baseline"),
    ("07.5", {"mine": BASE, "b": [102] * 5, "compute alone": FASTER}, "at least 1.05x is needed"),
    ("07.5", {"mine": BASE[:2], "compute alone": [101, 100]}, "2 measured rounds"),
    ("12.5", STALL, "right"),
    ("12.5", {"a": BASE, "b": FASTER}, 'no variant "step alone"'),
    ("12.5", {"a": BASE, "step alone": FASTER}, "only one loader"),
    ("12.5", {**STALL, "step alone": [120, 121, 120, 119, 120]}, "not the same step"),
    ("12.5", {**STALL, "b": [110, 111, 110, 109, 110]}, "at least 1.2x is needed"),
    ("12.5", {"a": BASE, "step alone": [105, 106, 105, 104, 105]}, "right"),  # no loader can bring 1.2x
    ("12.5", {"a": BASE, "step alone": BASE[::-1]}, "right"),
    ("12.5", {"a": BASE, "b": [112, 113, 112, 111, 112], "step alone": [121, 122, 121, 120, 121]}, "right"),
    ("12.5", {"a": BASE, "b": [105, 106, 105, 104, 105], "step alone": [121, 122, 121, 120, 121]}, "at least 1.1"),
    ("12.5", {**STALL, "b": [250, 400, 190, 330, 250], "step alone": [400, 600, 300, 500, 400]}, "right"),
    ("12.5", {"step alone": FASTER, "a": BASE}, "make a loader the baseline"),
    ("12.5", {"a": BASE[:2], "step alone": BASE[:2]}, "2 measured rounds"),
    ("13.4", {"a": BASE, "b": FASTER}, "make it with course.compare_peers"),
    *[
        (name, rates, said)
        for name in ("13.4", "15.4")
        for rates, said in (
            ({"a": BASE[:2], "b": FASTER[:2]}, "2 measured rounds"),
            ({"a": BASE}, "only the baseline"),
            ({"a": BASE, "b": WIDE}, "x lies in the interval of 'b', "),
        )
    ],
    ("15.4", {"a": BASE, "b": FASTER}, "right"),
    ("15.4", {"a": BASE, "b": SLOWER}, "right"),  # one in flight is enough
    ("15.4", {"a": BASE, "b": BASE, "c": FASTER}, "right"),
]


@pytest.fixture
def judge(capsys):
    """What a check prints after the exercise's name."""

    def judge(name, answer):
        course.check(name, answer)
        return capsys.readouterr().out.removeprefix(f"{name}: ")

    return judge


def test_every_exercise_has_answers_here():
    others = {name for name, *_ in FRAMES} | {"08.4", "14.4"}
    assert set(exercises()) == {*ANSWERS, *EXPERIMENTS, *others}


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_pass_and_wrong_ones_are_told_what_is_wrong(name, judge):
    right, wrong = ANSWERS[name]
    assert [judge(name, answer) for answer in right] == ["right\n"] * len(right)
    for answer, said in wrong:
        assert said in judge(name, answer)


def test_no_answer_prints_nothing_and_what_cannot_be_checked_says_what_is_asked_for(judge):
    assert judge("00.1", ...) == ""
    assert "What is asked for: A number, in images per second." in judge("00.1", "many")
    assert "no such exercise; there are 00.1" in judge("99.9", 1)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_frame_of_ones_own_has_to_be_conclusive(name, frame_of, judge):
    assert judge(name, frame_of({"a": BASE, "b": FASTER}, "a")) == "right\n"
    assert "inconclusive" in judge(name, frame_of({"a": BASE, "b": BASE[::-1]}, "a"))
    for rates in ([103, 104, 102, 103, 103], SLOWER) if EXPERIMENTS[name] else ():
        assert f"at least {EXPERIMENTS[name]}x is needed" in judge(name, frame_of({"a": BASE, "b": rates}, "a"))


@pytest.mark.parametrize(("name", "rates", "said"), FRAMES)
def test_frames_are_judged(name, rates, said, frame_of, judge):
    told = judge(name, frame_of(rates, next(iter(rates))))
    assert told == "right\n" if said == "right" else said in told


def test_what_is_no_experiment_of_ones_own(frame_of, judge):
    assert "not a frame" in judge("00.4", 3)
    assert "of your own" in judge("00.4", frame_of({"a": BASE, "b": FASTER}, "a", experiment="00 two workers"))


def test_a_peer_of_ones_own_is_judged_by_what_ran_and_a_loader_by_the_class_that_it_states(frame_of, judge):
    rates, factors = {"naive": BASE[:3], "mine": FASTER[:3]}, {"source": "JPEG files", "antialias": True}
    good = frame_of(rates, "naive", **factors)
    good["kind"] = good["variant"].map({"naive": "baseline", "mine": "peer"})
    assert judge("13.4", good) == "right\n"
    broken = frame_of(rates, "naive", kind="labkit", **factors)
    broken.attrs["left_out"] = [{"name": "mine", "state": "broke", "why": "no batch"}]
    assert "no peer has run: mine broke: no batch" in judge("13.4", broken)
    for own in (FASTER, BASE[::-1], SLOWER):
        assert judge("13.4", frame_of({"theirs": BASE, "mine": own}, "theirs", **factors)) == "right\n"


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([[b"three", b"one", b"0", b"0"], [b"three", b"two", b"0", b"1"]], "right\n"),
        ([], "ends in .tar"),
        ([[b"one"], [b"two", b"three"]], "2 of 4 photos are not in the shards, byte for byte: dog/a.jpg, dog/b.jpg\n"),
        ([[b"ONE", b"two", b"three", b"three"]], "1 of 4 photos are not in the shards, byte for byte: cat/a.jpg\n"),
        ([[b""]], "4 of 4 photos are not in the shards, byte for byte: cat/a.jpg, cat/b.jpg, dog/a.jpg, ...\n"),
        ([[b"one", b"two"], [b"three", b"three", b"two"]], "1 of 4 photos are in the shards more than once: cat/b.jpg"),
    ],
)
def test_ones_own_shards_hold_every_photo_once_whoever_wrote_them(shards, said, tmp_path, judge):
    for key, data in {"cat/a": b"one", "cat/b": b"two", "dog/a": b"three", "dog/b": b"three"}.items():
        path = tmp_path / "photos" / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for number, shard in enumerate(shards):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            folder = tarfile.TarInfo("a folder")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for place, data in enumerate(shard):
                member = tarfile.TarInfo(f"{place}.bin")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    assert said in judge("08.4", (lk.FolderStore(tmp_path / "photos"), tmp_path))


def test_the_shards_of_labkit_hold_every_photo_once(first_photos, tmp_path, judge):
    photos = lk.FolderStore(first_photos(3))
    lk.write_shards(photos, tmp_path / "shards", max_count=2, engine="threads", progress=False)
    assert judge("08.4", (photos, tmp_path / "shards")) == "right\n"


@pytest.mark.parametrize(
    ("rates", "claimed", "verdict", "said"),
    [
        (FASTER, 1.3, "holds", "right"),
        (FASTER, 2.0, "smaller here", "right"),
        (FASTER, 1.05, "larger here", "right"),
        (SLOWER, 1.3, "does not hold", "right"),
        (FASTER, 1.3, "does not hold", "gives 'holds', not 'does not hold'"),
        (WIDE, 1.3, "holds", "does not settle a claim of 1.3x"),
        (WIDE, 1.3, "inconclusive", "does not settle a claim of 1.3x"),
        (FASTER, 0.7, "holds", "make the other variant the baseline"),
        (FASTER[:4], 1.3, "holds", "4 measured rounds"),
    ],
)
def test_a_claim_of_ones_own_is_judged_by_the_rule(rates, claimed, verdict, said, frame_of, judge):
    told = judge("14.4", (frame_of({"a": BASE[: len(rates)], "b": rates}, "a"), claimed, verdict))
    assert told == "right\n" if said == "right" else said in told


def test_a_claim_without_its_figure_or_with_three_variants_is_refused(frame_of, judge):
    assert "pass three things" in judge("14.4", frame_of({"a": BASE, "b": FASTER}, "a"))
    assert "not a frame" in judge("14.4", (1, 2, "holds"))
    assert "one is needed" in judge("14.4", (frame_of({"a": BASE, "b": FASTER, "c": FASTER}, "a"), 1.3, "holds"))
