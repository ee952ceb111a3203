"""Which image goes into which bucket, and what is cropped: against loops over all buckets, and Pillow."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import labkit as lk
from labkit import course
from labkit.data.buckets import Buckets, upright_sizes

SIDES = st.integers(1, 5000)


def frame_of_sizes(*sizes, **columns) -> pd.DataFrame:
    widths, heights = zip(*sizes, strict=True)
    paths = [f"{number}.jpg" for number in range(len(sizes))]
    known = {name: pd.array(values, "Int64") for name, values in (("width", widths), ("height", heights))}
    return pd.DataFrame({"path": paths, **known, **columns})


def default() -> Buckets:
    return Buckets(tuple(course.bucket_shapes()))


def nearest(size: tuple[int, int], shapes: list[tuple[int, int]]) -> tuple[int, int]:
    """One bucket after the other, as a reader would write it."""
    best = None
    for shape in sorted(shapes):
        if shape == size:
            return shape
        error = abs(shape[0] / shape[1] - size[0] / size[1])
        if best is None or error < best[0]:
            best = error, shape
    return best[1]


class TestSelect:
    @settings(max_examples=50, deadline=None)
    @given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30))
    def test_the_closest_ratio(self, sizes):
        buckets = default()
        found = [buckets.shapes[number] for number in buckets.select(*np.array(sizes).T)]
        assert found == [nearest(size, list(buckets.shapes)) for size in sizes]

    def test_its_own_size_comes_before_another_of_its_ratio(self):
        buckets = Buckets(((1024, 1024), (512, 512), (256, 512)))
        assert buckets.shapes == ((256, 512), (512, 512), (1024, 1024))
        assert buckets.select([1024, 1023, 2000], [1024, 1023, 2000]).tolist() == [2, 1, 1]

    def test_many_images_at_once(self, monkeypatch):
        sizes = np.random.default_rng(2).integers(1, 3000, (500, 2)).T
        at_once = default().select(*sizes)
        monkeypatch.setattr("labkit.data.buckets._ROWS_AT_ONCE", 7)
        assert default().select(*sizes).tolist() == at_once.tolist()
        assert at_once.dtype == np.int64
        assert default().select([], []).tolist() == []

    @pytest.mark.parametrize("sides", [([0], [5]), ([5], [-1]), ([5], [10**9])])
    def test_sides_that_are_none(self, sides):
        with pytest.raises(ValueError, match="widths and heights must be from 1 to 999999999 pixels"):
            default().select(*sides)

    @settings(max_examples=50, deadline=None)
    @given(sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30))
    def test_what_is_resized_covers_its_bucket_and_one_side_is_whole(self, sizes):
        buckets = Buckets.fit(frame_of_sizes(*sizes), step=16)
        resized = buckets.resized(*np.array(sizes).T)
        shapes = np.array(buckets.shapes)[buckets.select(*np.array(sizes).T)]
        assert (resized >= shapes).all()
        assert (resized == shapes).any(1).all()
        aspects = np.divide(*np.array(sizes).T)
        assert (abs(resized[:, 0] - resized[:, 1] * aspects) <= 0.5 + aspects / 2).all()  # rounded, and no more


class TestBuckets:
    def test_plain_data(self):
        for buckets in (default(), Buckets.fit(frame_of_sizes((500, 375)), step=32)):
            assert pickle.loads(pickle.dumps(buckets)) == buckets
            assert len(pickle.dumps(buckets)) < 1000

    def test_fit_takes_the_shapes_of_bucket_shapes(self):
        settings = {"resolution": (640, 480), "step": 32, "min_side": 320, "max_side": 900}
        assert Buckets.fit(frame_of_sizes((9, 9)), **settings).shapes == tuple(course.bucket_shapes(**settings))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"shapes": ()}, "shapes must hold at least one"),
            ({"shapes": ((0, 5),)}, "width must be an integer >= 1, got 0"),
        ],
    )
    def test_refused(self, options, said):
        with pytest.raises(ValueError, match=said):
            Buckets(**options)


class TestUprightSizes:
    def test_turned_by_exif(self):
        orientations = pd.array([1, 4, 5, 8, None], "Int64")
        widths, heights = upright_sizes(frame_of_sizes(*[(40, 30)] * 5, exif_orientation=orientations))
        assert widths.tolist() == [40, 40, 30, 30, 40]
        assert heights.tolist() == [30, 30, 40, 40, 30]
        assert widths.dtype == heights.dtype == np.int64

    def test_as_collected(self, tmp_path):
        exif = Image.Exif()
        exif[274] = 6
        Image.new("RGB", (40, 30)).save(tmp_path / "turned.jpg", exif=exif)
        Image.new("RGB", (40, 30)).save(tmp_path / "upright.jpg")
        dataset = lk.ImageDataset(lk.FolderStore(tmp_path))
        decoded = [tuple(dataset[index][0].shape[:0:-1]) for index in range(2)]
        assert list(zip(*upright_sizes(lk.collect_sizes(tmp_path)), strict=True)) == decoded == [(30, 40), (40, 30)]

    @pytest.mark.parametrize(
        ("frame", "said"),
        [
            (frame_of_sizes((4, 3), (None, 3)), r'1 images have no size, the first: 1\.jpg.*sizes\["width"\]'),
            (frame_of_sizes((4, 3))[:0], "sizes has no rows"),
            (frame_of_sizes((4, 3)).drop(columns="height"), "sizes has no column height"),
        ],
    )
    def test_refused(self, frame, said):
        with pytest.raises(ValueError, match=said):
            upright_sizes(frame)


def cropped_by_pillow(pixels: np.ndarray, resized: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    image = Image.fromarray(pixels).resize(resized, Image.Resampling.BILINEAR)
    left, top = (resized[0] - shape[0]) // 2, (resized[1] - shape[1]) // 2
    return np.asarray(image.crop((left, top, left + shape[0], top + shape[1])))


class TestCrop:
    @pytest.mark.parametrize("size", [(500, 375), (375, 501), (40, 30), (1500, 300), (96, 96), (96, 95)])
    def test_as_pillow_does_it(self, size):
        buckets = Buckets(tuple(course.bucket_shapes(96, step=8, min_side=48, max_side=192)))
        pixels = np.random.default_rng(3).integers(0, 256, (*size[::-1], 3), np.uint8)
        number, resized = buckets.select([size[0]], [size[1]])[0], buckets.resized([size[0]], [size[1]])[0].tolist()
        expected = cropped_by_pillow(pixels, tuple(resized), buckets.shapes[number])
        found = buckets.crop(torch.from_numpy(pixels).permute(2, 0, 1))
        assert found.dtype == torch.uint8
        assert found.shape == (3, *buckets.shapes[number][::-1])
        assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1

    def test_an_image_of_the_shape_is_the_same(self):
        image = torch.randint(256, (3, 512, 512), dtype=torch.uint8)
        assert torch.equal(default().crop(image), image)

    def test_a_strip_that_would_fill_the_memory(self):
        with pytest.raises(ValueError, match=r"30000 x 1 would be enlarged to 7680000 x 256 .*leave it out"):
            default().crop(torch.zeros(3, 1, 30_000, dtype=torch.uint8))
