"""The exercises on pixels: the folded answers are right, and each classic mistake is called by its name."""

import io
import math
import re
from functools import partial
from pathlib import Path

import cv2
import nbformat
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageFile, ImageOps
from torchcodec.decoders import decode_image
from torchvision.transforms import v2

from labkit import course
from labkit.course.builds_pixels import MEAN, STD
from tests.paths import REPO


def folded(notebook, function, name=None):
    """What an exercise's folded answer defines: the function, or the class of that name that has it."""
    nodes = nbformat.read(REPO / "notebooks" / f"{notebook}.ipynb", as_version=4)
    texts = [cell.source for cell in nodes.cells if "<summary>Answer</summary>" in cell.source]
    (block,) = [
        code
        for text in texts
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if f"def {function}" in code
    ]
    names = {
        "torch": torch, "np": np, "Image": Image, "ImageOps": ImageOps, "io": io, "math": math, "Path": Path,
        "simplejpeg": simplejpeg, "decode_image": decode_image,
    }  # fmt: skip
    exec(block, names)  # noqa: S102  # the notebook's own code
    return names[name or function]


def to_tensor(pixels):
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def without_turn(path):
    return to_tensor(Image.open(path).convert("RGB"))


def without_convert(path):
    image = torch.from_numpy(np.array(ImageOps.exif_transpose(Image.open(path))))
    return image.permute(2, 0, 1) if image.ndim == 3 else image


def clipped(path):
    return to_tensor(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))


def by_opencv(path):
    return to_tensor(cv2.imread(path))


def channels_last(path):
    return clipped(path).permute(1, 2, 0)


def floats(path):
    return clipped(path) / 255


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (without_turn, "exif 2.jpeg: the picture is turned or mirrored: apply the EXIF orientation"),
        (without_convert, 'grayscale.jpeg: the shape is (63, 95), not (3, H, W): use convert("RGB")'),
        (clipped, "gray 16-bit.png: all is white: 16 bits were clipped to 255; keep their high byte"),
        (by_opencv, "subsampling 444.jpeg: red and blue have changed places"),
        (
            channels_last,
            "subsampling 444.jpeg: the channels come last, (63, 95, 3); they come first in (3, H, W)",
        ),
        (floats, "subsampling 444.jpeg: torch.float32 came back; return uint8, of 16 bits the high byte"),
        (cv2.imread, "subsampling 444.jpeg: a ndarray came back; return a tensor"),
        (lambda path: clipped(path) // 2, "subsampling 444.jpeg: these are not the pixels that lk.decode gives"),
    ],
)
def test_a_picture_read_wrongly_is_told_by_its_mistake(said, answer, told):
    assert said(answer, course.reads_rgb) == f"not yet: {told}\n"


def test_a_file_cut_off_must_raise(said, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    told = said(folded("02b_any_file", "read_rgb_tensor"), course.reads_rgb)
    assert re.fullmatch(r"not yet: truncated at \d+%\.\w+: the file is cut off and was read all the same.*\n", told)


def scaled(factor=1.0):
    """The crop of a decode that keeps `factor` of the pixels that are needed."""

    def scaled_crop(data, box, size):
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        least = factor * max(size[0] / (box[2] - box[0]), size[1] / (box[3] - box[1]))
        sides = {"min_height": math.ceil(least * height), "min_width": math.ceil(least * width)}
        image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", **sides))
        return image.resize(size, box=[edge * image.width / width for edge in box])

    return scaled_crop


def cropped_to_whole_pixels(data, box, size):
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    least = max(size[0] / (box[2] - box[0]), size[1] / (box[3] - box[1]))
    sides = {"min_height": math.ceil(least * height), "min_width": math.ceil(least * width)}
    image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", **sides))
    box = [round(edge * image.width / width) for edge in box]
    return image.crop(box).resize(size, Image.Resampling.BILINEAR)


def by_its_width(data, box, size):
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    image = Image.fromarray(
        simplejpeg.decode_jpeg(data, "RGB", min_width=math.ceil(size[0] / (box[2] - box[0]) * width))
    )
    x, y = image.width / width, image.height / height
    return image.resize(size, Image.Resampling.BILINEAR, box=(box[0] * x, box[1] * y, box[2] * x, box[3] * y))


def whole_first(data, box, size):
    return Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.BILINEAR, box=box)


def by_torchcodec(data, box, size):
    return Image.fromarray(decode_image(data).permute(1, 2, 0).numpy()).resize(size, box=box)


FIRST, SMALL = "crop (40, 40, 600, 440) of 640 x 480 as (70, 50)", "crop (80, 0, 640, 480) of 640 x 480 as (180, 120)"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole_first, f"{FIRST}: right, but all 640 x 480 pixels were decoded, and 80 x 60 are needed"),
        (scaled(1.3), f"{FIRST}: right, but 160 x 120 pixels were decoded, and 80 x 60 are needed: take the smallest"),
        (scaled(0.5), f"{SMALL}: 160 x 120 pixels were decoded, and 240 x 180 are needed: the crop was enlarged"),
        (cropped_to_whole_pixels, "crop (300, 100, 460, 420) of 640 x 480 as (60, 80): this is another part"),
        (lambda data, box, size: whole_first(data, box, (9, 9)), f"{FIRST}: the shape is (9, 9, 3), not (50, 70, 3)"),
        (scaled(), "the answer raised ValueError: box can't exceed original image size"),
        (
            by_its_width,
            "crop (0, 200, 640, 300) of 640 x 480 as (80, 60): 80 x 60 pixels were decoded, and 400 x 300 are needed",
        ),
        (by_torchcodec, f"{FIRST}: decode with simplejpeg or Pillow; the check counts the pixels of these two"),
    ],
)
def test_a_crop_decoded_wrongly_is_told_by_its_mistake(said, answer, told):
    assert said(answer, course.scaled_decode).startswith(f"not yet: {told}")


def test_a_crop_is_measured_by_pixels_that_pillow_decodes_too(said):
    def drafted(data, box, size):
        image = Image.open(io.BytesIO(data))
        width, least = image.width, max(size[0] / (box[2] - box[0]), size[1] / (box[3] - box[1]))
        image.draft("RGB", [math.ceil(least * side) for side in image.size])
        return image.resize(size, box=[edge * image.width / width for edge in box])

    assert said(drafted, course.scaled_decode).startswith(f"not yet: {SMALL}: right, but 320 x 240 pixels were decoded")


def of_shape(values, *shape):
    return torch.tensor(values).view(shape)


class Normalize(torch.nn.Module):
    """The right answer for `shape` (3, 1, 1), and wrong ones."""

    def __init__(self, mean, std, shape=(3, 1, 1), forward=None, kept="buffers"):
        super().__init__()
        self.given, self.mean, self.std = forward, of_shape(mean, *shape), of_shape(std, *shape)
        self.kept = kept
        if kept == "buffers":
            self.register_buffer("factor", 1 / (255 * self.std))
            self.register_buffer("offset", -self.mean / self.std)
        elif kept == "parameters":
            self.factor = torch.nn.Parameter(1 / (255 * self.std))
            self.offset = torch.nn.Parameter(-self.mean / self.std)
        else:
            self.factor, self.offset = 1 / (255 * self.std), -self.mean / self.std

    def forward(self, batch):
        if self.given:
            return self.given(batch, self.mean, self.std)
        factor, offset = self.factor, self.offset
        if self.kept == "copied":
            factor, offset = factor.to(batch.device), offset.to(batch.device)
        return torch.addcmul(offset, batch, factor)


def by(forward, shape=(3, 1, 1)):
    return partial(Normalize, forward=forward, shape=shape)


def folded_on(batch, mean, std):
    return torch.addcmul(-mean / std, batch, 1 / (255 * std))


def in_place(batch, mean, std):
    batch.floor_divide_(2)
    return folded_on(batch, mean, std)


THREE = "the values are right, but arithmetic goes over the batch 3 times"
STAY = "factor and offset stay on the CPU when the module moves: keep them by `register_buffer`"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (by(lambda batch, mean, std: (batch - mean) / std), "the first value is"),
        (by(lambda batch, mean, std: batch / std / 255 - mean), "the first value is"),
        (by(None, (3,)), "the first value is"),
        (by(lambda batch, mean, std: folded_on(batch, mean.double(), std.double())), "torch.float64 came back"),
        (by(in_place), "the batch of bytes was changed in place; leave it as it is"),
        (by(lambda batch, mean, std: (batch / 255 - mean) / std), THREE),
        (by(lambda batch, mean, std: v2.functional.normalize(batch / 255, [*MEAN], [*STD])), THREE),
        (by(lambda batch, mean, std: folded_on(batch, mean, std)[0]), "the shape is (3, 3, 3), not (3, 3, 3, 3)"),
        (by(lambda batch, mean, std: batch.numpy()), "a ndarray came back; return a tensor"),
        (
            lambda mean, std: Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            "with a mean and std of (0.5, 0.5, 0.5), it still takes ImageNet's",
        ),
        (partial(Normalize, kept="attributes"), STAY),
        (partial(Normalize, kept="copied"), STAY),
        (partial(Normalize, kept="parameters"), "an optimizer over `parameters()` would train mean and std"),
        (lambda mean, std: lambda batch: folded_on(batch, mean, std), "a function is no module"),
    ],
)
def test_a_batch_normalized_wrongly_is_told_by_its_mistake(said, answer, told):
    assert said(answer, course.normalizes_bytes).startswith(f"not yet: {told}")


def flipped_where(draw, **options):
    """The right answer for draws of its own; `draw(n)` says which images are flipped."""

    def flip_each(batch):
        is_flipped = torch.as_tensor(draw(len(batch))).view(-1, 1, 1, 1)
        found = torch.where(is_flipped, batch.flip(3), batch)
        if options.get("in_place"):
            return batch.copy_(found)
        return found[is_flipped.flatten().long().argsort()] if options.get("sorted") else found

    return flip_each


def coins(n):
    return torch.rand(n) < 0.5


def seeded_coins(n):
    return torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.5


def one_by_one(batch):
    return torch.stack([image.flip(2) if torch.rand(()) < 0.5 else image for image in batch])


OTHERS = "some are neither the original in their place nor its mirror image"
SAME = "every call flips the same images: draw anew in each, and set no seed there"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (v2.RandomHorizontalFlip(), "all images of a batch are flipped, or none: draw for each image"),
        (lambda batch: batch.flip(2), f"{OTHERS}: flip along the width"),
        (lambda batch: batch[:32], "return a tensor of the shape that the batch has"),
        (lambda batch: torch.cat([batch[:4].flip(3), batch[4:]]), "2% of the images are flipped, not half"),
        (flipped_where(lambda n: torch.rand(n) < 0.3), "SOME% of the images are flipped, not half"),
        (flipped_where(lambda n: torch.arange(n) % 2 == 0), SAME),
        (flipped_where(seeded_coins), SAME),
        (
            flipped_where(lambda n: coins(n // 2).repeat_interleave(2)),
            "neighbors are not flipped independently: SOME% of the draws agree. Draw for each image",
        ),
        (
            one_by_one,
            "SOME operations for 256 images: flip without a loop, by torch.where",
        ),
        (lambda batch: flipped_where(coins)(batch / 1), "torch.float32 came back; return torch.uint8 as given"),
        (flipped_where(coins, in_place=True), "the batch that was given has changed; return a new one"),
        (flipped_where(coins, sorted=True), f"{OTHERS}: flip along the width"),
    ],
)
def test_a_batch_flipped_wrongly_is_told_by_its_mistake(said, answer, told):
    told = re.escape(f"not yet: {told}\n").replace("SOME", r"\d+")
    assert re.fullmatch(told, said(answer, course.flips_each))


def flipped_in_a_copy(batch):
    is_flipped, found = torch.randint(2, (len(batch),)).bool(), batch.clone()
    found[is_flipped] = found[is_flipped].flip(-1)
    return found


@pytest.mark.parametrize(
    "answer",
    [
        flipped_where(coins),
        flipped_in_a_copy,
        flipped_where(lambda n: torch.bernoulli(torch.full((n,), 0.5)).bool()),
        flipped_where(lambda n: np.random.random(n) < 0.5),
    ],
)
def test_other_ways_to_flip_each_are_right_too(said, answer):
    before = torch.get_rng_state()
    assert said(answer, course.flips_each) == "right\n"
    assert torch.equal(torch.get_rng_state(), before)
