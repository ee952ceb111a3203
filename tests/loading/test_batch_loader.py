"""BatchLoader: pixels of the plain path, each image once with its label, nothing lost, and kept batches stay."""

import copy
import itertools
import re

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import WeightedRandomSampler
from torchvision import transforms as v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.course.oracles import oracle_files
from labkit.data import partial_jpeg
from labkit.loading import rows
from labkit.loading.crops import flips, random_crops, uniforms
from tests.image_files import encoded
from tests.loaders import same, solid
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


def as_image(pixels):
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def in_order(store, **options):
    """Random crops, in the order of the keys."""
    return epoch_of(loader_of(store, shuffle=False, **options))[0]


def decoded(store):
    return [lk.decode(store.read(key)) for key in store.keys()]  # noqa: SIM118


def plain(whole, *, antialias=True, size=32):
    """The same crops, cut out of images decoded whole."""
    draws = uniforms(0, 0, np.arange(len(whole)))
    crops = random_crops(draws, np.array([image.shape[1:] for image in whole]), (0.08, 1.0), (3 / 4, 4 / 3))
    images, shape = [], [size, size] if isinstance(size, int) else list(size)
    for image, crop, flip in zip(whole, crops.tolist(), flips(draws, 0.5), strict=True):
        if antialias:
            row = F.resized_crop(image, *crop, shape, antialias=True)
        else:
            cut = F.crop(image, *crop).permute(1, 2, 0).numpy()
            row = torch.from_numpy(cv2.resize(cut, shape[::-1], interpolation=cv2.INTER_LINEAR)).permute(2, 0, 1)
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

    def test_depend_on_the_seed_and_not_on_the_global_generators(self, pictures):
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        one = in_order(pictures, batch_size=3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        torch.manual_seed(5)
        assert torch.equal(in_order(pictures, batch_size=12), one)
        assert not torch.equal(in_order(pictures, seed=1), one)


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

    @pytest.mark.parametrize(("size", "resize"), [(224, None), (224, 235), ((96, 160), 128), (32, None)])
    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    def test_for_evaluation_are_those_of_torchvision(self, photos, size, resize, interpolation):
        """As timm's evaluation, too: `resize=int(224 / 0.95)` is its crop_pct of 0.95."""
        loader = loader_of(photos, train=False, size=size, resize=resize, interpolation=interpolation)
        images, _ = epoch_of(loader)
        short_side = resize or round(size / 0.875)
        mode = v1.InterpolationMode(interpolation)
        steps = v2.Compose([v2.Resize(short_side, mode), v2.CenterCrop(size)])
        assert torch.equal(images, torch.stack(list(map(steps, decoded(photos)))))
        steps = v1.Compose([v1.Resize(short_side, mode), v1.CenterCrop(size), v1.PILToTensor()])
        expected = torch.stack([steps(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in decoded(photos)])
        assert largest_difference(images, expected) <= (1 if interpolation == "bilinear" else 2)
        assert (images != expected).float().mean() < 0.01

    @pytest.mark.parametrize(("size", "resize"), [(224, None), ((96, 160), 128), ((90, 150), 60), ((33, 20), 50)])
    def test_for_evaluation_are_those_of_torchvision_for_photos_of_any_shape(self, size, resize):
        """Also for photos that are smaller than what is seen, which then lie in its middle, amid zeros."""
        shapes = (256, 256), (341, 256), (512, 1000), (1, 1), (500, 375), (300, 40)
        photos = [Image.effect_noise(shape, 60).convert("RGB") for shape in shapes]
        store = MemoryStore({f"a/{number}.png": encoded(photo, "PNG") for number, photo in enumerate(photos)})
        images, _ = epoch_of(loader_of(store, train=False, size=size, resize=resize))
        steps = v2.Compose([v2.Resize(resize or 256), v2.CenterCrop(size)])
        assert torch.equal(images, torch.stack(list(map(steps, decoded(store)))))

    @pytest.mark.parametrize("torch_has", ["memory at hand", "new memory"])
    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    def test_for_evaluation_are_those_of_torchvision_where_the_size_hardly_changes(
        self, interpolation, torch_has, monkeypatch, library
    ):
        """Where a part of the photo may have as many rows as are seen of the result, which torch would not resize."""
        if torch_has == "new memory":
            monkeypatch.setattr(rows, "_INTERPOLATE", dict.fromkeys(rows.INTERPOLATIONS))
        shapes = [*((59 + n, 57 + n % 7) for n in range(16)), (71, 58), (206, 374)]
        photos = [Image.effect_noise(shape, 60).convert("RGB") for shape in shapes]
        store = MemoryStore({f"a/{n:02}.jpg": encoded(photo, quality=95) for n, photo in enumerate(photos)})
        for size, resize in ((52, 60), (60, 60), (48, 64), ((20, 55), 58), (75, 59), (2, 2)):
            options = {"train": False, "size": size, "resize": resize, "interpolation": interpolation}
            images, _ = epoch_of(loader_of(store, **options))
            steps = v2.Compose([v2.Resize(resize, v1.InterpolationMode(interpolation)), v2.CenterCrop(size)])
            assert torch.equal(images, torch.stack(list(map(steps, decoded(store)))))

    def test_for_evaluation_decode_what_is_seen_alone(self, photos, monkeypatch, library):
        """From the pixels of a photo that another one left behind nothing comes into a batch."""
        boxes, decoder = [], type(partial_jpeg.open_decoder())
        decode = decoder.decode
        monkeypatch.setattr(decoder, "decode", lambda *given, **how: boxes.append(given[2]) or decode(*given, **how))
        first, _ = epoch_of(loader_of(photos, train=False, num_threads=1, size=40, resize=200))
        again, _ = epoch_of(loader_of(photos, train=False, num_threads=1, size=40, resize=200, sampler=range(8)[::-1]))
        assert torch.equal(again, first.flip(0))
        assert all(top > 0 and left > 0 for top, left, _, _ in boxes)
        whole = [image.shape[1:].numel() for image in decoded(photos)]
        assert all(height * width < n / 4 for (_, _, height, width), n in zip(boxes, whole, strict=False))

    @pytest.mark.parametrize(("size", "resize"), [(224, None), (40, 200), ((96, 160), 128), (300, 320)])
    def test_for_evaluation_without_antialiasing_are_those_of_opencv(self, photos, size, resize):
        images, _ = epoch_of(loader_of(photos, train=False, size=size, resize=resize, antialias=False))
        side = resize or 256
        for got, image in zip(images, decoded(photos), strict=True):
            height, width = image.shape[1:]
            shape = (int(side * width / height), side) if height < width else (side, int(side * height / width))
            whole = cv2.resize(image.permute(1, 2, 0).numpy(), shape, interpolation=cv2.INTER_LINEAR)
            shape = [size, size] if isinstance(size, int) else list(size)
            expected = F.center_crop(torch.from_numpy(whole).permute(2, 0, 1), shape)
            assert torch.equal(got, expected)

    @pytest.mark.parametrize("antialias", [True, False])
    def test_for_evaluation_of_a_pixel_store_are_those_of_its_photos(self, pixels, antialias):
        images, _ = epoch_of(loader_of(pixels, train=False, size=20, resize=30, antialias=antialias))
        whole = MemoryStore({f"a/{n:02}.png": encoded(as_image(pixels[n][0]), "PNG") for n in range(len(pixels))})
        expected, _ = epoch_of(loader_of(whole, train=False, size=20, resize=30, antialias=antialias))
        assert torch.equal(images, expected)

    @files_and_pixels
    def test_may_have_any_height_and_width(self, source):
        got = in_order(source, size=(24, 40), scaled_decoding=False)
        whole = [image for image, _ in source] if isinstance(source, lk.PixelStore) else decoded(source)
        assert largest_difference(got, plain(whole, size=(24, 40))) <= 1

    @files_and_pixels
    def test_as_floats_are_those_of_v2_on_the_batch_of_bytes(self, source):
        """To the last bit: a half type is rounded once."""
        bytes_of_batches = [images for images, _ in loader_of(source)]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for scaling in ({}, {"mean": MEAN, "std": STD}):
                steps = [v2.ToDtype(torch.float32, scale=True), *([v2.Normalize(**scaling)] if scaling else [])]
                loader = loader_of(source, dtype=dtype, num_threads=2, **scaling)
                for (images, _), plain_bytes in zip(loader, bytes_of_batches, strict=True):
                    assert images.is_contiguous(memory_format=torch.channels_last)
                    assert same(images, v2.Compose(steps)(plain_bytes).to(dtype))


class TestLabels:
    @files_and_pixels
    def test_of_ones_own_go_with_the_images_that_are_chosen(self, source):
        """Also where a batch sampler or threads give them in another order."""
        names = list(source.keys if isinstance(source, lk.PixelStore) else source.keys())[::-2]
        numbers = range(len(names))
        for values in ([n / 2 for n in numbers], [[n, 1] for n in numbers]):
            options = {"keys": names, "labels": values, "return_keys": True}
            loader, given = loader_of(source, **options), dict(zip(names, values, strict=True))
            for images, labels, keys in loader:
                assert labels.tolist() == [given[key] for key in keys]
                assert len(images) == len(keys)
            assert loader.keys == names
            assert len(loader.dataset) == len(names)

    @files_and_pixels
    def test_of_a_part_are_those_of_the_whole(self, source):
        whole = loader_of(source)
        names = list(whole.keys)[1::3]
        loader = loader_of(source, keys=names, classes=whole.classes, return_keys=True, train=False)
        [(images, labels, keys)] = list(loader)
        assert keys == names
        assert labels.tolist() == [whole.labels[list(whole.keys).index(key)] for key in names]
        everything = torch.cat([images for images, _ in loader_of(source, train=False)])
        assert torch.equal(images, everything[1::3])

    def test_of_skipped_images_are_left_out_with_them(self, pictures):
        names = list(pictures.keys())
        files = {key: b"not an image" if key == names[2] else pictures.read(key) for key in names}
        options = {"on_error": "skip", "shuffle": False, "return_keys": True}
        loader = loader_of(MemoryStore(files), labels=[float(n) for n in range(len(names))], **options)
        images, labels, keys = next(iter(loader))
        assert keys == [names[n] for n in (0, 1, 3, 4)]
        assert labels.tolist() == [0, 1, 3, 4]
        assert len(images) == 4


def upside_down(image):
    return image.flip(1)


def without_its_table(image):
    raise FileNotFoundError("table of colors")


upside_down.draws_globally = without_its_table.draws_globally = False


class TestRanks:
    def test_give_an_image_that_several_of_them_draw_a_crop_each(self, pictures, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        found, sampler = {}, WeightedRandomSampler([1] * 12, 24)
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            for images, _, keys in loader_of(pictures, sampler=sampler, return_keys=True, flip=0):
                for image, key in zip(images, keys, strict=True):
                    found.setdefault(key, []).append(image)
        several = [images for images in found.values() if len(images) > 1]
        assert sum(map(len, found.values())) == 24
        assert several
        assert not any(torch.equal(*pair) for images in several for pair in itertools.combinations(images, 2))

    def test_refuse_a_state_of_other_weights(self, pictures, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        state = loader_of(pictures, sampler=WeightedRandomSampler([1] * 12, 12)).state_dict()
        monkeypatch.delenv("WORLD_SIZE")
        for other in (WeightedRandomSampler([2] + [1] * 11, 12), WeightedRandomSampler([1] * 12, 6)):
            with pytest.raises(ValueError, match="the state was taken with sampler='WeightedRandomSampler"):
                loader_of(pictures, sampler=other).load_state_dict(state)


class TestATransform:
    @pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}])
    @files_and_pixels
    def test_is_called_with_each_crop(self, source, options):
        """Whatever is made of its bytes afterwards, and with as many threads as there are."""
        expected = [images.flip(2) for images, _ in loader_of(source, **options)]
        for own in ({}, {"num_threads": 1}):
            loader = loader_of(source, transform=upside_down, **options, **own)
            assert same([images for images, _ in loader], expected)

    def test_draws_by_image_epoch_and_occurrence_alone(self, pictures):
        compose = A.Compose([A.HueSaturationValue(p=1), A.GaussNoise(p=1)])
        whole = {"flip": 0, "scale": (1, 1), "ratio": (1, 1)}
        options = {"transform": compose, "sampler": [3, 3, 5, 1], "batch_size": 2, **whole}
        first, again = (loader_of(pictures, **options, num_threads=n) for n in (1, 3))
        epochs = [torch.cat([images for images, _ in first]) for _ in range(2)]
        assert torch.equal(epochs[0], torch.cat([images for images, _ in again]))
        assert not torch.equal(epochs[0], epochs[1])
        assert not torch.equal(epochs[0][0], epochs[0][1])

    def test_is_called_with_each_of_several_crops(self, pictures):
        options = {"crops": [(32, (0.3, 1), 2)], "shuffle": False}
        expected = [[crop.flip(2) for crop in crops] for crops, _ in loader_of(pictures, **options)]
        got = [crops for crops, _ in loader_of(pictures, transform=upside_down, **options)]
        assert all(same(*pair) for pair in zip(got, expected, strict=True))

    def test_whose_own_file_is_missing_is_no_image_to_skip(self, pictures):
        with pytest.raises(FileNotFoundError, match="table of colors"):
            list(loader_of(pictures, transform=without_its_table, on_error="skip"))

    def test_that_gives_something_else_is_told_with_the_images_name(self, pictures):
        with pytest.raises(ValueError, match="float32") as failure:
            list(loader_of(pictures, transform=v2.ToDtype(torch.float32, scale=True)))
        assert "class" in str(failure.value.__notes__)


class TestABatchSampler:
    def test_of_buckets_goes_to_make_loader(self, pictures):
        sizes = lk.collect_sizes(pictures.root, progress=False)
        sampler = lk.BucketBatchSampler(sizes, 2, buckets=lk.Buckets(((96, 80), (128, 80), (192, 80))))
        way = "lk.make_loader(lk.ImageDataset(source, buckets=sampler.buckets), batch_sampler=sampler)"
        with pytest.raises(ValueError, match=re.escape(way)):
            lk.BatchLoader(pictures, batch_sampler=sampler)

    def test_resumes_in_the_middle_of_an_epoch(self, pictures):
        lists = [[3, 1], [4, 1, 5], [9, 2, 6, 0]]
        whole = list(lk.BatchLoader(pictures, size=32, batch_sampler=lists))
        assert [len(labels) for _, labels in whole] == [2, 3, 4]
        loader, other = (lk.BatchLoader(pictures, size=32, batch_sampler=lists) for _ in range(2))
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        assert same([images for images, _ in other], [images for images, _ in whole[1:]])


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
        batches = [size for size, *_ in taken if size == 2 * 32 * 32 * 3]
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

    def test_refuse_an_image_of_too_many_pixels_though_a_crop_of_it_would_do(self):
        bomb = encoded(Image.new("L", (20_000, 9_000)))  # 180 million, of which libjpeg-turbo could decode a part
        with pytest.raises(lk.DecodeError, match=r"class/large\.jpg.* exceeds? (the )?limit"):
            list(loader_of(MemoryStore({"class/large.jpg": bomb})))

    @pytest.mark.parametrize(("options", "message"), [
        ({"size": 0}, "size"), ({"size": "224"}, "size must be"), ({"size": (3, 224, 224)}, "size must be"),
        ({"batch_size": 0}, "batch_size"), ({"num_threads": 0}, "num_threads"), ({"flip": 1.5}, "flip"),
        ({"prefetch_factor": 0}, "prefetch_factor"), ({"scale": (0.5, 0.1)}, "scale"), ({"ratio": (0, 1)}, "ratio"),
        ({"on_error": "ignore"}, "on_error"), ({"reads_in_flight": 0}, "reads_in_flight must be an integer >= 1"),
        ({"shuffle": True, "sampler": range(3)}, "got shuffle=True and a sampler"),
        ({"shuffle": True, "batch_sampler": [[0]]}, "got a batch_sampler and shuffle: leave out one"),
        ({"interpolation": "bicubic", "antialias": False}, "needs antialias=True"),
        ({"resize": 40}, "goes with train=False"),
        ({"crops": 224}, r"list of \(size, scale, number\)"), ({"crops": [(8, (0.1, 1), 0)]}, "number"),
        ({"crops": [(32, (0.25, 1), 2)], "train": False}, "train=False, which takes the center"),
        ({"dtype": torch.float64}, r"dtype must be one of torch.uint8, torch.float32, .*, got torch.float64"),
        ({"mean": MEAN, "std": STD}, r"mean and std need floats: pass dtype=torch.float32"),
        ({"dtype": torch.float32, "mean": MEAN}, r"pass both mean and std, or neither: got mean=.*, std=None"),
        ({**HALVES, "std": (0.2, 0, 0.2)}, r"std must be three numbers > 0, .*\(0.2, 0, 0.2\)"),
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

    def test_of_an_image_that_is_skipped_no_crop_stays(self, photos):
        files = {key: photos.read(key) for key in photos.keys()}  # noqa: SIM118
        files[min(files)] = b"no image"
        loader = lk.BatchLoader(MemoryStore(files), batch_size=8, crops=self.CROPS, on_error="skip")
        [(crops, labels)] = loader
        assert {len(crop) for crop in crops} == {7} == {len(labels)}
