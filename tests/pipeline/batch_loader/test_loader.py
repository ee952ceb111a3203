"""BatchLoader: the same batches for any number of threads, pixels of the plain path, nothing lost or left behind."""

import gc
import io
import itertools
import threading
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.course.oracles import oracle_files
from labkit.data import partial_jpeg as regions
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.crops import flips, middle_crops, random_crops, uniforms
from labkit.loading.fill import EncodedFiller
from tests.children import in_children

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@pytest.fixture(scope="module")
def photos(first_photos):
    return lk.FolderStore(first_photos(22))


@pytest.fixture(scope="module")
def camera(tmp_path_factory):
    return lk.FolderStore(
        lk.make_photos(tmp_path_factory.mktemp("camera") / "set", 3, profile="camera", progress=False)
    )


@pytest.fixture(scope="module")
def pixels(photos, tmp_path_factory):
    path = tmp_path_factory.mktemp("pixels") / "set.pixels"
    return lk.PixelStore.build(photos, path, short_side=128, engine="threads", progress=False)


def watched(store, look):
    """A store of the same images; `look(key)` comes before each is read."""
    return SimpleNamespace(keys=store.keys, read=lambda key: look(key) or store.read(key))


def solid(red):
    """A small image file of one color, which names it."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def decoded(store):
    return [lk.decode(store.read(key)) for key in store.keys()]  # noqa: SIM118


def stored(tmp_path, files):
    """A store of these files, all of one class."""
    (tmp_path / "class").mkdir()
    for name, data in files.items():
        (tmp_path / "class" / name).write_bytes(data)
    return lk.FolderStore(tmp_path)


def epoch_of(loader):
    batches = [(images.clone(), labels) for images, labels in loader]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def in_order(store, **arguments):
    """Random crops, in the order of the keys."""
    arguments = {"batch_size": 8, "shuffle": False, **arguments}
    return epoch_of(BatchLoader(store, **arguments))[0]


def plain(whole, *, antialias=True, size=224):
    """The same crops, cut out of images decoded whole."""
    draws = uniforms(0, 0, np.arange(len(whole)))
    crops = random_crops(draws, np.array([image.shape[1:] for image in whole]), SCALE, RATIO)
    rows = []
    for image, crop, flip in zip(whole, crops.tolist(), flips(draws, 0.5), strict=True):
        if antialias:
            row = F.resized_crop(image, *crop, [size, size], antialias=True)
        else:
            cut = F.crop(image, *crop).permute(1, 2, 0).numpy()
            row = torch.from_numpy(cv2.resize(cut, (size, size), interpolation=cv2.INTER_LINEAR)).permute(2, 0, 1)
        rows.append(row.flip(2) if flip else row)
    return torch.stack(rows)


def psnr_db(images, others):
    errors = (images.double() - others.double()).square().mean((1, 2, 3))
    return 10 * torch.log10(255**2 / errors.clamp(min=1e-9))


def left_threads():
    """Names of a loader's threads that are still there after a while: they end on their own, once it is gone."""
    gc.collect()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("labkit-batches")]
    for thread in ours:
        thread.join(5)
    return [thread.name for thread in ours if thread.is_alive()]


@pytest.fixture
def without_library(monkeypatch):
    regions.load_library.cache_clear()
    monkeypatch.setattr(regions, "_candidate_paths", lambda: [])
    yield
    regions.load_library.cache_clear()


class TestBatches:
    @pytest.mark.parametrize(("drop_last", "lengths"), [(False, [8, 8, 6]), (True, [8, 8])])
    def test_form(self, photos, drop_last, lengths):
        loader = BatchLoader(photos, batch_size=8, drop_last=drop_last)
        batches = list(loader)
        assert [len(labels) for _, labels in batches] == lengths
        assert len(loader) == len(lengths)
        images, labels = batches[0]
        assert images.shape == (8, 3, 224, 224)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.is_contiguous(memory_format=torch.channels_last)

    def test_every_image_once_with_its_label(self, tmp_path):
        for number in range(30):
            folder = tmp_path / f"class-{number % 4}"
            folder.mkdir(exist_ok=True)
            (folder / f"{number}.png").write_bytes(solid(8 * number))
        loader = BatchLoader(lk.FolderStore(tmp_path), size=8, batch_size=7)
        images, labels = epoch_of(loader)
        numbers = images[:, 0, 0, 0].div(8).long()
        assert sorted(numbers.tolist()) == list(range(30))
        assert torch.equal(labels, numbers % 4)
        assert loader.classes == [f"class-{number}" for number in range(4)]

    def test_evaluation_takes_the_middle(self, photos):
        images, _ = epoch_of(BatchLoader(photos, train=False, batch_size=5, scaled_decoding=False))
        whole = decoded(photos)
        crops = middle_crops(np.array([image.shape[1:] for image in whole]), 224).tolist()
        expected = [F.resized_crop(image, *crop, [224, 224]) for image, crop in zip(whole, crops, strict=True)]
        assert (images.int() - torch.stack(expected).int()).abs().max() <= 1


class TestSameBatches:
    @pytest.mark.parametrize("antialias", [True, False])
    def test_for_any_number_of_threads(self, photos, antialias):
        epochs = [
            epoch_of(BatchLoader(photos, batch_size=8, num_threads=number, antialias=antialias, prefetch_factor=ahead))
            for number, ahead in ((1, 1), (2, 2), (5, 7))
        ]
        for images, labels in epochs[1:]:
            assert torch.equal(images, epochs[0][0])
            assert torch.equal(labels, epochs[0][1])

    def test_epochs_differ_and_can_be_resumed(self, photos):
        loader = BatchLoader(photos, batch_size=8)
        first, second = epoch_of(loader), epoch_of(loader)
        assert not torch.equal(first[0], second[0])
        assert not torch.equal(first[1], second[1])
        resumed = BatchLoader(photos, batch_size=8)
        resumed.set_epoch(1)
        assert torch.equal(epoch_of(resumed)[0], second[0])
        assert resumed.epoch == 2

    def test_an_image_depends_on_the_seed_and_not_on_its_batch(self, photos):
        """Nor on the global generators, which stay as they are."""
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        one = in_order(photos, batch_size=3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        torch.manual_seed(5)
        assert torch.equal(in_order(photos, batch_size=22), one)
        assert not torch.equal(in_order(photos, seed=1), one)

    def test_ranks_share_the_images(self, photos):
        numbered = SimpleNamespace(keys=lambda: photos.keys(), read=photos.read)
        whole = in_order(photos)
        seen = []
        for rank in range(2):
            sampler = DistributedSampler(range(22), num_replicas=2, rank=rank, shuffle=True, seed=5)
            loader = BatchLoader(numbered, batch_size=4, sampler=sampler)
            images, _ = epoch_of(loader)
            seen += [next(i for i in range(22) if torch.equal(image, whole[i])) for image in images]
            other_order = list(sampler)
            epoch_of(loader)
            assert list(sampler) != other_order, "set_epoch reaches the sampler"
        assert sorted(seen) == list(range(22))


class TestPixels:
    @pytest.mark.parametrize("library", ["with libturbojpeg", "without"])
    @pytest.mark.parametrize(("antialias", "largest"), [(True, 1), (False, 0)], ids=["as torchvision", "as OpenCV"])
    def test_pixels_of_the_plain_path(self, photos, antialias, largest, library, request):
        if library == "without":
            request.getfixturevalue("without_library")
        got = in_order(photos, antialias=antialias, scaled_decoding=False)
        expected = plain(decoded(photos), antialias=antialias)
        assert (got.int() - expected.int()).abs().max() <= largest
        assert psnr_db(got, expected).min() >= 35

    def test_scaled_decoding_keeps_the_picture(self, camera):
        """Larger photos, smaller crops: scales of 1/2, 1/4 and 1/8."""
        for size in (224, 64):
            scaled, full = in_order(camera, size=size), in_order(camera, size=size, scaled_decoding=False)
            assert scaled.shape == (3, 3, size, size)
            assert not torch.equal(scaled, full), "something was scaled"
            assert psnr_db(scaled, full).min() > 38
            assert psnr_db(scaled, plain(decoded(camera), size=size)).min() > 38

    def test_a_shift_of_a_pixel_would_be_seen(self, camera):
        full = in_order(camera, scaled_decoding=False)
        assert psnr_db(full[..., 1:], full[..., :-1]).max() < 38

    def test_scaled_without_libturbojpeg(self, camera, without_library):
        assert psnr_db(in_order(camera), in_order(camera, scaled_decoding=False)).min() > 38

    def test_every_kind_of_file(self, tmp_path):
        """Turned by EXIF or not, CMYK, 16 bits, palettes, progressive, PNG and WebP: pixels as `decode` gives them."""
        exif, upright = Image.Exif(), io.BytesIO()
        exif[0x0112] = 1
        Image.effect_noise((90, 60), 60).convert("RGB").save(upright, "JPEG", exif=exif)
        store = stored(tmp_path, {**oracle_files(), "upright.jpg": upright.getvalue()})
        assert (in_order(store, size=48).int() - plain(decoded(store), size=48).int()).abs().max() <= 1

    @pytest.mark.parametrize("antialias", [True, False])
    def test_from_a_pixel_store(self, pixels, antialias):
        got = in_order(pixels, antialias=antialias, size=96)
        expected = plain([pixels[index][0] for index in range(len(pixels))], antialias=antialias, size=96)
        assert (got.int() - expected.int()).abs().max() <= 1

    def test_pixel_store_batches(self, photos, pixels, recwarn):
        one, two = (epoch_of(BatchLoader(pixels, batch_size=5, num_threads=number)) for number in (1, 3))
        assert torch.equal(one[0], two[0])
        folder = BatchLoader(photos, batch_size=5)
        assert torch.equal(one[1], epoch_of(folder)[1])
        assert folder.classes == pixels.classes
        assert not recwarn.list


class TestMemory:
    def test_kept_batches_stay_as_they_are(self, photos):
        loader = BatchLoader(photos, batch_size=4)
        copies, kept = [], []
        for images, _ in loader:
            kept.append(images)
            copies.append(images.clone())
        list(loader)
        gc.collect()
        assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))
        assert len({images.data_ptr() for images in kept}) == len(kept)

    def test_a_kept_part_keeps_its_batch(self, photos):
        loader = BatchLoader(photos, batch_size=4)
        part = next(iter(loader))[0][1:2].numpy()[0, :, 5:]
        copy = part.copy()
        for _ in range(3):
            list(loader)
        assert (part == copy).all()

    def test_memory_is_used_again(self, photos, monkeypatch):
        taken = []
        monkeypatch.setattr(np, "empty", lambda *shape, empty=np.empty: taken.append(shape) or empty(*shape))
        loader = BatchLoader(photos, batch_size=2, num_threads=1, prefetch_factor=1)
        for images, _ in itertools.chain(loader, loader):
            del images
        batches = [shape for shape, *_ in taken if shape == (2, 224, 224, 3)]
        assert len(batches) < 5 < 2 * len(loader)

    def test_pinned(self, cuda, photos):
        expected = in_order(photos, pin_memory=False)
        images = [images for images, _ in BatchLoader(photos, batch_size=8, shuffle=False)]
        assert all(batch.is_pinned() for batch in images)
        assert torch.equal(torch.cat(images), expected)


class TestErrors:
    def test_damaged(self, photos, tmp_path):
        good = photos.read(photos.keys()[0])
        store = stored(tmp_path, {"a.jpg": good, "bad.jpg": good[: len(good) // 2], "c.jpg": good})
        with pytest.raises(lk.DecodeError, match=r"class/bad\.jpg"):
            list(BatchLoader(store, batch_size=2))
        assert not left_threads()

    def test_skipped_images_are_counted(self, photos, tmp_path):
        """The others stay in their places."""
        good = photos.read(photos.keys()[0])
        bad = {"1-cut": good[:-100], "3-text": b"text", "8-torn": good[:600] + good[len(good) // 2 :]}
        files = {f"{name}.jpg": data for name, data in bad.items()}
        files |= {f"{number}.png": solid(20 * number) for number in (0, 2, 4, 5, 6, 7, 9)}
        options = {"batch_size": 10, "num_threads": 1, "shuffle": False, "on_error": "skip", "scale": (1, 1)}
        loader = BatchLoader(stored(tmp_path, files), **options)
        images, labels = epoch_of(loader)
        assert images[:, 0, 0, 0].div(20).tolist() == [0, 2, 4, 5, 6, 7, 9]
        assert len(labels) == 7
        assert sorted(skip.key for skip in loader.skipped) == [f"class/{name}.jpg" for name in bad]

    def test_a_batch_of_nothing_names_its_own_image(self, tmp_path):
        files = {"a.jpg": b"a", "b.jpg": b"b"}
        loader = BatchLoader(stored(tmp_path, files), batch_size=1, num_threads=1, shuffle=False, on_error="skip")
        with pytest.raises(lk.DecodeError, match=r"all 1 images .* were skipped, the first: class/a\.jpg"):
            list(loader)
        loader._skips.add("class/b.jpg", "class/b.jpg: an earlier epoch's")
        with pytest.raises(lk.DecodeError, match=r"the first: class/a\.jpg"):
            list(loader)

    def test_a_missing_file_is_named(self, photos):
        store = SimpleNamespace(keys=lambda: [*photos.keys(), "no/such.jpg"], read=photos.read)
        with pytest.raises(KeyError, match=r"no/such\.jpg") as caught:
            list(BatchLoader(store))
        assert "while loading no/such.jpg" in caught.value.__notes__

    def test_a_bomb(self, tmp_path, photos, monkeypatch):
        good = photos.read(photos.keys()[0])
        monkeypatch.setattr("labkit.loading.fill.MAX_PIXELS", 1000)
        monkeypatch.setattr("labkit.data.decode.MAX_PIXELS", 1000)
        with pytest.raises(lk.DecodeError, match="exceed the limit"):
            list(BatchLoader(stored(tmp_path, {"large.jpg": good})))

    def test_an_empty_store(self):
        with pytest.raises(ValueError, match="holds no image"):
            BatchLoader(SimpleNamespace(keys=lambda: [], read=len))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"size": 0}, {"batch_size": 0}, {"batch_size": 1.5}, {"num_threads": 0}, {"prefetch_factor": 0},
            {"scale": (0, 1)}, {"scale": (0.5, 0.1)}, {"scale": (0.1, 2)}, {"ratio": (0, 1)}, {"flip": 1.5},
            {"on_error": "ignore"}, {"shuffle": True, "sampler": range(3)},
        ],
        ids=str,
    )  # fmt: skip
    def test_arguments(self, photos, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            BatchLoader(photos, **wrong)


class TestThreads:
    def test_a_loop_that_is_left_ends_them(self, photos):
        for _ in BatchLoader(photos, batch_size=2):
            break
        assert not left_threads()

    def test_they_stay_for_all_epochs(self, photos):
        """OpenCV keeps memory for each thread that has ended."""
        seen = set()
        loader = BatchLoader(watched(photos, lambda key: seen.add(threading.get_ident())), batch_size=4, num_threads=2)
        for _ in range(4):
            list(loader)
        next(iter(loader))
        assert len(seen) <= 2
        del loader
        assert not left_threads()

    def test_a_forked_process_has_its_own(self, photos):
        loader = BatchLoader(photos, batch_size=5)
        first, second = epoch_of(loader)[0], epoch_of(loader)[0]
        loader.set_epoch(1)
        # Not torch.cat: a fork has no OpenMP threads, which torch would wait for.
        [again] = in_children("fork", lambda: np.concatenate([images.numpy() for images, _ in loader]), ())
        assert not torch.equal(first, second)
        assert (again == second.numpy()).all()

    @pytest.mark.parametrize(("options", "n_tasks"), [({}, 2), ({"reads_in_flight": 2}, 8)])
    def test_a_batch_is_as_few_tasks_as_keep_them_busy(self, photos, monkeypatch, options, n_tasks):
        """Local files: one task per thread. What comes from afar is decoded while the rest of the batch is read."""
        filled = []
        fill = EncodedFiller.fill
        monkeypatch.setattr(EncodedFiller, "fill", lambda self, *part: filled.append(len(part[1])) or fill(self, *part))
        list(BatchLoader(photos, batch_size=16, num_threads=2, drop_last=True, **options))
        assert filled == [16 // n_tasks] * n_tasks

    def test_a_loop_that_is_left_leaves_its_work(self, photos):
        read = []
        for _ in BatchLoader(watched(photos, read.append), batch_size=1, num_threads=1, prefetch_factor=15):
            break
        gc.collect()
        assert len(read) < 16

    def test_torch_starts_no_threads_under_them(self, photos):
        numbers = set()
        list(BatchLoader(watched(photos, lambda key: numbers.add(torch.get_num_threads())), num_threads=2))
        assert numbers == {1}

    def test_two_epochs_at_once(self, photos):
        loader = BatchLoader(photos, batch_size=5)
        expected = epoch_of(loader), epoch_of(loader)
        loader.set_epoch(0)
        pairs = list(zip(loader, loader, strict=True))
        for number in range(2):
            assert torch.equal(torch.cat([pair[number][0] for pair in pairs]), expected[number][0])

    def test_threads_of_torch_stay(self, photos):
        before = torch.get_num_threads()
        epoch_of(BatchLoader(photos, batch_size=8, num_threads=3))
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [before] == [torch.get_num_threads()]

    def test_ranks_on_one_machine_share_the_cores(self, photos, monkeypatch):
        monkeypatch.setattr("labkit.loading.torch_loader.usable_cores", lambda: 8)
        assert BatchLoader(photos).num_threads == 8
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert BatchLoader(photos).num_threads == 2


def test_compare_takes_it(photos):
    frame = lk.compare(
        {"a": lambda: BatchLoader(photos, batch_size=8)}, baseline="a", rounds=1, warmups=0, progress=False
    )
    assert frame.loc[0, ["batch_size", "num_workers", "n_settle_batches", "is_steady"]].tolist() == [8, 0, 2, True]
    assert frame.loc[0, "n_images"] > 22  # more than one pass
