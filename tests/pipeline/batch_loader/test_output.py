"""BatchLoader's floats: those of torchvision's v2 transforms, applied to the batches of bytes."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import labkit as lk
from labkit.loading.batch_loader import BatchLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def photos(first_photos):
    return lk.FolderStore(first_photos(22))


@pytest.fixture(scope="module", params=["photos", "pixels"])
def source(request, photos, tmp_path_factory):
    """A store and a `PixelStore` of the same photos."""
    if request.param == "photos":
        return photos
    path = tmp_path_factory.mktemp("pixels") / "set.pixels"
    return lk.PixelStore.build(photos, path, short_side=128, engine="threads", progress=False)


def batches_of(source, **arguments):
    return [images for images, _ in BatchLoader(source, batch_size=8, size=96, num_threads=2, **arguments)]


def normalize(images, mean=MEAN, std=STD):
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])(images)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("antialias", [True, False])
def test_floats_are_those_of_v2_on_the_batch_of_bytes(source, dtype, memory_format, antialias):
    plain = batches_of(source, antialias=antialias)
    floats = batches_of(source, antialias=antialias, dtype=dtype, mean=MEAN, std=STD, memory_format=memory_format)
    assert [len(images) for images in floats] == [8, 8, 6]
    for images, wanted in zip(floats, map(normalize, plain), strict=True):
        assert (images.dtype, images.shape) == (dtype, wanted.shape)
        assert images.is_contiguous(memory_format=memory_format)
        assert torch.equal(images, wanted.to(dtype)), "to the last bit: a half type is rounded once"


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_without_mean_and_std_go_from_0_to_1(photos, dtype):
    for images, plain in zip(batches_of(photos, dtype=dtype), batches_of(photos), strict=True):
        assert torch.equal(images, v2.functional.to_dtype(plain, torch.float32, scale=True).to(dtype))


def test_planes_of_bytes_hold_the_same_pixels(source):
    planes, plain = batches_of(source, memory_format=torch.contiguous_format), batches_of(source)
    assert all(images.is_contiguous() and images.dtype == torch.uint8 for images in planes)
    assert all(torch.equal(images, wanted) for images, wanted in zip(planes, plain, strict=True))


def test_a_batch_of_floats_that_is_kept_is_not_overwritten(photos):
    loader = BatchLoader(photos, batch_size=4, size=64, dtype=torch.bfloat16, mean=MEAN, std=STD)
    kept = [(images, images.clone()) for _ in range(3) for images, _ in loader]
    assert all(torch.equal(images, before) for images, before in kept)


def test_skipped_images_leave_no_gap_among_floats(photos, tmp_path):
    (tmp_path / "class").mkdir()
    for number, key in enumerate(list(photos.keys())[:5]):
        data = photos.read(key)
        (tmp_path / "class" / f"{number}.jpg").write_bytes(b"broken" if number == 2 else data)
    loader = BatchLoader(
        lk.FolderStore(tmp_path), batch_size=5, train=False, dtype=torch.float32, mean=MEAN, std=STD, on_error="skip"
    )
    [(images, labels)] = loader
    whole = BatchLoader(photos, batch_size=5, train=False, sampler=range(5))
    [(plain, _)] = whole
    assert len(images) == len(labels) == 4
    assert torch.equal(images, normalize(plain[[0, 1, 3, 4]]))


WRONG = [
    ({"dtype": torch.float64}, r"dtype must be one of torch.uint8, torch.float32, .*, got torch.float64"),
    ({"memory_format": torch.preserve_format}, r"memory_format must be one of torch.channels_last, torch.contig"),
    ({"mean": MEAN, "std": STD}, r"mean and std need floats: pass dtype=torch.float32"),
    ({"dtype": torch.float32, "mean": MEAN}, r"pass both mean and std, or neither: got mean=.*, std=None"),
    ({"dtype": torch.float32, "mean": MEAN, "std": (0.2, 0, 0.2)}, r"std must be three numbers > 0, .*\(0.2, 0, 0.2\)"),
    ({"dtype": torch.float32, "mean": MEAN[:1], "std": STD[:1]}, r"mean must be three numbers, for red, green and"),
    ({"dtype": torch.float32, "mean": (0, 0, np.nan), "std": STD}, r"mean must be three numbers, for red"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_formats_are_refused(photos, arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchLoader(photos, **arguments)
