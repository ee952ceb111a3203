"""Targets that are cropped with their photo, against torchvision's v2 transforms, Pillow and NumPy."""

import io
import pickle
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import labkit as lk
from labkit.course.oracles import exif_of
from tests.image_files import encoded
from tests.memory_store import MemoryStore
from tests.oriented_files import UPRIGHT

HEIGHT, WIDTH = SIZE = 97, 131
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, SIZE, np.uint8)
DEEP = RANDOM.integers(0, 1 << 16, SIZE).astype(np.uint16)


def png(pixels, **options) -> bytes:
    return encoded(Image.fromarray(pixels), "PNG", **options)


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def masks(data: bytes = png(PIXELS), **options) -> lk.Masks:
    return lk.Masks(MemoryStore({"a.png": data}), **options)


def maps(data: bytes) -> lk.Maps:
    return lk.Maps(MemoryStore({"a.png": data}))


def whole_boxes(number: int, size=SIZE, seed: int = 0) -> list[list[int]]:
    """Top, left, height and width within a photo."""
    random, boxes = np.random.default_rng(seed), [[0, 0, *size], [0, 0, 1, 1], [size[0] - 1, size[1] - 1, 1, 1]]
    while len(boxes) < number:
        height, width = random.integers(1, np.array(size) + 1)
        boxes.append([*random.integers(0, (size[0] - height + 1, size[1] - width + 1)).tolist(), height, width])
    return [list(map(int, box)) for box in boxes]


def by_v2(target, box, out_size, mirror):
    """What v2 makes of a tv_tensor."""
    cropped = F.resized_crop(target, *box, list(out_size))
    return F.horizontal_flip(cropped) if mirror else cropped


# --- masks


@pytest.mark.parametrize("pixels", [PIXELS, DEEP], ids=["8 bits", "16 bits"])
def test_masks_are_cropped_and_resized_to_the_pixels_of_v2(pixels):
    target, whole = masks(png(pixels)), tv_tensors.Mask(torch.from_numpy(pixels.astype(np.int32)))
    n_different = 0
    for number, box in enumerate(whole_boxes(300)):
        out_size = ((56, 56), (224, 31), (7, 64), (1, 1), SIZE)[number % 5]
        found = target.crop("a.png", SIZE, box, out_size, number % 2 == 1)
        n_different += int((torch.from_numpy(found) != by_v2(whole, box, out_size, number % 2 == 1)).sum())
        assert found.dtype == (np.uint8 if pixels is PIXELS else np.int32)
        assert found.shape == out_size
    assert n_different == 0


@pytest.mark.parametrize("length", [97, 100, 131, 333, 500, 640, 1023])
def test_nearest_pixels_are_those_of_torch_for_every_size(length):
    """Also where a product in float32 falls just short of a whole number, by which OpenCV's differ."""
    row = np.arange(length, dtype=np.uint16)[None]
    whole, target = tv_tensors.Mask(torch.from_numpy(row.astype(np.int32))), masks(png(row))
    for n in range(1, 300):
        found = target.crop("a.png", row.shape, (0, 0, 1, length), (1, n), False)
        assert np.array_equal(found, F.resize(whole, [1, n])), n


@pytest.mark.parametrize("size", [(480, 640), (375, 500), (97, 131), (333, 1000)])
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (232, 224), (236, 224), (64, 64), (51, 48)])
def test_masks_of_fractional_boxes_are_those_of_a_resized_and_cropped_mask(size, resize, crop):
    """As for validation: the box in the photo has fractions, since the photo is resized before it is cropped."""
    pixels = np.random.default_rng(1).integers(0, 1 << 16, size).astype(np.uint16)
    resized = F.resize(tv_tensors.Mask(torch.from_numpy(pixels.astype(np.int32))), resize)
    top, left = (round((side - crop) / 2) for side in resized.shape)
    steps = [side / new for side, new in zip(size, resized.shape, strict=True)]
    box = top * steps[0], left * steps[1], crop * steps[0], crop * steps[1]
    found = masks(png(pixels)).crop("a.png", size, box, (crop, crop), False, whole=True)
    assert np.array_equal(found, F.center_crop(resized, [crop, crop]))


@pytest.mark.parametrize("size", [(100, 200), (200, 100), (97, 131), (480, 640), (333, 1000)])
@pytest.mark.parametrize("side", [224, 64, 97])
@pytest.mark.parametrize("mirror", [False, True])
def test_what_lies_outside_of_the_photo_is_filled(size, side, mirror):
    """A letterbox: the photo resized to its longer side, and padded."""
    pixels = np.random.default_rng(1).integers(0, 255, size, np.uint8)
    new = [max(1, round(one * side / max(size))) for one in size]
    before = [(side - one) // 2 for one in new]
    steps = [one / resized for one, resized in zip(size, new, strict=True)]
    box = -before[0] * steps[0], -before[1] * steps[1], side * steps[0], side * steps[1]
    padding = [before[1], before[0], side - new[1] - before[1], side - new[0] - before[0]]
    expected = F.pad(F.resize(tv_tensors.Mask(torch.from_numpy(pixels)), new), padding, fill=255)
    found = masks(png(pixels), ignore_index=255).crop("a.png", size, box, (side, side), mirror, whole=True)
    assert np.array_equal(found, expected.flip(-1) if mirror else expected)
    numbers = (pixels * np.float32(1.5))[None]
    expected = F.pad(F.resize(tv_tensors.Image(torch.from_numpy(numbers)), new), padding)
    found = maps(npy(numbers)).crop("a.png", size, box, (side, side), mirror, whole=True)
    np.testing.assert_allclose(found, expected.flip(-1) if mirror else expected, atol=1e-3)


def test_a_crop_beside_the_photo_is_filled():
    for box in ((0, 200, 50, 50), (-60, 0, 50, 50), (-60.5, -70.25, 50, 50)):
        assert (masks(ignore_index=7).crop("a.png", SIZE, box, (8, 8), False) == 7).all()
        assert (maps(png(PIXELS)).crop("a.png", SIZE, box, (8, 8), False) == 0).all()
        boxes = lk.Boxes({"a.png": [[0, 0, WIDTH, HEIGHT]]}).crop("a.png", SIZE, box, (8, 8), False)["boxes"]
        assert boxes.shape == (0, 4)


def test_whole_boxes_beyond_the_photo_are_those_of_v2():
    """Which pads before it resizes."""
    whole, random = tv_tensors.Mask(torch.from_numpy(PIXELS)), np.random.default_rng(2)
    for _ in range(100):
        box = [*random.integers(-40, 90, 2).tolist(), *random.integers(41, 160, 2).tolist()]
        resized = [side * 50 / length for side, length in zip(SIZE, box[2:], strict=True)]
        if all(one % 1 for one in resized):
            assert np.array_equal(masks().crop("a.png", SIZE, box, (50, 50), False), by_v2(whole, box, (50, 50), False))


def test_masks_are_read_as_they_are_stored():
    """Palettes as indices, black and white as 0 and 1, all bits of gray."""
    palette = Image.fromarray(PIXELS)
    palette.putpalette(RANDOM.integers(0, 256, 768, np.uint8).tolist())
    files = {
        "gray": (png(PIXELS), PIXELS),
        "palette": (encoded(palette, "PNG"), PIXELS),
        "transparent palette": (encoded(palette, "PNG", transparency=3), PIXELS),
        "transparent gray": (png(PIXELS, transparency=3), PIXELS),
        "black and white": (encoded(Image.fromarray(PIXELS > 99), "PNG"), (PIXELS > 99).astype(np.uint8)),
        "16 bits": (png(DEEP), DEEP.astype(np.int32)),
        "few colors": (encoded(Image.fromarray(PIXELS // 64).convert("P"), "PNG", bits=2), PIXELS // 64),
    }
    for name, (data, expected) in files.items():
        for found in (masks(data).read("a.png", SIZE), masks(data).crop("a.png", SIZE, (0, 0, *SIZE), SIZE, False)):
            assert np.array_equal(found, expected), name
            assert np.asarray(found).dtype == expected.dtype, name
        assert isinstance(masks(data).read("a.png", SIZE), tv_tensors.Mask)


@pytest.mark.parametrize(("n_bits", "expected"), [(1, [0, 0, 0, 1, 1, 0, 1, 1]), (2, [0, 1, 2, 3]), (4, [1, 11])])
def test_gray_of_few_bits_has_the_values_of_the_file(n_bits, expected):
    """Pillow spreads those of two and four bits over 0 to 255."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", len(expected), 1, n_bits, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\x1b")) + chunk(b"IEND", b"")
    assert masks(b"\x89PNG\r\n\x1a\n" + chunks).read("a.png", (1, len(expected))).tolist() == [expected]


@pytest.mark.parametrize("image", [
    Image.new("RGB", (WIDTH, HEIGHT)), Image.new("RGBA", (WIDTH, HEIGHT)), Image.new("LA", (WIDTH, HEIGHT)),
])  # fmt: skip
def test_masks_of_colors_are_refused(image):
    with pytest.raises(lk.DecodeError, match=rf"a\.png: .* has 8-bit {image.mode} pixels, .*turn its colors into"):
        masks(encoded(image, "PNG")).read("a.png", SIZE)


def test_damage_is_an_error_that_names_the_file():
    for data in (b"", b"text", png(PIXELS)[:500], npy(PIXELS)):
        with pytest.raises(lk.DecodeError, match=r"a\.png: \d+ bytes cannot be read as a mask"):
            masks(data).read("a.png", SIZE)
    with pytest.raises(lk.DecodeError, match="cannot be read as a map"):
        maps(npy(PIXELS)[:500]).read("a.png", SIZE)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_are_turned_like_their_photo_if_they_have_its_size_before_turning(orientation):
    photo = encoded(Image.new("RGB", (WIDTH, HEIGHT)), "JPEG", exif=exif_of(orientation))
    size = tuple(lk.decode(photo).shape[1:])
    upright = UPRIGHT[orientation](PIXELS)
    assert np.array_equal(masks(png(np.ascontiguousarray(upright))).read("a.png", size, photo=photo), upright)
    if orientation >= 5:  # else the size does not tell, and a mask is upright
        assert np.array_equal(masks().read("a.png", size, photo=photo), upright)
        found = maps(npy(PIXELS[None])).read("a.png", size, photo=photo)
        assert np.array_equal(found[0], upright)
        found = masks().crop("a.png", size, (3, 5, 40, 30), (40, 30), False, photo=photo)
        assert np.array_equal(found, upright[3:43, 5:35])


def test_another_size_is_an_error_that_names_both():
    photo = encoded(Image.new("RGB", (WIDTH, HEIGHT)), "JPEG", exif=exif_of(6))
    with pytest.raises(ValueError, match=r"a\.png: this mask has 97 x 131 pixels .*photo 'a\.jpg' has 50 x 60: make"):
        masks().read("a.jpg", (50, 60))
    with pytest.raises(ValueError, match=r"has 97 x 131 pixels .* has 131 x 97: make"):
        masks().crop("a.png", SIZE[::-1], (0, 0, 5, 5), (5, 5), False)
    with pytest.raises(ValueError, match=r"map has 10 x 20 pixels .* has 131 x 97, or 97 x 131 before EXIF turns it"):
        maps(npy(np.zeros((10, 20)))).read("a.jpg", SIZE[::-1], photo=photo)


def test_crops_are_written_into_what_is_given():
    box = (10, 20, 50, 60)
    for target, dtype, shape in ((masks(), np.uint8, (32, 32)), (maps(png(PIXELS)), np.float32, (1, 32, 32))):
        batch = np.full((3, *shape), 9, dtype)
        assert target.crop("a.png", SIZE, box, (32, 32), True, out=batch[1]).base is batch
        assert np.array_equal(batch[1], target.crop("a.png", SIZE, box, (32, 32), True))
        assert (batch[[0, 2]] == 9).all()
    wide = np.empty((32, 32), np.int64)
    masks(png(DEEP)).crop("a.png", SIZE, box, (32, 32), False, out=wide)
    assert np.array_equal(wide, masks(png(DEEP)).crop("a.png", SIZE, box, (32, 32), False))
    with pytest.raises(TypeError):  # 16 bits do not fit
        masks(png(DEEP)).crop("a.png", SIZE, box, (32, 32), False, out=np.empty((32, 32), np.uint8))


@pytest.mark.parametrize("index", [-1, 256, 1.5])
def test_a_value_that_no_mask_holds_is_refused(index):
    with pytest.raises(ValueError, match="ignore_index"):
        masks(ignore_index=index)


# --- maps


@pytest.mark.parametrize("n_channels", [1, 3])
def test_maps_are_those_of_v2(n_channels):
    pixels = np.random.default_rng(0).normal(size=(n_channels, *SIZE)).astype(np.float32)
    target, whole = maps(npy(pixels)), tv_tensors.Image(torch.from_numpy(pixels))
    assert torch.equal(target.read("a.png", SIZE), whole)
    for number, box in enumerate(whole_boxes(60)):
        found = target.crop("a.png", SIZE, box, (56, 40), number % 2 == 1)
        np.testing.assert_array_equal(found, by_v2(whole, box, (56, 40), number % 2 == 1))


@pytest.mark.parametrize(("size", "resize"), [((480, 640), 250), ((512, 512), 256), ((384, 640), 256)])
def test_maps_for_validation_are_resized_before_they_are_cropped(size, resize):
    """So pixels around the crop count, also where its box has no fractions."""
    whole = tv_tensors.Image(torch.from_numpy(np.random.default_rng(0).random((2, *size), np.float32)))
    resized = F.resize(whole, resize)
    top, left = (round((side - 224) / 2) for side in resized.shape[1:])
    steps = size[0] / resized.shape[1], size[1] / resized.shape[2]
    box = top * steps[0], left * steps[1], 224 * steps[0], 224 * steps[1]
    found = maps(npy(whole.numpy())).crop("a.png", size, box, (224, 224), False, whole=True)
    np.testing.assert_allclose(found, F.center_crop(resized, [224, 224]), atol=1e-4)


def test_maps_are_read_from_files_of_many_kinds(tmp_path):
    colors = RANDOM.integers(0, 256, (*SIZE, 3), np.uint8)
    numbers = RANDOM.normal(size=(2, *SIZE))
    files = {
        "gray.png": (png(PIXELS), PIXELS[None]), "deep.png": (png(DEEP), DEEP[None]),
        "colors.png": (png(colors), colors.transpose(2, 0, 1)), "flat.npy": (npy(PIXELS), PIXELS[None]),
        "planes.npy": (npy(numbers), numbers), "last.npy": (npy(np.moveaxis(numbers, 0, -1)), numbers),
        "deeper/fortran.npy": (npy(np.asfortranarray(numbers)), numbers),
    }  # fmt: skip
    (tmp_path / "deeper").mkdir()
    for name, (data, _) in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.npy").touch()
    target = lk.Maps(tmp_path)
    target.check(list(files))
    for name, (_, expected) in files.items():
        found = target.read(name.replace(".npy", ".jpg"), SIZE)
        assert isinstance(found, tv_tensors.Image)
        assert found.dtype == torch.float32
        assert np.array_equal(found, expected.astype(np.float32)), name


@pytest.mark.parametrize(("data", "said"), [
    (npy(np.zeros((2, 2, 2, 2))), r"float64 of shape \(2, 2, 2, 2\), and a map"),
    (npy(np.zeros(SIZE, complex)), "complex128 of shape"),
    (npy(np.array([{}])), "allow_pickle"),
    (encoded(Image.new("P", (9, 9)), "PNG"), "1-bit P pixels, and a map is gray, or RGB"),
    (encoded(Image.new("RGBA", (9, 9)), "PNG"), "8-bit RGBA pixels"),
])  # fmt: skip
def test_what_is_no_map_is_refused(data, said):
    with pytest.raises(lk.DecodeError, match=rf"a\.png: .*{said}"):
        maps(data).read("a.png", (9, 9))


def test_colors_of_16_bits_would_lose_half_of_them():
    rgb = bytearray(png(np.zeros((1, 1, 3), np.uint8)))
    rgb[24] = 16
    rgb[29:33] = struct.pack(">I", zlib.crc32(rgb[12:29]))
    with pytest.raises(lk.DecodeError, match=r"16-bit RGB pixels, and .*np\.save"):
        maps(bytes(rgb)).read("a.png", (1, 1))


# --- boxes and points


def annotated(number: int = 40):
    """Boxes within and beyond a photo, xyxy, of float32."""
    random = np.random.default_rng(3)
    corners = random.uniform(-20, 160, (number, 2, 2)).astype(np.float32)
    return np.sort(corners, axis=1).reshape(-1, 4)


def test_boxes_are_shifted_scaled_mirrored_clipped_and_removed_as_by_v2():
    values, labels = annotated(), np.arange(40)
    target = lk.Boxes({"a.png": values}, labels={"a.png": labels})
    whole = v2.functional.clamp_bounding_boxes(
        tv_tensors.BoundingBoxes(torch.from_numpy(values), format="XYXY", canvas_size=SIZE)
    )
    for number, box in enumerate(whole_boxes(100)):
        found = target.crop("a.png", SIZE, box, (56, 40), number % 2 == 1)
        cropped = by_v2(whole, box, (56, 40), number % 2 == 1).numpy()
        kept = (cropped[:, 0] < cropped[:, 2]) & (cropped[:, 1] < cropped[:, 3])
        np.testing.assert_allclose(found["boxes"], cropped[kept], atol=1e-3)
        assert found["boxes"].dtype == np.float32
        assert found["labels"].tolist() == labels[kept].tolist()


def test_boxes_may_keep_their_places():
    box = (10, 10, 20, 20)
    target = lk.Boxes({"a": [[0, 0, 5, 5], [12, 12, 14, 18]]}, labels={"a": ["cat", "dog"]}, keep_empty=True)
    found = target.crop("a", SIZE, box, (40, 40), False)
    assert found["boxes"].tolist() == [[0, 0, 0, 0], [4, 4, 8, 16]]
    assert target.stack([found])[0]["labels"] == ["cat", "dog"]


def test_boxes_are_clipped_to_the_photo_in_a_crop_that_is_larger():
    found = lk.Boxes({"a": [[-9, 10, 300, 200]]}).crop("a", SIZE, (-17, -20, 171, 171), (171, 171), False)
    assert found["boxes"].tolist() == [[20, 27, 20 + WIDTH, 17 + HEIGHT]]


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_boxes_have_the_formats_of_torchvision(format):
    expected = tv_tensors.BoundingBoxes(
        torch.tensor([[10.0, 20, 40, 60], [0, 1, 2, 3]]), format="XYXY", canvas_size=SIZE
    )
    given = F.convert_bounding_box_format(expected, new_format=format.upper())
    found = lk.Boxes({"a": given, "b": []}, format=format).read("a", SIZE)
    assert isinstance(found, tv_tensors.BoundingBoxes)
    assert (found.format, found.canvas_size) == (expected.format, SIZE)
    assert torch.equal(found, expected)


def test_points_are_those_of_v2_and_none_is_removed():
    values = np.random.default_rng(0).uniform(-20, 160, (9, 2)).astype(np.float32)
    target = lk.Keypoints({"a.png": values})
    whole = tv_tensors.KeyPoints(torch.from_numpy(values), canvas_size=SIZE)
    assert torch.equal(target.read("a.png", SIZE), whole)
    for number, box in enumerate(whole_boxes(60)):
        found = target.crop("a.png", SIZE, box, (56, 40), number % 2 == 1)
        np.testing.assert_allclose(found, by_v2(whole, box, (56, 40), number % 2 == 1), rtol=1e-4, atol=1e-2)


def test_a_data_frame_has_a_row_for_each_box_or_point():
    frame = pandas.DataFrame({
        "image": ["b", "a", "c", "b", "a"], "x": [1, 2, None, 3, 4], "y": [1, 2, None, 3, 4],
        "w": [5, 6, None, 7, 8], "h": [5, 6, None, 7, 8], "label": [0, 1, None, 2, 3], "score": 0.5,
    })  # fmt: skip
    target = lk.Boxes(frame[["image", "x", "y", "w", "h", "label"]], format="xywh")
    target.check(["a.jpg", "b.jpg", "c.jpg"])
    for name, boxes, labels in [("a", [[2, 2, 8, 8], [4, 4, 12, 12]], [1, 3]), ("c", [], []),
                                ("b", [[1, 1, 6, 6], [3, 3, 10, 10]], [0, 2])]:  # fmt: skip
        found = target.read(f"{name}.jpg", SIZE)
        assert found["boxes"].tolist() == boxes
        assert found["boxes"].shape == (len(boxes), 4)
        assert found["labels"].tolist() == labels
        assert found["labels"].dtype == torch.int64
    points = lk.Keypoints(frame[["image", "x", "y"]])
    assert points.read("b", SIZE).tolist() == [[1, 1], [3, 3]]
    assert points.read("c", SIZE).isnan().all()
    assert lk.Boxes(frame[["image", "x", "y", "w", "h"]], format="xywh").read("b.jpg", SIZE).shape == (2, 4)


FRAME = pandas.DataFrame({"image": ["a"], "x": [0], "y": [0], "x2": [9], "y2": [9], "label": [1]})


@pytest.mark.parametrize(("make", "said"), [
    (lambda: lk.Boxes([[1, 2, 3, 4]]), "values must be a dict of arrays"),
    (lambda: lk.Boxes("boxes.json"), "values must be a dict of arrays"),
    (lambda: lk.Boxes({"a": [1, 2, 3, 4]}), r"shape \(n, 4\), x1, y1, x2, y2 of each: 'a' has \[1, 2, 3, 4\]"),
    (lambda: lk.Boxes({"a": [[1, 2, 3]]}), r"shape \(n, 4\)"),
    (lambda: lk.Boxes({"a": [[1, 2, 3, 4], [5]]}), r"shape \(n, 4\)"),
    (lambda: lk.Boxes({"a": [["x", "y", "z", "w"]]}), r"shape \(n, 4\)"),
    (lambda: lk.Boxes({"a": None}), r"shape \(n, 4\)"),
    (lambda: lk.Boxes({3: [[1, 2, 3, 4]]}), "by their names, got 3"),
    (lambda: lk.Boxes({"a": []}, format="yxyx"), "format must be one of xyxy, xywh, cxcywh"),
    (lambda: lk.Boxes({"b": [], "a": [[0, 0, 9, 9], [5, 5, 4, 9]]}), r"1 of 2 boxes end .* 'a': \[5.0, 5.0, 4.0, "),
    (lambda: lk.Boxes({"a": [[0, 0, 9, np.nan]]}), "1 of 1 boxes end"),
    (lambda: lk.Boxes({"a": [[0, 0, 9, np.inf]]}), "1 of 1 boxes end"),
    (lambda: lk.Boxes({"a": [[0, 0, 9, 9]]}, labels={"a": [1, 2]}), r"'a' has 1 boxes, and labels of shape \(2,\)"),
    (lambda: lk.Boxes({"a": [[0, 0, 9, 9]]}, labels={}), r"'a' has 1 boxes, and labels of shape \(0,\)"),
    (lambda: lk.Boxes({"a": [[0, 0, 9, 9]]}, labels=[1]), "labels must be a dict"),
    (lambda: lk.Boxes(FRAME, labels={"a": [1]}), "labels were given twice"),
    (lambda: lk.Boxes(FRAME[["image", "x", "y"]]), "a DataFrame of boxes has the columns .* got image, x, y: choose"),
    (lambda: lk.Boxes(FRAME.assign(more=1)), "has the columns"),
    (lambda: lk.Keypoints(FRAME[["image", "y", "x"]]), "x, y, in this order.* got image, y, x"),
    (lambda: lk.Boxes(FRAME[["image", "x", "y", "x2", "image"]]), "of boxes must be numbers"),
    (lambda: lk.Boxes(FRAME.assign(image=[7])), "by their names, got 7"),
    (lambda: lk.Boxes(FRAME.assign(image=[None])), "by their names, got"),
    (lambda: lk.Keypoints({"a": [[1, 2, 3]]}), r"points .* shape \(n, 2\), x, y of each"),
    (lambda: lk.Keypoints(FRAME), "has the columns the image's name, x, y, in this order"),
])  # fmt: skip
def test_what_are_no_boxes_or_points_is_refused(make, said):
    with pytest.raises(lk.LabkitError, match=said):
        make()


# --- all of them


TARGETS = {
    "mask": lambda: lk.Masks(MemoryStore({"a.png": png(PIXELS), "b/c.png": png(PIXELS)})),
    "map": lambda: lk.Maps(MemoryStore({"a.png": png(PIXELS), "b/c.png": png(PIXELS)})),
    "boxes": lambda: lk.Boxes({"a.png": [[1, 2, 30, 40]], "b/c": []}),
    "points": lambda: lk.Keypoints({"a.png": [[1, 2]], "b/c": [[3, 4]]}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_image_has_its_target_or_is_named(name):
    target = TARGETS[name]()
    target.check(["a.png", "b/c.jpg", "b/c.png"])
    with pytest.raises(ValueError, match=rf"2 of 3 images have no {name}, the first 'x/a\.png': looked .* keys="):
        target.check(["a.png", "x/a.png", "d.jpg"])
    with pytest.raises(KeyError, match=rf"'x/a\.png' has no {name}"):
        target.read("x/a.png", SIZE)


def test_two_masks_for_one_photo_are_refused():
    target = lk.Masks(MemoryStore({name: png(PIXELS) for name in ("a.png", "a.PNG", "b.png", "b.jpg")}))
    with pytest.raises(
        ValueError, match=r"1 of 2 images have more than one mask .* 'a\.jpg': 'a\.PNG', 'a\.png'\. Leave"
    ):
        target.check(["a.jpg", "b.jpg"])
    target.check(["b.jpg"])


def test_masks_among_the_photos_are_told():
    target = lk.Masks(MemoryStore({name: png(PIXELS) for name in ("cat/1.png", "cat/1.jpg", "cat/2.png")}))
    with pytest.warns(UserWarning, match=r"'cat/1\.jpg' and 'cat/1\.png' are photos here.*ignore='\.png'\) for the"):
        target.check(["cat/1.png", "cat/2.jpg", "cat/1.jpg"])
    with pytest.raises(lk.LabkitError, match=r"2 of 2 .* 'masks/cat/2\.png' seems to be a mask itself: open the"):
        target.check(["images/cat/2.jpg", "masks/cat/2.png"])


@pytest.mark.parametrize("name", TARGETS)
def test_targets_survive_pickling_and_many_threads(name):
    target = pickle.loads(pickle.dumps(TARGETS[name]()))

    def crop(number):
        return pickle.dumps(target.crop("a.png", SIZE, (number % 9, 0, 50, 60), (32, 32), number % 2 == 1))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(crop, range(60))) == list(map(crop, range(60)))


def test_batches_have_tensors():
    targets = {name: make() for name, make in TARGETS.items()}
    stacked = {
        name: target.stack([target.crop(key, SIZE, (0, 0, 50, 60), (24, 32), False) for key in ("a.png", "b/c.png")])
        for name, target in targets.items()
    }
    assert {name: (value.shape, value.dtype) for name, value in stacked.items() if name != "boxes"} == {
        "mask": ((2, 24, 32), torch.uint8), "map": ((2, 1, 24, 32), torch.float32),
        "points": ((2, 1, 2), torch.float32),
    }  # fmt: skip
    assert [value["boxes"].shape for value in stacked["boxes"]] == [(1, 4), (0, 4)]
    uneven = lk.Keypoints({"a": [[1, 2]], "b": []})
    assert [
        len(points) for points in uneven.stack([uneven.crop(key, SIZE, (0, 0, 9, 9), (9, 9), False) for key in "ab"])
    ] == [1, 0]
    labeled = lk.Boxes({"a": [[0, 0, 5, 5]]}, labels={"a": [0.5]})
    assert labeled.stack([labeled.crop("a", SIZE, (0, 0, 9, 9), (9, 9), False)])[0]["labels"].dtype == torch.float32
    mixed = [masks(png(pixels)).crop("a.png", SIZE, (0, 0, 9, 9), (9, 9), False) for pixels in (PIXELS, DEEP)]
    assert masks().stack(mixed).dtype == torch.int32


# --- data sets


@pytest.fixture
def root(tmp_path):
    """Photos of several sizes, one of them turned by EXIF, with masks before turning, maps and boxes."""
    for number in range(6):
        size = 60 + 7 * number, 90 - 5 * number
        random = np.random.default_rng(number)
        for folder in ("photos", "masks", "maps"):
            (tmp_path / folder / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        photo = Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))
        photo.save(tmp_path / f"photos/c{number % 2}/{number}.jpg", exif=exif_of(6 if number == 3 else 1))
        Image.fromarray(random.integers(0, 9, size, np.uint8)).save(tmp_path / f"masks/c{number % 2}/{number}.png")
        upright = size[::-1] if number == 3 else size
        np.save(tmp_path / f"maps/c{number % 2}/{number}.npy", random.random(upright, np.float32))
    return tmp_path


KEYS = [f"c{number % 2}/{number}.jpg" for number in (0, 2, 4, 1, 3, 5)]
BOXES = {key: [[number, 2, 30 + number, 40]] * (number % 3) for number, key in enumerate(KEYS)}
BOX_LABELS = {key: list(range(len(boxes))) for key, boxes in BOXES.items()}
POINTS = {key: [[number, 20], [30, number]] for number, key in enumerate(KEYS)}


def all_targets(root) -> dict:
    return {
        "mask": lk.Masks(root / "masks"), "depth": lk.Maps(root / "maps"), "points": lk.Keypoints(POINTS),
        "boxes": lk.Boxes(BOXES, labels=BOX_LABELS),
    }  # fmt: skip


class Plain(torch.utils.data.Dataset):
    """The same data set by Pillow and torchvision alone."""

    def __init__(self, root, transform):
        self.root, self.transform = root, transform

    def __len__(self):
        return len(KEYS)

    def __getitem__(self, index):
        key = KEYS[index]
        photo = lk.decode((self.root / "photos" / key).read_bytes())
        mask = np.asarray(Image.open((self.root / "masks" / key).with_suffix(".png")))
        mask = np.rot90(mask, -1).copy() if "3" in key else mask.copy()
        size = tuple(photo.shape[1:])
        boxes = torch.tensor(BOXES[key], dtype=torch.float32).reshape(-1, 4)
        return self.transform(tv_tensors.Image(photo), {
            "mask": tv_tensors.Mask(mask),
            "depth": tv_tensors.Image(np.load((self.root / "maps" / key).with_suffix(".npy"))[None]),
            "points": tv_tensors.KeyPoints(POINTS[key], dtype=torch.float32, canvas_size=size),
            "boxes": {
                "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
                "labels": torch.tensor(BOX_LABELS[key], dtype=torch.int64),
            },
        })  # fmt: skip


CROPS = v2.Compose([
    v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(),
    v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["boxes"]["labels"]),
])  # fmt: skip


def flat(sample) -> list:
    return torch.utils._pytree.tree_leaves(sample)


def test_items_are_those_of_a_data_set_by_hand(root):
    found = lk.ImageDataset(root / "photos", targets=all_targets(root), transform=CROPS)
    plain = Plain(root, CROPS)
    assert list(found.keys) == KEYS
    for index in range(len(KEYS)):
        for _ in range(5):
            torch.manual_seed(index)
            expected = flat(plain[index])
            torch.manual_seed(index)
            leaves = flat(tuple(found[index]))
            assert [type(leaf) for leaf in leaves] == [type(leaf) for leaf in expected]
            assert [torch.equal(*pair) for pair in zip(leaves, expected, strict=True)] == [True] * 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_have_targets_by_name(root, num_workers):
    dataset = lk.ImageDataset(
        root / "photos", targets=all_targets(root), transform=CROPS, labels=dict.fromkeys(KEYS, 0.5), return_keys=True
    )
    config = lk.LoaderConfig(batch_size=6, num_workers=num_workers, start_method="fork" if num_workers else None)
    [(images, targets, keys)] = lk.make_loader(dataset, config)
    assert images.shape == (6, 3, 48, 48)
    assert (targets["mask"].shape, targets["depth"].shape) == ((6, 48, 48), (6, 1, 48, 48))
    assert targets["points"].shape == (6, 2, 2)
    assert targets["label"].tolist() == [0.5] * 6
    assert [len(boxes["labels"]) == len(boxes["boxes"]) for boxes in targets["boxes"]] == [True] * 6
    assert keys == KEYS
    uneven = lk.ImageDataset(
        root / "photos", targets={"points": lk.Keypoints(BOXES_AS_POINTS)}, transform=v2.Resize((8, 8))
    )
    [(_, targets)] = lk.make_loader(uneven, lk.LoaderConfig(6, num_workers=0))
    assert [len(points) for points in targets["points"]] == [0, 2, 4, 0, 2, 4]


BOXES_AS_POINTS = {key: np.reshape(boxes, (-1, 2)) for key, boxes in BOXES.items()}


def test_labels_are_among_the_targets_only_if_they_are_asked_for(root, recwarn):
    targets = {"boxes": lk.Boxes(BOXES)}
    photos = MemoryStore({key.replace("/", "-"): (root / "photos" / key).read_bytes() for key in KEYS})
    boxes = {"boxes": lk.Boxes({key.replace("/", "-"): boxes for key, boxes in BOXES.items()})}
    _, found = lk.ImageDataset(photos, targets=boxes)[1]
    assert isinstance(found.pop("boxes"), tv_tensors.BoundingBoxes)
    assert found == {}
    assert not recwarn
    dataset = lk.ImageDataset(root / "photos", targets=targets, classes=["c1", "c0"])
    assert dataset[0][1]["label"] == 1
    named = lk.ImageDataset(root / "photos", targets=targets, labels=dict.fromkeys(KEYS, "a text"), classes=[])
    assert lk.collate([named[1], named[1]])[1]["label"] == ["a text"] * 2


def test_what_cannot_be_read_of_a_target_is_skipped_like_an_image(root):
    (root / "masks/c0/2.png").write_bytes(b"damaged")
    dataset = lk.ImageDataset(root / "photos", targets=all_targets(root), transform=CROPS, on_error="skip")
    (root / "maps/c1/5.npy").unlink()
    images, targets = lk.collate([dataset[index] for index in range(6)])
    assert len(images) == len(targets["boxes"]) == 4
    assert {skip.key for skip in dataset.skipped} == {"c0/2.jpg", "c1/5.jpg"}


@pytest.mark.parametrize(("options", "said"), [
    ({"targets": [1]}, "targets must be a dict of targets by name"),
    ({"targets": {"mask": "masks"}}, r"targets\['mask'\] must be lk\.Masks"),
    ({"targets": {"label": lk.Boxes(BOXES)}}, "targets are named by strings other than 'label'"),
    ({"targets": {1: lk.Boxes(BOXES)}}, "targets are named by strings"),
    ({"targets": {"boxes": lk.Boxes(dict(list(BOXES.items())[:4]))}}, r"2 of 6 images have no boxes, .* 'c1/3\.jpg'"),
    ({"targets": {"boxes": lk.Boxes(BOXES)}, "buckets": lk.Buckets(((32, 32),))}, "buckets= crops images alone"),
])  # fmt: skip
def test_targets_that_do_not_fit_are_refused(root, options, said):
    with pytest.raises(lk.LabkitError, match=said):
        lk.ImageDataset(root / "photos", **options)


@pytest.mark.parametrize("transform", [lambda image: image, lambda image, targets: image])
def test_a_transform_that_takes_or_gives_no_targets_is_told_of_them(root, transform):
    dataset = lk.ImageDataset(root / "photos", targets={"boxes": lk.Boxes(BOXES)}, transform=transform)
    with pytest.raises(TypeError) as failure:
        dataset[0]
    assert "and a dict of targets" in failure.value.__notes__[0]
