"""A crop that is cut from the bytes of a tiled JPEG has the pixels of the whole photo, with any decoder."""

import io
import json
import re
import shutil
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import labkit as lk
from labkit.app.cli import main
from labkit.data import tiles
from labkit.data.decode import missing_decoders
from labkit.data.partial_jpeg import WholeDecoder, head_of, without_segments
from labkit.data.tiles import MANIFEST, cut_jpeg, restart_interval, tile_jpegs, tiling_of
from labkit.errors import ArgumentError, ItemErrors, MissingLibraryError
from labkit.loading import encoded as encoded_images
from labkit.util.files import write_atomic
from tests.data.test_partial_jpeg import jpeg, needs_library, random_crops, whole
from tests.image_files import encoded, write_pictures
from tests.jpeg_files import jpeg_of_each_process
from tests.memory_store import MemoryStore
from tests.paths import contents, invoke

JPEGTRAN = shutil.which("jpegtran")
needs_jpegtran = pytest.mark.skipif(not JPEGTRAN, reason="apt-get install libjpeg-turbo-progs")


def by_pillow(height: int, width: int, subsampling: str = "4:2:0", interval: int | None = None, **options) -> bytes:
    """A photo that Pillow tiles as it encodes it: with markers, and without a table."""
    gray = subsampling == "gray"
    image = Image.open(io.BytesIO(jpeg(height, width))).convert("L" if gray else "RGB")
    if interval is None:
        interval = restart_interval(width, 16 if subsampling in ("4:2:0", "4:2:2") else 8)
    sampling = {} if gray else {"subsampling": subsampling}
    return encoded(image, quality=90, restart_marker_blocks=interval, **sampling, **options)


def with_segments(data: bytes, *tables: bytes, behind: bytes = b"") -> bytes:
    """The same JPEG, with these tables in place of its own, and something behind them."""
    bare = without_segments(data, {0xEB})
    scan = bare.index(b"\xff\xda")
    segments = [struct.pack(">HH", 0xFFEB, 15 + len(table)) + b"labkit tiles\0" + table for table in tables]
    return b"".join([bare[:scan], *segments, behind, bare[scan:]])


def with_table(data: bytes) -> bytes:
    return with_segments(data, np.diff(tiling_of(data).markers).astype("<u2").tobytes())


def pixels_of(data: bytes, box: tuple[int, int, int, int]) -> np.ndarray:
    top, left, height, width = box
    return whole(data)[top : top + height, left : left + width]


SIZES = [(250, 330), (97, 143), (17, 256)]


class TestCut:
    @pytest.mark.parametrize("made", [lambda data: data, with_table], ids=["markers", "table"])
    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "gray"])
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_pixels_are_those_of_the_whole_photo(self, size, subsampling, made):
        photo = made(by_pillow(*size, subsampling))
        n_smaller = 0
        for box in random_crops(*size, 20):
            data, place = cut_jpeg(photo, box)
            n_smaller += len(data) < len(photo)
            np.testing.assert_array_equal(pixels_of(data, place), pixels_of(photo, box))
        assert n_smaller > 5

    @pytest.mark.parametrize("decoder", [name for name in lk.DECODERS if name not in missing_decoders()])
    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
    def test_any_decoder_reads_it(self, subsampling, decoder):
        photo = with_table(by_pillow(187, 250, subsampling))
        expected = lk.decode(photo, decoder)
        for box in random_crops(187, 250, 20):
            data, (top, left, height, width) = cut_jpeg(photo, box)
            part = lk.decode(data, decoder)[:, top : top + height, left : left + width]
            assert torch.equal(part, expected[:, box[0] : box[0] + box[2], box[1] : box[1] + box[3]])

    def test_at_a_smaller_scale_it_keeps_wider_margins(self):
        photo = with_table(by_pillow(384, 512))
        for scale in (2, 4, 8):
            for box in random_crops(384 // scale, 512 // scale, 20):
                data, place = cut_jpeg(photo, tuple(side * scale for side in box), scale=scale)
                top, left, height, width = (side // scale for side in place)
                found = whole(data, scale)[top : top + height, left : left + width]
                expected = whole(photo, scale)[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
                np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize(
        ("width", "subsampling", "scale", "box"),
        [(67, "4:2:0", 1, (40, 66, 8, 1)), (68, "4:2:2", 1, (40, 66, 8, 2)), (68, "4:2:0", 1, (40, 0, 8, 1)),
         (96, "4:2:2", 4, (40, 0, 8, 8)), (96, "4:2:2", 4, (40, 88, 8, 8)), (96, "4:2:0", 8, (48, 88, 8, 8))],
    )  # fmt: skip
    def test_a_cut_is_never_so_narrow_that_chroma_is_upsampled_otherwise(self, width, subsampling, scale, box):
        photo = by_pillow(96, width, subsampling, interval=1)
        data, place = cut_jpeg(photo, box, scale=scale)
        assert len(data) < len(photo)
        parts = []
        for one, (top, left, height, columns) in ((data, place), (photo, box)):
            rows = slice(top // scale, -(-(top + height) // scale))
            parts.append(whole(one, scale)[rows, left // scale : -(-(left + columns) // scale)])
        np.testing.assert_array_equal(*parts)

    def test_metadata_stay(self):
        exif, profile = Image.Exif(), b"profile" * 10
        exif[0x0112] = 6
        photo = with_table(by_pillow(96, 256, exif=exif, icc_profile=profile, comment=b"a comment"))
        data, _ = cut_jpeg(photo, (0, 0, 10, 10))
        assert len(data) < len(photo) / 2
        with Image.open(io.BytesIO(data)) as image:
            assert image.getexif()[0x0112] == 6
            assert (image.info["icc_profile"], image.info["comment"]) == (profile, b"a comment")

    @pytest.mark.parametrize("name", jpeg_of_each_process())
    def test_what_is_not_tiled_comes_back_as_it_is(self, name):
        data, box = jpeg_of_each_process()[name], (1, 2, 3, 4)
        assert cut_jpeg(data, box) == (data, box)

    @pytest.mark.parametrize("interval", [3, 32, 64, 7], ids=["no divisor", "a row", "two rows", "another"])
    def test_pieces_of_other_widths(self, interval):
        photo = by_pillow(128, 512, interval=interval)
        box = (40, 100, 20, 30)
        data, place = cut_jpeg(photo, box)
        np.testing.assert_array_equal(pixels_of(data, place), pixels_of(photo, box))
        assert (len(data) < len(photo)) == (interval == 32)

    @pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 5, 0), (0, 250, 5, 7)])
    def test_a_box_that_leads_out_of_the_photo_is_an_error(self, box):
        with pytest.raises(ArgumentError, match="96 pixels high and 256 wide"):
            cut_jpeg(by_pillow(96, 256), box)


class TestDamage:
    PHOTO = with_table(by_pillow(64, 256))

    def test_a_table_that_is_wrong_is_not_used(self):
        table = self.PHOTO.index(b"labkit tiles\0") + 13
        for at in range(table, table + 32):
            damaged = self.PHOTO[:at] + bytes([self.PHOTO[at] ^ 1]) + self.PHOTO[at + 1 :]
            data, place = cut_jpeg(damaged, (20, 100, 8, 8))
            assert len(data) < len(damaged) / 2
            np.testing.assert_array_equal(pixels_of(data, place), pixels_of(self.PHOTO, (20, 100, 8, 8)))

    @pytest.mark.parametrize(
        "change",
        [
            lambda lengths: lengths[::-1],
            lambda lengths: [lengths[1], lengths[0], *lengths[2:]],
            lambda lengths: [sum(lengths[:9]), *lengths[9:], *[0] * 8],  # each marker has the number of the right one
            lambda lengths: [*lengths[:2], sum(lengths[2:4]), 0, *lengths[4:]],
            lambda lengths: lengths[:-1],
            lambda lengths: [*lengths, 0],
            lambda lengths: [0] * len(lengths),
            lambda lengths: [0xFFFF] * len(lengths),
        ],
        ids=["reversed", "swapped", "eight skipped", "canceled", "too short", "too long", "zeros", "outside"],
    )
    def test_of_a_hostile_table_come_the_right_pixels(self, change):
        lengths = np.diff(tiling_of(self.PHOTO).markers).tolist()
        hostile = with_segments(self.PHOTO, struct.pack(f"<{len(change(lengths))}H", *change(lengths)))
        for box in random_crops(64, 256, 20):
            data, place = cut_jpeg(hostile, box)
            assert b"labkit" not in data or data is hostile
            np.testing.assert_array_equal(pixels_of(data, place), pixels_of(self.PHOTO, box))
        assert len(cut_jpeg(hostile, (20, 100, 8, 8))[0]) < len(hostile) / 2

    def test_a_table_may_be_in_several_segments_right_in_front_of_the_scan(self):
        table = head_of(self.PHOTO).table
        several = with_segments(self.PHOTO, table[:10], table[10:12], table[12:])
        assert head_of(several).table == table
        assert cut_jpeg(several, (20, 100, 8, 8)) == cut_jpeg(self.PHOTO, (20, 100, 8, 8))
        other = with_segments(self.PHOTO, table, behind=b"\xff\xfe\0\4ab")
        assert head_of(other).table == b""
        data, place = cut_jpeg(other, (20, 100, 8, 8))
        np.testing.assert_array_equal(pixels_of(data, place), pixels_of(self.PHOTO, (20, 100, 8, 8)))

    def test_a_file_that_ends_early_is_not_cut(self):
        for end in range(0, len(self.PHOTO) - 1, 7):
            assert cut_jpeg(self.PHOTO[:end], (0, 0, 1, 1)) == (self.PHOTO[:end], (0, 0, 1, 1))

    def test_a_marker_that_is_missing_twice_or_another_leaves_the_file_whole(self):
        third = tiling_of(self.PHOTO).markers[3]
        for marker in (b"", b"\xff\xd2\xff\xd2", b"\xff\xd5", b"\xff\xd9"):
            damaged = self.PHOTO[:third] + marker + self.PHOTO[third + 2 :]
            assert cut_jpeg(damaged, (0, 0, 1, 1))[0] == damaged

    def test_no_single_byte_makes_it_raise_or_give_wrong_pixels(self):
        photo = with_table(by_pillow(32, 128))
        box = (4, 70, 9, 9)
        first = tiling_of(photo).head.end
        for at in range(2, first):
            for value in (0, 1, 0xFF, photo[at] ^ 0x10):
                damaged = photo[:at] + bytes([value]) + photo[at + 1 :]
                with suppress(ArgumentError):  # the box leads out of it now
                    data, place = cut_jpeg(damaged, box)
                try:
                    expected = whole(damaged)
                except ValueError:  # no decoder reads it
                    continue
                if data != damaged and len(expected) >= 13:
                    np.testing.assert_array_equal(pixels_of(data, place), pixels_of(damaged, box))


def huge(data: bytes) -> bytes:
    """A JPEG whose header states 65,000 x 65,000 pixels."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", 65_000, 65_000) + data[at + 4 :]


def photos_of_many_kinds() -> MemoryStore:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(whole(jpeg(90, 250)))
    photos = {f"cat/{name}.jpg": data for name, data in jpeg_of_each_process().items()}
    photos |= {f"dog/{kind}.jpg": jpeg(90, 250, kind) for kind in ("444", "422", "420", "440", "Gray", "progressive")}
    photos |= {
        "dog/turned.jpg": encoded(image, exif=exif, comment=b"mine", icc_profile=b"profile"),
        "dog/cut.jpg": encoded(image)[:-500],
        "dog/cut and closed.jpg": encoded(image)[:-500] + b"\xff\xd9",
        "dog/prime.jpg": encoded(Image.fromarray(whole(jpeg(90, 375))), subsampling="4:4:4"),
        "dog/picture.png": encoded(image, "PNG"),
        "dog/empty.jpg": b"",
        "dog/frame.jpg": b"\xff\xd8\xff\xc0\x00\x11",
        "dog/huge.jpg": huge(jpeg(90, 250)),
    }
    return MemoryStore(photos)


def assert_a_rerun_goes_on(store, root, folder, spoiled, **options) -> None:
    before = contents(root)
    kept = (folder / "422.jpg").stat().st_mtime_ns
    spoiled |= {folder / "420.jpg": (folder / "420.jpg").read_bytes()[:-100]}
    for path, data in spoiled.items():
        path.write_bytes(data)
    (folder / "444.jpg").unlink()
    tile_jpegs(store, root, progress=False, **options)
    assert contents(root) == before
    assert (folder / "422.jpg").stat().st_mtime_ns == kept


@needs_jpegtran
class TestTileJpegs:
    def test_changes_no_pixel_and_no_metadata_and_lists_what_is_copied(self, tmp_path):
        store = photos_of_many_kinds()
        root = tile_jpegs(store, tmp_path / "tiled", progress=False)
        record = json.loads((root / MANIFEST).read_text())
        assert record["n_tiled"] + len(record["copied"]) == len(store.keys())
        for key in list(store.keys()):
            made, data = (root / key).read_bytes(), store.read(key)
            if key in record["copied"]:
                assert made == data, record["copied"][key]
                continue
            assert tiling_of(made).head.table
            assert torch.equal(lk.decode(made), lk.decode(data))
            with Image.open(io.BytesIO(made)) as after, Image.open(io.BytesIO(data)) as before:
                assert after.getexif() == before.getexif()
                assert [after.info.get(name) for name in ("icc_profile", "comment")] == [
                    before.info.get(name) for name in ("icc_profile", "comment")
                ]
        assert {key.removesuffix(".jpg") for key in list(store.keys()) if key not in record["copied"]} == {
            "cat/baseline", "cat/behind fill bytes", "cat/progressive", "dog/444", "dog/422", "dog/420", "dog/440",
            "dog/Gray", "dog/progressive", "dog/turned",
        }  # fmt: skip
        assert "47 columns of 8 pixels" in record["copied"]["dog/prime.jpg"]
        assert "no JPEG" in record["copied"]["dog/picture.png"]
        assert "damaged" in record["copied"]["dog/cut.jpg"]
        assert "pixels" in record["copied"]["dog/huge.jpg"]

    def test_a_rerun_goes_on_and_replaces_what_is_cut(self, tmp_path):
        store, root = photos_of_many_kinds(), tmp_path / "tiled"
        tile_jpegs(store, root, progress=False)
        gray = root / "dog/Gray.jpg"
        without_table = {gray: without_segments(gray.read_bytes(), {0xEB})}
        assert_a_rerun_goes_on(store, root, root / "dog", without_table)

    def test_what_cannot_be_read_is_an_error_and_the_others_are_written(self, tmp_path):
        store = photos_of_many_kinds()
        store.read = lambda key, read=store.read: read(key) if "422" not in key else read("gone")
        with pytest.raises(ItemErrors, match="422"):
            tile_jpegs(store, tmp_path / "tiled", progress=False)
        assert (tmp_path / "tiled/dog/420.jpg").exists()
        assert not list((tmp_path / "tiled").rglob("*.partial"))

    def test_another_source_or_a_foreign_folder_is_refused(self, tmp_path):
        tile_jpegs(MemoryStore({"a/1.jpg": jpeg(90, 250)}), tmp_path / "tiled", progress=False)
        with pytest.raises(ArgumentError, match="names and sizes differ"):
            tile_jpegs(MemoryStore({"a/2.jpg": jpeg(90, 250)}), tmp_path / "tiled", progress=False)
        photos = write_pictures(tmp_path / "photos", "a/1.jpg", size=(256, 64))
        tile_jpegs(photos, tmp_path / "again", progress=False)
        write_pictures(photos, "a/1.jpg", size=(256, 96))
        with pytest.raises(ArgumentError, match="names and sizes differ"):
            tile_jpegs(photos, tmp_path / "again", progress=False)
        (tmp_path / "other").mkdir()
        (tmp_path / "other/mine.txt").touch()
        with pytest.raises(ArgumentError, match=r"mine\.txt"):
            tile_jpegs(MemoryStore({"a/1.jpg": jpeg(90, 250)}), tmp_path / "other", progress=False)


@pytest.fixture
def _no_jpegtran(monkeypatch):
    monkeypatch.setattr(tiles.shutil, "which", lambda name: None)


def photos_of_many_sizes() -> MemoryStore:
    exif, profile = Image.Exif(), b"profile" * 10
    exif[0x0112] = 6
    image = Image.fromarray(whole(jpeg(270, 360)))
    photos = {
        f"a/{kind}.jpg": jpeg(270, 360, kind) for kind in ("444", "422", "420", "440", "411", "Gray", "progressive")
    }
    return MemoryStore(photos | {
        "b/turned.jpg": encoded(image, exif=exif, icc_profile=profile),
        "b/ink.jpg": encoded(image.convert("CMYK"), icc_profile=profile),
        "b/prime.jpg": encoded(image.resize((372, 270)).convert("L")),
        "b/small.jpg": encoded(image.resize((300, 96))),
        "b/cut.jpg": encoded(image)[:-500],
        "b/huge.jpg": huge(jpeg(90, 250)),
        "b/picture.png": encoded(image, "PNG"),
    })  # fmt: skip


@pytest.mark.usefixtures("_no_jpegtran")
class TestShortSide:
    def test_pixels_are_those_that_pillow_makes_small(self, tmp_path):
        store = photos_of_many_sizes()
        root = tile_jpegs(store, tmp_path / "tiled", short_side=96, quality=85, progress=False)
        record = json.loads((root / MANIFEST).read_text())
        made = [key for key in list(store.keys()) if key not in record["copied"]]
        assert [key.removesuffix(".jpg") for key in made] == [
            *(f"a/{kind}" for kind in ("411", "420", "422", "440", "444", "Gray", "progressive")),
            "b/ink", "b/prime", "b/turned",
        ]  # fmt: skip
        for key in made:
            source, found = Image.open(io.BytesIO(store.read(key))), Image.open(root / key)
            is_gray = source.mode == "L"
            upright = ImageOps.exif_transpose(source).convert("L" if is_gray else "RGB")
            assert min(found.size) == 96
            assert abs(max(found.size) - 96 * max(upright.size) / min(upright.size)) < 1
            small = upright.resize(found.size, Image.Resampling.BILINEAR)
            again = encoded(small, quality=85, **({} if is_gray else {"subsampling": "4:2:0"}))
            difference = np.subtract(found, Image.open(io.BytesIO(again)), dtype=float)
            assert np.abs(difference).mean() < 0.3
            with Image.open(io.BytesIO(again)) as expected:
                assert found.mode == expected.mode
                assert found.layer == expected.layer
                assert found.quantization == expected.quantization
            assert not found.getexif()
            assert found.info.get("icc_profile") == (source.info.get("icc_profile") if "ink" not in key else None)
            is_one_column = tiling_of((root / key).read_bytes()).piece_width >= found.width
            assert is_one_column == (key == "b/prime.jpg")
        assert record["n_tiled"] == len(made)

    def test_what_is_small_or_no_jpeg_or_damaged_is_copied_with_the_reason(self, tmp_path):
        store = photos_of_many_sizes()
        root = tile_jpegs(store, tmp_path / "tiled", short_side=96, progress=False)
        copied = json.loads((root / MANIFEST).read_text())["copied"]
        for key in copied:
            assert (root / key).read_bytes() == store.read(key)
        for name, reason in {
            "small.jpg": "shorter side has 96 pixels", "cut.jpg": "truncated", "huge.jpg": "limit",
            "picture.png": "no JPEG",
        }.items():  # fmt: skip
            assert reason in copied.pop(f"b/{name}")
        assert not copied

    def test_a_rerun_goes_on_and_another_size_or_quality_is_refused(self, tmp_path):
        store, root = photos_of_many_sizes(), tmp_path / "tiled"
        tile_jpegs(store, root, short_side=96, progress=False)
        assert_a_rerun_goes_on(store, root, root / "a", {}, short_side=96, quality=90)
        with pytest.raises(ArgumentError, match="short_side 96, not 128"):
            tile_jpegs(store, root, short_side=128, progress=False)
        with pytest.raises(ArgumentError, match="quality 90, not 80"):
            tile_jpegs(store, root, short_side=96, quality=80, progress=False)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"short_side": 0}, "short_side must be"), ({"short_side": 9, "quality": 101}, "from 1 to 100, got 101"),
         ({"short_side": 9, "quality": 0}, "quality must be"), ({"quality": 80}, "pass short_side as well")],
    )  # fmt: skip
    def test_wrong_arguments_are_named(self, options, message, tmp_path):
        with pytest.raises(ArgumentError, match=message):
            tile_jpegs(photos_of_many_sizes(), tmp_path / "tiled", progress=False, **options)
        assert not (tmp_path / "tiled").exists()

    def test_the_command_says_what_it_did(self, tmp_path):
        photos = tmp_path / "photos"
        for key, data in photos_of_many_sizes().files.items():
            write_atomic(photos / key, data)
        command = ["convert", "--to", "tiles", "--short-side", "96", str(photos), str(tmp_path / "tiled")]
        done = invoke(main, command)
        assert done.exit_code == 0, done.output
        assert re.search(r"10 tiled, 4 copied as they are .*; \d of these damaged, such as \S+", done.output)
        again = invoke(main, [*command, "--short-side", "128"])
        assert again.exit_code != 0
        assert "--short-side 96, not 128" in again.output


@pytest.mark.usefixtures("_no_jpegtran")
def test_without_jpegtran_an_error_names_the_packages(tmp_path):
    with pytest.raises(MissingLibraryError, match="libjpeg-turbo-progs"):
        tile_jpegs(MemoryStore({"a/1.jpg": jpeg(90, 250)}), tmp_path / "tiled")
    assert not (tmp_path / "tiled").exists()


def tiled_and_plain() -> tuple[MemoryStore, MemoryStore]:
    """The same pixels twice: with restart markers and a table, and without."""
    kinds = ["4:2:0", "4:4:4", "gray"]
    photos = {f"{'ab'[i % 2]}/{i}.jpg": (300 + 48 * i, 400 + 48 * i, kind) for i, kind in enumerate(kinds)}
    tiled = {key: with_table(by_pillow(*photo)) for key, photo in photos.items()}
    return MemoryStore(tiled), MemoryStore({key: by_pillow(*photo, interval=0) for key, photo in photos.items()})


@pytest.mark.parametrize("library", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize(
    "options",
    [{"scale": (0.05, 0.25), "size": 64}, {"scaled_decoding": False}, {"train": False}],
    ids=str,
)
def test_batch_loader_gives_the_same_batches_and_decodes_parts(options, library, monkeypatch):
    if not library:
        monkeypatch.setattr(encoded_images, "open_decoder", WholeDecoder)
    decoded = []
    decoder = type(encoded_images.open_decoder())
    monkeypatch.setattr(
        decoder,
        "decode",
        lambda *given, decode=decoder.decode, **how: decoded.append(given[1]) or decode(*given, **how),
    )
    tiled, plain = tiled_and_plain()
    options = {"size": 160, "batch_size": 3, "seed": 1, **options}
    for _ in range(2):
        batches = [list(lk.BatchLoader(store, **options)) for store in (tiled, plain)]
        for (images, labels), (expected, expected_labels) in zip(*batches, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)
    n_parts = sum(data not in [*tiled.files.values(), *plain.files.values()] for data in decoded)
    assert n_parts > len(decoded) / 5 or not options.get("train", True)  # without draws, the whole photo is seen


@pytest.mark.parametrize("orientation", [1, 6, 7])
def test_batches_of_turned_photos_are_those_of_the_untiled_ones(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    photos = [(97, 143, "4:2:0"), (143, 96, "4:4:4"), (128, 200, "4:2:2"), (90, 250, "gray")]
    tiled, plain = (
        MemoryStore({f"a/{number}.jpg": made(number) for number in range(len(photos))})
        for made in (
            lambda number: with_table(by_pillow(*photos[number], exif=exif)),
            lambda number: by_pillow(*photos[number], interval=0, exif=exif),
        )
    )
    for _ in range(4):
        for images, expected in zip(*(lk.BatchLoader(of, size=48, batch_size=4) for of in (tiled, plain)), strict=True):
            assert torch.equal(images[0], expected[0])


def test_damage_names_the_file():
    tiled, _ = tiled_and_plain()
    data = tiled.files["a/0.jpg"]
    tiled.files["a/0.jpg"] = data[: len(data) // 2] + b"\xff\xc0" + data[len(data) // 2 + 2 :]
    with pytest.raises(lk.DecodeError, match=r"a/0\.jpg"):
        list(lk.BatchLoader(tiled, train=False, size=300, batch_size=3))
