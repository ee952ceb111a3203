"""The limits do exactly the work that they claim, on every thread, once; what they measure is `compare`'s affair."""

import io
import threading
from collections import Counter

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import labkit as lk
from labkit.loading.limits import decode_limit, memcpy_limit, write_limit
from tests.image_files import encoded
from tests.loaders import solid
from tests.memory_store import MemoryStore


@pytest.fixture(scope="module")
def photos(pictures):
    """70 JPEGs: one batch of 64, and six more."""
    files = [pictures.read(key) for key in pictures.keys()]  # noqa: SIM118
    return MemoryStore({f"{number:02}.jpg": files[number % 12] for number in range(70)})


def noted(monkeypatch, module, name):
    """What a function is handed, and what it gives."""
    calls, original = [], getattr(module, name)

    def function(*arguments, **options):
        given = original(*arguments, **options)
        calls.append((*arguments, given))
        return given

    monkeypatch.setattr(module, name, function)
    return calls


@pytest.fixture
def decoded(monkeypatch):
    return noted(monkeypatch, simplejpeg, "decode_jpeg")


@pytest.fixture
def copied(monkeypatch):
    return noted(monkeypatch, np, "copyto")


class TestDecodeLimit:
    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_decodes_every_image_once_at_full_size(self, photos, decoded, num_threads):
        limit = decode_limit(photos, num_threads=num_threads)
        assert (len(limit), limit.batch_size, limit.num_workers, limit.num_threads) == (2, 64, 0, num_threads)
        for _ in range(2):
            decoded.clear()
            assert list(limit) == [64, 6]
            assert Counter(data for data, _, _ in decoded) == Counter(photos.files.values())
            for data, _, pixels in decoded:
                assert pixels.shape == (*simplejpeg.decode_jpeg_header(data)[:2], 3)

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_takes_all_formats_and_names_what_is_broken(self, pictures, num_threads):
        data = pictures.read(pictures.keys()[0])
        image = Image.open(io.BytesIO(data))
        files = {"a.png": solid(9), "b.jpg": encoded(image.convert("L")), "c.webp": encoded(image, "WEBP")}
        assert list(decode_limit(MemoryStore(files), num_threads=num_threads)) == [3]
        limit = decode_limit(MemoryStore({**files, "broken.jpg": data[:1500]}), num_threads=num_threads)
        before = threading.active_count()
        with pytest.raises(lk.DecodeError, match=r"broken\.jpg: turbojpeg cannot decode 1500 bytes: .*truncated"):
            list(limit)
        assert threading.active_count() == before


class TestMemoryLimits:
    @pytest.mark.parametrize(("n_images", "counts"), [(1, [1]), (64, [64]), (150, [64, 64, 22])])
    def test_copy_whole_batches(self, copied, n_images, counts):
        limit = memcpy_limit(n_images, size=32, num_threads=2)
        assert (len(limit), limit.batch_size, limit.num_workers) == (len(counts), 64, 0)
        assert list(limit) == counts
        assert sorted(len(target) for target, _, _ in copied) == sorted(counts)
        for target, source, _ in copied:
            assert target.shape[1:] == source.shape[1:] == (32, 32, 3)
            assert target.dtype == np.uint8
            assert (target == 1).all()  # what the sources were filled with
            assert not np.shares_memory(target, source)

    @pytest.mark.parametrize(("n_images", "counts"), [(1, [1]), (150, [64, 64, 22])])
    def test_write_whole_batches_of_floats_and_nothing_else(self, monkeypatch, n_images, counts):
        blocks, fill = [], np.full
        monkeypatch.setattr(np, "full", lambda *options: blocks.append(fill(*options)) or blocks[-1])
        assert list(write_limit(n_images, size=16, num_threads=2)) == counts
        [block] = blocks
        assert block.dtype == np.float32
        assert block.shape[1:] == (64, 16, 16, 3)
        assert (block == 0).any(axis=(2, 3, 4)).sum() == n_images
        assert block.nbytes >= 128 * 2**20
