"""The limits do exactly the work that they claim, on every thread, once; what they measure is `compare`'s affair."""

import itertools
import threading
from collections import Counter

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import labkit as lk
from labkit import course
from labkit.errors import DecodeError
from labkit.loading import limits


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return lk.FolderStore(lk.make_photos(tmp_path_factory.mktemp("photos"), 70, progress=False))


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
    return noted(monkeypatch, limits.np, "copyto")


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_image_is_decoded_once_at_full_size(photos, decoded, num_threads):
    limit = course.decode_limit(photos, num_threads=num_threads)
    assert (len(limit), limit.batch_size, limit.num_workers, limit.num_threads) == (2, 64, 0, num_threads)
    for _ in range(2):
        decoded.clear()
        assert list(limit) == [64, 6]
        assert Counter(data for data, _, _ in decoded) == Counter(map(photos.read, photos.keys()))
        for data, _, pixels in decoded:
            assert pixels.shape == (*simplejpeg.decode_jpeg_header(data)[:2], 3)


def test_all_threads_take_part_and_files_were_read_before(photos, monkeypatch):
    both = threading.Barrier(2, timeout=20)  # broken, if one thread does it all

    def decode_jpeg(data, colorspace):
        if not both.broken and len(seen) < 2 and threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()

    seen, limit = set(), course.decode_limit(photos, num_threads=2)
    monkeypatch.setattr(photos, "read", lambda key: pytest.fail("read while decoding"))
    monkeypatch.setattr(simplejpeg, "decode_jpeg", decode_jpeg)
    assert sum(limit) == 70
    assert len(seen) == 2


def test_a_count_comes_when_so_many_are_done(photos, decoded):
    passes = iter(course.decode_limit(photos, num_threads=1))
    assert next(passes) == 64
    assert len(decoded) >= 64
    assert next(passes) == 6
    assert len(decoded) == 70
    assert next(passes, "end") == "end"


def mixed(folder):
    folder.mkdir()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
    image.save(folder / "a.png")
    image.convert("L").save(folder / "b.jpg")
    image.save(folder / "c.webp")
    return lk.FolderStore(folder)


@pytest.mark.parametrize("decoder", ["turbojpeg", "pil", "cv2", "torchvision"])
def test_other_decoders_and_other_formats(tmp_path, decoder, monkeypatch):
    keys, original = [], limits.decode
    monkeypatch.setattr(
        limits, "decode", lambda data, decoder, key: keys.append((key, decoder)) or original(data, decoder, key=key)
    )
    assert list(course.decode_limit(mixed(tmp_path / "set"), decoder=decoder)) == [3]
    by_turbojpeg = ["b.jpg"] if decoder == "turbojpeg" else []
    assert sorted(keys) == [(key, decoder) for key in ("a.png", "b.jpg", "c.webp") if key not in by_turbojpeg]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_broken_image_is_named_and_nothing_goes_on(photos, tmp_path, num_threads):
    store = mixed(tmp_path / "set")
    (store.root / "broken.jpg").write_bytes(photos.read(photos.keys()[0])[:5000])
    limit = course.decode_limit(lk.FolderStore(store.root), num_threads=num_threads)
    before = threading.active_count()
    with pytest.raises(DecodeError, match=r"broken\.jpg: turbojpeg cannot decode 5000 bytes: the file is truncated"):
        list(limit)
    assert threading.active_count() == before


def test_leaving_early_ends_the_threads(photos, decoded, monkeypatch):
    """The first batch is out before anything behind it is decoded: what then is, the threads had in hand already."""
    left, decode, begun = threading.Event(), simplejpeg.decode_jpeg, itertools.count()

    def held_back(*arguments, **options):
        if next(begun) >= 64:
            left.wait(10)
        return decode(*arguments, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", held_back)
    before = threading.active_count()
    batches = iter(course.decode_limit(photos, num_threads=2))
    next(batches)
    waking = threading.Timer(1, left.set)
    waking.start()
    batches.close()
    waking.join()
    assert threading.active_count() == before
    assert 64 <= len(decoded) <= 66


@pytest.mark.parametrize(("n_images", "counts"), [(1, [1]), (64, [64]), (150, [64, 64, 22])])
def test_batches_are_copied(copied, n_images, counts):
    limit = course.memcpy_limit(n_images, size=32, num_threads=2)
    assert (len(limit), limit.batch_size, limit.num_workers) == (len(counts), 64, 0)
    assert list(limit) == counts
    assert sorted(len(target) for target, _, _ in copied) == sorted(counts)
    for target, source, _ in copied:
        assert target.shape[1:] == source.shape[1:] == (32, 32, 3)
        assert target.dtype == np.uint8
        assert (target == 1).all()  # what the sources were filled with
        assert not np.shares_memory(target, source)


def test_blocks_exceed_the_caches_and_take_turns(copied):
    limit = course.memcpy_limit(130, size=224, num_threads=2)
    list(limit)
    target, source, _ = copied.pop()
    assert min(target.base.nbytes, source.base.nbytes) >= 128 * 2**20
    n_blocks = len(source.base)
    copied.clear()
    for _ in range(n_blocks):  # three batches each
        list(limit)
    for memory in ([target for target, _, _ in copied], [source for _, source, _ in copied]):
        used = Counter(block.__array_interface__["data"][0] for block in memory)
        assert len(used) == n_blocks
        assert set(used.values()) == {3}


def test_no_two_threads_share_a_block(monkeypatch, copied):
    monkeypatch.setattr(limits, "_BLOCKS_BYTES", 1)
    list(course.memcpy_limit(64, size=8, num_threads=3))
    assert len(copied[0][0].base) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda store: course.decode_limit(store, decoder="jpeg"), "decoder must be one of pil, .*, got 'jpeg'"),
        (lambda store: course.decode_limit(store, num_threads=0), "num_threads must be an integer >= 1, got 0"),
        (lambda store: course.memcpy_limit(0), "n_images must be an integer >= 1, got 0"),
        (lambda store: course.memcpy_limit(1, size=0), "size must be an integer >= 1, got 0"),
        (lambda store: course.memcpy_limit(1, num_threads=-1), "num_threads must be an integer >= 1, got -1"),
    ],
)
def test_bad_arguments(photos, make, message):
    with pytest.raises(ValueError, match=message):
        make(photos)


def test_default_is_every_usable_core(photos):
    assert course.decode_limit(photos).num_threads == course.memcpy_limit(1, size=8).num_threads == lk.usable_cores()


def test_both_stand_in_one_frame(photos):
    decode, memcpy = course.decode_limit(photos), course.memcpy_limit(70)
    runs = lk.compare({"decode": lambda: decode, "memcpy": lambda: memcpy}, baseline="decode", rounds=1, progress=False)
    assert set(runs.n_images) == {70}
    assert set(runs.batch_size) == {64}
    assert (runs.images_per_s > 0).all()


@pytest.mark.parametrize(("n_images", "counts"), [(1, [1]), (150, [64, 64, 22])])
def test_batches_of_floats_are_written_and_no_others(monkeypatch, n_images, counts):
    blocks, fill = [], np.full
    monkeypatch.setattr(limits.np, "full", lambda *options: blocks.append(fill(*options)) or blocks[-1])
    limit = limits.write_limit(n_images, size=16, num_threads=2)
    assert list(limit) == counts
    assert blocks[0].dtype == np.float32
    assert blocks[0].shape[1:] == (64, 16, 16, 3)
    assert (blocks[0] == 0).any(axis=(2, 3, 4)).sum() == n_images
    assert blocks[0].nbytes >= 128 * 2**20


def test_codes_are_read_at_an_eighth(photos, decoded):
    assert list(limits.entropy_limit(photos, num_threads=2)) == [64, 6]
    assert Counter(data for data, _, _ in decoded) == Counter(map(photos.read, photos.keys()))
    for data, _, pixels in decoded:
        assert pixels.shape[:2] == tuple(-(-side // 8) for side in simplejpeg.decode_jpeg_header(data)[:2])
