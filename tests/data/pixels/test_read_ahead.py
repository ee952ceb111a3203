"""Hints to the kernel: the rows that are about to be used, and none for a file that is in memory or read in order."""

import itertools
import mmap

import numpy as np
import pytest
import torch
from PIL import Image

from labkit import BatchLoader, PixelStore
from labkit.course import evict
from labkit.data import pixels as read_ahead
from labkit.data.blobs import resident_fraction

COUNT, SIDE = 200, 100  # 30 kB an image, so that a read-ahead of 128 KiB would show
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("pixels")
    (root / "images").mkdir()
    for number in range(COUNT):
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE + number % 3, 3), np.uint8)
        Image.fromarray(noise).save(root / "images" / f"{number:03}.png", compress_level=0)
    return PixelStore.build(root / "images", root / "all.pixels", short_side=SIDE, progress=False).path


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    """(start, size) of each hint, which the kernel gets nothing of."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "_advise", lambda view, *place: found.append(place))
    return found


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """What the kernel counts as read from disks; grows by `step` from look to look."""
    state = {"reads": 0, "step": 0, "looks": 0}

    def count() -> int:
        state["reads"] += state["step"]
        state["looks"] += 1
        return state["reads"]

    monkeypatch.setattr(read_ahead, "_count_reads", count)
    return state


@pytest.fixture
def unread(path, tmp_path):
    """A copy that nothing has mapped yet."""
    copy = tmp_path / "copy.pixels"
    copy.write_bytes(path.read_bytes())
    evict([copy])
    if resident_fraction([copy]):
        pytest.skip("the kernel kept an evicted file: a tmpfs?")
    return copy


class TestDiskReads:
    def test_reads_are_expected_until_two_looks_find_none(self, counted):
        reads = read_ahead._DiskReads()
        assert [reads.are_likely(64) for _ in range(5)] == [True, True, False, False, False]
        counted["step"] = 1
        assert [reads.are_likely(64) for _ in range(3)] == [True, True, True]
        counted["step"] = 0
        assert [reads.are_likely(64) for _ in range(3)] == [True, False, False]

    @pytest.mark.parametrize("n_images", [1, 8, 64])
    def test_the_counters_are_looked_at_once_in_64_images(self, counted, n_images):
        reads = read_ahead._DiskReads()
        for _ in range(640 // n_images):
            reads.are_likely(n_images)
        assert counted["looks"] == 10

    def test_the_kernel_counts_what_is_read(self, unread):
        before = read_ahead._count_reads()
        unread.read_bytes()
        assert read_ahead._count_reads() > before


class TestHints:
    def test_they_cover_the_rows_and_begin_with_a_page(self, path, asked):
        store = PixelStore(path)
        parts = {150: (3, 40), 7: (0, 1), 8: (99, 1), 0: (0, SIDE)}
        store.read_ahead(list(parts), parts.values())
        pixels = np.memmap(path, np.uint8, "r")
        for (index, (top, height)), (start, size) in zip(parts.items(), asked, strict=True):
            expected = store.pixels(index)[top : top + height].tobytes()
            first = pixels.tobytes().find(expected)
            assert start == first // PAGE * PAGE
            assert start + size == first + len(expected)

    def test_images_in_order_are_left_to_the_kernel(self, path, asked):
        store = PixelStore(path)
        store.read_ahead(range(10, 18), itertools.repeat((0, SIDE), 8))
        assert asked == []
        store.read_ahead([10, 12, 11, 13], itertools.repeat((0, SIDE), 4))
        assert len(asked) == 4
        for index in (3, -2, 199, 0):
            store[index]
        assert len(asked) == 8

    def test_a_cached_file_gets_none(self, path, asked, counted):
        store = PixelStore(path)
        order = np.random.default_rng(0).permutation(COUNT).tolist()
        for index in order:
            store[index]
        assert 0 < len(asked) <= 128
        asked.clear()
        for index in order:
            store[index]
        assert asked == []

    def test_the_crops_of_a_loader_are_asked_for(self, path, asked, counted):
        counted["step"] = 1
        store = PixelStore(path)
        list(BatchLoader(store, size=32, batch_size=50, num_threads=1))
        assert len(asked) == COUNT
        image_bytes = SIDE * (SIDE + 2) * 3
        assert np.mean([size for _, size in asked]) < 0.9 * image_bytes

    def test_refused_hints_change_nothing(self, path, monkeypatch):
        store, other = PixelStore(path), PixelStore(path)

        def refuse(*arguments: object) -> None:
            raise OSError("no hints today")

        monkeypatch.setattr(read_ahead, "_advise", refuse)
        for index in (9, 4):
            assert torch.equal(store[index][0], torch.from_numpy(other.pixels(index).copy()).permute(2, 0, 1))


def test_of_a_random_order_only_the_images_are_read(unread):
    store = PixelStore(unread)
    store[0]
    pages = unread.stat().st_size / PAGE
    evict([unread])  # all but what is mapped
    before = resident_fraction([unread]) * pages
    for index in (150, 90):
        store[index]
    image_pages = SIDE * (SIDE + 2) * 3 / PAGE
    assert resident_fraction([unread]) * pages - before <= 2 * (image_pages + 3)
