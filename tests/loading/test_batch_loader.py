"""BatchLoader: pixels of the plain path, each image once with its label, nothing lost, and kept batches stay."""

import copy
import itertools

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.course.oracles import oracle_files
from labkit.data import partial_jpeg
from labkit.loading.crops import flips, middle_crops, random_crops, uniforms
from tests.image_files import encoded
from tests.loaders import same, solid, store_that_reads
from tests.memory_store import MemoryStore

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = {"dtype": torch.bfloat16, "mean": MEAN, "std": STD}


@pytest.fixture(scope="module")
def photos(first_photos):
    return lk.FolderStore(first_photos(8))


@pytest.fixture(scope="module")
def camera(tmp_path_factory):
    """Larger photos, of which small crops are decoded at 1/2, 1/4 and 1/8."""
    root = tmp_path_factory.mktemp("camera") / "set"
    return lk.FolderStore(lk.make_photos(root, 2, profile="camera", progress=False))


@pytest.fixture
def source(request, pictures, pixels):
    """A store of files, or of their pixels."""
    return pixels if request.param == "pixels" else pictures


files_and_pixels = pytest.mark.parametrize("source", ["files", "pixels"], indirect=True)


def loader_of(store, **options):
    return lk.BatchLoader(store, **{"size": 32, "batch_size": 5, **options})


def epoch_of(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def in_order(store, **options):
    """Random crops, in the order of the keys."""
    return epoch_of(loader_of(store, shuffle=False, **options))[0]


def decoded(store):
    return [lk.decode(store.read(key)) for key in store.keys()]  # noqa: SIM118


def plain(whole, *, antialias=True, size=32):
    """The same crops, cut out of images decoded whole."""
    draws = uniforms(0, 0, np.arange(len(whole)))
    crops = random_crops(draws, np.array([image.shape[1:] for image in whole]), (0.08, 1.0), (3 / 4, 4 / 3))
    images = []
    for image, crop, flip in zip(whole, crops.tolist(), flips(draws, 0.5), strict=True):
        if antialias:
            row = F.resized_crop(image, *crop, [size, size], antialias=True)
        else:
            cut = F.crop(image, *crop).permute(1, 2, 0).numpy()
            row = torch.from_numpy(cv2.resize(cut, (size, size), interpolation=cv2.INTER_LINEAR)).permute(2, 0, 1)
        images.append(row.flip(2) if flip else row)
    return torch.stack(images)


def largest_difference(images, others):
    return (images.int() - others.int()).abs().max()


def psnr_db(images, others):
    errors = (images.double() - others.double()).square().mean((1, 2, 3))
    return 10 * torch.log10(255**2 / errors.clamp(min=1e-9))


@pytest.fixture(params=["with libturbojpeg", "without"])
def library(request, monkeypatch):
    """Two decoders of JPEGs: of parts, and of whole images where the library is missing."""
    if request.param == "without":
        monkeypatch.setenv(partial_jpeg.LIBRARY_VARIABLE, "/no/such/library.so")
    partial_jpeg.load_library.cache_clear()
    yield request.param
    partial_jpeg.load_library.cache_clear()


class TestBatches:
    @pytest.mark.parametrize(("drop_last", "lengths"), [(False, [5, 5, 2]), (True, [5, 5])])
    def test_are_images_and_labels(self, pictures, drop_last, lengths):
        loader = loader_of(pictures, drop_last=drop_last)
        batches = list(loader)
        assert [len(labels) for _, labels in batches] == lengths
        assert len(loader) == len(lengths)
        images, labels = batches[0]
        assert images.shape == (5, 3, 32, 32)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert images.is_contiguous(memory_format=torch.channels_last)

    def test_hold_every_image_once_with_its_label(self):
        store = MemoryStore({f"class-{number % 4}/{number}.png": solid(8 * number) for number in range(30)})
        loader = loader_of(store, size=8, batch_size=7)
        images, labels = epoch_of(loader)
        numbers = images[:, 0, 0, 0].div(8).long()
        assert sorted(numbers.tolist()) == list(range(30))
        assert torch.equal(labels, numbers % 4)
        assert loader.classes == [f"class-{number}" for number in range(4)]

    @pytest.mark.parametrize("antialias", [True, False])
    @files_and_pixels
    def test_are_the_same_for_any_number_of_threads(self, source, antialias):
        epochs = [
            list(loader_of(source, num_threads=number, antialias=antialias, prefetch_factor=ahead))
            for number, ahead in ((1, 1), (2, 2), (5, 7))
        ]
        assert same(epochs[1:], [epochs[0]] * 2)

    def test_differ_from_epoch_to_epoch_and_an_epoch_can_be_set(self, pictures):
        loader = loader_of(pictures)
        first, second = epoch_of(loader), epoch_of(loader)
        assert not torch.equal(first[0], second[0])
        again = loader_of(pictures)
        again.set_epoch(1)
        assert same(epoch_of(again), second)
        assert again.epoch == 2

    def test_depend_on_the_seed_and_neither_on_each_other_nor_on_the_global_generators(self, pictures):
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        one = in_order(pictures, batch_size=3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        torch.manual_seed(5)
        assert torch.equal(in_order(pictures, batch_size=12), one)
        assert not torch.equal(in_order(pictures, seed=1), one)

    def test_of_ranks_are_those_of_torchs_sampler_in_each_epoch(self):
        store = MemoryStore({f"{number:02}/x.png": solid(0) for number in range(12)})  # the label says which
        for rank in range(2):
            sampler, oracle = (DistributedSampler(range(12), num_replicas=2, rank=rank, seed=5) for _ in range(2))
            loader = loader_of(store, sampler=sampler)
            for epoch in range(2):
                oracle.set_epoch(epoch)
                assert epoch_of(loader)[1].tolist() == list(oracle)


class TestPixels:
    @pytest.mark.parametrize(("antialias", "largest"), [(True, 1), (False, 0)], ids=["as torchvision", "as OpenCV"])
    def test_are_those_of_the_plain_path(self, photos, antialias, largest, library):
        options = {"antialias": antialias, "size": 224}
        got = in_order(photos, scaled_decoding=False, **options)
        expected = plain(decoded(photos), **options)
        assert largest_difference(got, expected) <= largest
        assert psnr_db(got, expected).min() >= 35

    def test_of_scaled_decoding_keep_the_picture(self, camera, library):
        whole = decoded(camera)
        for size in (224, 64):
            scaled, full = in_order(camera, size=size), in_order(camera, size=size, scaled_decoding=False)
            assert not torch.equal(scaled, full), "something was scaled"
            assert psnr_db(scaled, full).min() > 38
            assert psnr_db(scaled, plain(whole, size=size)).min() > 38
            if size == 224:
                assert psnr_db(full[..., 1:], full[..., :-1]).max() < 38, "a shift of a pixel would be seen"

    def test_of_every_kind_of_file_are_those_that_decode_gives(self):
        """Turned by EXIF or not, CMYK, 16 bits, palettes, progressive, PNG and WebP."""
        exif = Image.Exif()
        exif[0x0112] = 1
        upright = encoded(Image.effect_noise((90, 60), 60).convert("RGB"), exif=exif)
        files = {**oracle_files(), "upright.jpg": upright}
        store = MemoryStore({f"class/{name}": data for name, data in files.items()})
        assert largest_difference(in_order(store, size=48), plain(decoded(store), size=48)) <= 1

    @pytest.mark.parametrize("antialias", [True, False])
    def test_of_a_pixel_store_are_what_it_holds(self, pictures, pixels, antialias, recwarn):
        got = in_order(pixels, antialias=antialias, size=48)
        whole = [pixels[index][0] for index in range(len(pixels))]
        assert largest_difference(got, plain(whole, antialias=antialias, size=48)) <= 1
        assert torch.equal(epoch_of(loader_of(pixels))[1], epoch_of(loader_of(pictures))[1])
        assert loader_of(pixels).classes == pixels.classes
        assert not recwarn.list

    def test_for_evaluation_are_the_middle(self, pictures):
        images, _ = epoch_of(loader_of(pictures, train=False, scaled_decoding=False))
        whole = decoded(pictures)
        crops = middle_crops(np.array([image.shape[1:] for image in whole]), 32).tolist()
        expected = [F.resized_crop(image, *crop, [32, 32]) for image, crop in zip(whole, crops, strict=True)]
        assert largest_difference(images, torch.stack(expected)) <= 1

    @pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
    @files_and_pixels
    def test_as_floats_are_those_of_v2_on_the_batch_of_bytes(self, source, memory_format):
        """To the last bit: a half type is rounded once."""
        options = {"memory_format": memory_format, "num_threads": 2}
        bytes_of_batches = [images for images, _ in loader_of(source)]
        planes = [images for images, _ in loader_of(source, **options)]
        assert same(planes, bytes_of_batches)
        assert all(images.is_contiguous(memory_format=memory_format) for images in planes)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for scaling in ({}, {"mean": MEAN, "std": STD}):
                steps = [v2.ToDtype(torch.float32, scale=True), *([v2.Normalize(**scaling)] if scaling else [])]
                loader = loader_of(source, dtype=dtype, **scaling, **options)
                for (images, _), plain_bytes in zip(loader, bytes_of_batches, strict=True):
                    assert images.is_contiguous(memory_format=memory_format)
                    assert same(images, v2.Compose(steps)(plain_bytes).to(dtype))


class TestMemory:
    @pytest.mark.parametrize("options", [{}, HALVES], ids=["bytes", "floats"])
    def test_of_batches_that_are_kept_is_not_overwritten(self, pictures, options):
        loader = loader_of(pictures, batch_size=2, **options)
        kept = [(images, images.clone()) for images, _ in loader]
        assert len({images.data_ptr() for images, _ in kept}) == 6
        part = kept.pop()[0][1:2, :, 5:]  # the rest of its batch is let go
        part = part if options else part.numpy()
        before = copy.deepcopy(part)
        for _ in range(3):
            list(loader)
        assert all(torch.equal(*pair) for pair in kept)
        assert (part == before).all()

    def test_of_batches_that_are_let_go_is_used_again(self, pictures, monkeypatch):
        taken = []
        monkeypatch.setattr(np, "empty", lambda *shape, empty=np.empty: taken.append(shape) or empty(*shape))
        loader = loader_of(pictures, batch_size=2, num_threads=1, prefetch_factor=1)
        for images, _ in itertools.chain(loader, loader):
            del images
        batches = [shape for shape, *_ in taken if shape == (2, 32, 32, 3)]
        assert len(batches) < 5 < 2 * len(loader)

    def test_is_pinned_where_there_is_a_device(self, cuda, pictures):
        expected = in_order(pictures, pin_memory=False)
        images = [images for images, _ in loader_of(pictures, shuffle=False)]
        assert all(batch.is_pinned() for batch in images)
        assert torch.equal(torch.cat(images), expected)


class TestErrors:
    def test_name_a_damaged_image(self, photos):
        good = photos.read(photos.keys()[0])
        store = MemoryStore({"class/a.jpg": good, "class/bad.jpg": good[: len(good) // 2], "class/c.jpg": good})
        with pytest.raises(lk.DecodeError, match=r"class/bad\.jpg"):
            list(loader_of(store, batch_size=2))

    def test_name_a_missing_image(self, pictures):
        def read(key):
            raise KeyError(key)

        with pytest.raises(KeyError, match=r"class0/00\.jpg") as caught:
            list(loader_of(store_that_reads(pictures, read), batch_size=1, num_threads=1, shuffle=False))
        assert "while loading class0/00.jpg" in caught.value.__notes__

    @pytest.mark.parametrize("reads_in_flight", [None, 3])
    def test_that_are_skipped_are_listed_and_leave_no_gap(self, photos, tmp_path, reads_in_flight):
        good = photos.read(photos.keys()[0])
        bad = {"1-cut": good[:-100], "3-text": b"text", "8-torn": good[:600] + good[len(good) // 2 :], "95": good}
        files = {f"{name}.jpg": data for name, data in bad.items()}
        files |= {f"{number}.png": solid(20 * number) for number in (0, 2, 4, 5, 6, 7, 9)}
        (tmp_path / "class").mkdir()
        for name, data in files.items():
            (tmp_path / "class" / name).write_bytes(data)
        options = {"batch_size": 11, "num_threads": 1, "on_error": "skip", "scale": (1, 1)}
        loader = loader_of(tmp_path, shuffle=False, reads_in_flight=reads_in_flight, **options)
        (tmp_path / "class" / "95.jpg").unlink()  # gone since it was listed
        [(images, labels)] = loader
        assert images[:, 0, 0, 0].div(20).tolist() == [0, 2, 4, 5, 6, 7, 9]
        assert labels.tolist() == [0] * 7
        assert sorted(skip.key for skip in loader.skipped) == [f"class/{name}.jpg" for name in bad]
        floats = in_order(tmp_path, dtype=torch.float32, **options)
        assert torch.equal(floats, v2.functional.to_dtype(images, torch.float32, scale=True))

    def test_of_a_batch_of_nothing_name_an_image_of_it(self):
        store = MemoryStore({"class/a.png": solid(1), "class/b.png": b"b", "class/c.png": b"c", "class/d.png": b"d"})
        batches = iter(loader_of(store, batch_size=2, num_threads=1, shuffle=False, on_error="skip"))
        assert len(next(batches)[1]) == 1  # what was skipped before is not what is wrong now
        with pytest.raises(lk.DecodeError, match=r"all 2 images .* were skipped, the first: class/c\.png"):
            next(batches)

    def test_refuse_an_image_of_too_many_pixels_though_a_crop_of_it_would_do(self):
        bomb = encoded(Image.new("L", (20_000, 9_000)))  # 180 million, of which libjpeg-turbo could decode a part
        with pytest.raises(lk.DecodeError, match=r"class/large\.jpg.* exceeds? (the )?limit"):
            list(loader_of(MemoryStore({"class/large.jpg": bomb})))

    @pytest.mark.parametrize(("options", "message"), [
        ({"size": 0}, "size"), ({"batch_size": 0}, "batch_size"), ({"batch_size": 1.5}, "batch_size"),
        ({"num_threads": 0}, "num_threads"), ({"prefetch_factor": 0}, "prefetch_factor"), ({"flip": 1.5}, "flip"),
        ({"scale": (0, 1)}, "scale"), ({"scale": (0.5, 0.1)}, "scale"), ({"scale": (0.1, 2)}, "scale"),
        ({"ratio": (0, 1)}, "ratio"), ({"on_error": "ignore"}, "on_error"),
        ({"shuffle": True, "sampler": range(3)}, "got shuffle=True and a sampler"),
        ({"num_processes": -1}, "num_processes must be an integer >= 0, got -1"),
        ({"num_processes": 1, "on_error": "skip"}, "num_processes=0"),
        ({"reads_in_flight": 0}, "reads_in_flight must be an integer >= 1"),
        ({"reads_in_flight": 2.5}, "reads_in_flight must be an integer >= 1"),
        ({"reads_in_flight": True}, "reads_in_flight must be an integer >= 1"),
        ({"dtype": torch.float64}, r"dtype must be one of torch.uint8, torch.float32, .*, got torch.float64"),
        ({"memory_format": torch.preserve_format}, r"memory_format must be one of torch.channels_last, torch.contig"),
        ({"mean": MEAN, "std": STD}, r"mean and std need floats: pass dtype=torch.float32"),
        ({"dtype": torch.float32, "mean": MEAN}, r"pass both mean and std, or neither: got mean=.*, std=None"),
        ({**HALVES, "std": (0.2, 0, 0.2)}, r"std must be three numbers > 0, .*\(0.2, 0, 0.2\)"),
        ({**HALVES, "mean": MEAN[:1]}, r"mean must be three numbers, for red, green and"),
        ({**HALVES, "mean": (0, 0, np.nan)}, r"mean must be three numbers, for red"),
        ({**HALVES, "mean": (124, 116, 104)}, "divide by 255"),
    ], ids=str)  # fmt: skip
    def test_of_wrong_arguments_name_them(self, pictures, options, message):
        with pytest.raises(ValueError, match=message):
            loader_of(pictures, **options)

    def test_of_a_source_that_will_not_do_say_why(self, pixels):
        with pytest.raises(ValueError, match="reads_in_flight=4 is for encoded images"):
            loader_of(pixels, reads_in_flight=4)
        with pytest.raises(ValueError, match="holds no image"):
            loader_of(MemoryStore({}))


class TestCrops:
    """Several crops of each image."""

    CROPS = ((48, (0.25, 1.0), 2), (16, (0.05, 0.25), 3))

    @files_and_pixels
    def test_the_first_is_that_of_a_loader_of_one_and_each_is_drawn_anew(self, source):
        options = {"seed": 3, "scaled_decoding": False}
        several = lk.BatchLoader(source, batch_size=4, crops=self.CROPS, **options)
        one = lk.BatchLoader(source, batch_size=4, size=48, scale=(0.25, 1.0), **options)
        for _ in range(2):
            for (crops, labels), (images, expected) in zip(several, one, strict=True):
                assert [tuple(crop.shape[1:]) for crop in crops] == [(3, 48, 48)] * 2 + [(3, 16, 16)] * 3
                assert torch.equal(crops[0], images)
                assert torch.equal(labels, expected)
                assert not any(torch.equal(*pair) for pair in itertools.combinations(crops[2:], 2))
                assert not torch.equal(*crops[:2])

    def test_each_has_its_own_share_of_the_image(self):
        """The color of each pixel says where it was."""
        rows, columns = np.mgrid[:256, :256]
        image = Image.fromarray(np.stack([rows, columns, rows * 0], 2).astype(np.uint8))
        store = MemoryStore({f"a/{number}.png": encoded(image, "PNG") for number in range(64)})
        [(crops, _)] = lk.BatchLoader(store, batch_size=64, crops=self.CROPS, antialias=False)
        for crop, (least, largest) in zip(crops, [(0.25, 1.0)] * 2 + [(0.05, 0.25)] * 3, strict=True):
            sides = [crop[:, channel].flatten(1).float() for channel in (0, 1)]
            steps = crop.shape[2] / (crop.shape[2] - 1)
            areas = torch.stack([(side.amax(1) - side.amin(1)) * steps / 256 for side in sides]).prod(0)
            assert areas.min() > 0.85 * least
            assert areas.max() < 1.15 * largest
            assert areas.max() > 1.5 * areas.min()

    def test_from_processes_and_of_floats(self, photos):
        options = {"batch_size": 4, "crops": self.CROPS, **HALVES}
        batches = list(lk.BatchLoader(photos, **options))
        for (crops, _), (expected, _) in zip(lk.BatchLoader(photos, num_processes=1, **options), batches, strict=True):
            assert all(torch.equal(*pair) for pair in zip(crops, expected, strict=True))
            assert {crop.dtype for crop in crops} == {torch.bfloat16}

    def test_of_an_image_that_is_skipped_no_crop_stays(self, photos):
        files = {key: photos.read(key) for key in photos.keys()}  # noqa: SIM118
        files[min(files)] = b"no image"
        loader = lk.BatchLoader(MemoryStore(files), batch_size=8, crops=self.CROPS, on_error="skip")
        [(crops, labels)] = loader
        assert {len(crop) for crop in crops} == {7} == {len(labels)}

    @pytest.mark.parametrize(
        ("crops", "said"),
        [([], "list of"), (224, "list of"), ([(224, (0.1, 1))], "list of"), ([(0, (0.1, 1), 2)], "size"),
         ([(8, (0.1, 2), 2)], "scale"), ([(8, (0.1, 1), 0)], "number")],
    )  # fmt: skip
    def test_a_wrong_list_is_an_error(self, photos, crops, said):
        with pytest.raises(ValueError, match=said):
            lk.BatchLoader(photos, crops=crops)

    def test_evaluation_has_none(self, photos):
        with pytest.raises(ValueError, match="train=False"):
            lk.BatchLoader(photos, crops=self.CROPS, train=False)
