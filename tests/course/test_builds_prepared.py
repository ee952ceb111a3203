"""Judges of notebooks 10 to 11b: each classic mistake is told by its name."""

import re
import struct
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from labkit import course
from tests.paths import REPO

SOF0, SOF1, SOF2 = 0xC0, 0xC1, 0xC2


def solved(stem, check):
    """The names of a notebook's imports, of the skeleton that ends with a check, and of its folded answer."""
    cells = nbformat.read(REPO / "notebooks" / f"{stem}.ipynb", as_version=4).cells
    imports = next(cell.source for cell in cells if cell.cell_type == "code")
    number = next(n for n, cell in enumerate(cells) if cell.cell_type == "code" and check in cell.source)
    answer = re.search(r"<details>.*```python\n(.*)\n```\n\n</details>", cells[number - 1].source, re.DOTALL)
    space: dict = {}
    for code in (imports, cells[number].source[: cells[number].source.index("course.check(")], answer[1]):
        exec(code, space)  # noqa: S102 - our own notebooks
    return space


class TestSizes:
    @staticmethod
    def walk(data, frames=(SOF0, SOF1, SOF2), turning=(5, 6, 7, 8), *, last_first=False, app1=b"Exif", filled=True):
        at, orientation = 2, 1
        while True:
            while filled and data[at + 1] == 0xFF:
                at += 1
            marker, length = struct.unpack_from(">xBH", data, at)
            if marker == 0xE1 and data[at + 4 : at + 8].startswith(app1):
                exif = Image.Exif()
                if data[at + 4 : at + 8] == b"Exif":
                    exif.load(data[at + 4 : at + 2 + length])
                orientation = exif.get(0x0112, 1)
            if marker in frames:
                height, width = struct.unpack_from(">HH", data, at + 5)
                return (height, width) if (orientation in turning) != last_first else (width, height)
            at += 2 + length

    @staticmethod
    def first_frame_anywhere(data):
        height, width = struct.unpack_from(">HH", data, data.index(b"\xff\xc0") + 5)
        return width, height

    def test_a_list_is_right_too(self, said):
        assert said(lambda data: list(self.walk(data)), course.jpeg_sizes) == "right\n"

    def test_each_mistake_has_its_name(self, said):
        def wrong(answer):
            return said(answer, course.jpeg_sizes)

        assert "(16, 12) is the thumbnail's size" in wrong(self.first_frame_anywhere)
        assert "has height and width swapped" in wrong(lambda data: self.walk(data, last_first=True))
        assert "orientation 6, on its side: (64, 48) is wrong" in wrong(lambda data: self.walk(data, turning=()))
        assert "orientation 3, upside down: (48, 64) is wrong" in wrong(lambda data: self.walk(data, turning=(3, 6, 8)))
        assert "progressive photo, whose frame is SOF2 raised IndexError" in wrong(
            lambda data: self.walk(data, (SOF0,))
        )
        assert "an ordinary photo raised TypeError" in wrong(lambda data: None)
        assert "bytes FF that fill the space before a marker raised error" in wrong(
            lambda data: self.walk(data, filled=False)
        )

    @pytest.mark.parametrize(
        ("turning", "told"),
        [
            ((4, 5, 6, 7, 8), "orientation 4: (48, 64) is wrong"),
            ((6, 7, 8), "orientation 5: (64, 48) is wrong"),
            ((5, 6, 8), "orientation 7: (64, 48) is wrong"),
        ],
    )
    def test_each_orientation_is_tried(self, said, turning, told):
        assert told in said(lambda data: self.walk(data, turning=turning), course.jpeg_sizes)

    def test_each_marker_that_is_no_frame_or_no_exif_is_tried(self, said):
        def wrong(**options):
            return said(lambda data: self.walk(data, **options), course.jpeg_sizes)

        assert "whose Huffman table, marker C4, comes before its frame: (" in wrong(frames=range(0xC0, 0xD0))
        assert "after its EXIF XMP, an APP1 that must not undo it: (64, 48) is wrong" in wrong(app1=b"")


class TestPixels:
    @pytest.fixture(scope="class")
    @classmethod
    def right(cls):
        space = solved("11_prepare_once", "course.packed_pixels")
        return space["pack"], space["crop"]

    @staticmethod
    def saved(photos, folder, per_pixel=1):
        """Pack pixels and an index, whose starts count bytes, or pixels of three."""
        Path(folder).mkdir()
        shapes = []
        with open(f"{folder}/photos.bin", "wb") as file:
            for photo in photos:
                photo.tofile(file)
                shapes.append(photo.shape)
        np.savez(f"{folder}/index.npz", shapes=shapes, starts=np.cumsum([0, *np.prod(shapes, axis=1) // per_pixel]))

    @staticmethod
    def read(folder, number, swapped=False):
        with np.load(f"{folder}/index.npz") as index:
            start, (rows, columns, _) = index["starts"][number], index["shapes"][number]
        memory = np.memmap(f"{folder}/photos.bin", np.uint8, "r")
        shape = (columns, rows, 3) if swapped else (rows, columns, 3)
        return memory[start : start + rows * columns * 3].reshape(shape)

    def test_all_photos_in_memory(self, said, right):
        def pack(photos, folder):
            whole = [photo.copy() for photo in photos]
            self.saved(whole, folder)

        assert "16 photos in memory at once; write each" in said((pack, right[1]), course.packed_pixels)

    def test_starts_that_count_pixels(self, said):
        def pack(photos, folder):
            self.saved(photos, folder, per_pixel=3)

        def crop(folder, number, top, left, height, width):
            return self.read(folder, number)[top : top + height, left : left + width]

        assert "a crop of photo 1 has other pixels" in said((pack, crop), course.packed_pixels)

    @pytest.mark.parametrize(("where", "told"), [("shape", "has other pixels"), ("box", "has the shape (50, 30, 3)")])
    def test_rows_and_columns_swapped(self, said, where, told):
        def crop(folder, number, top, left, height, width):
            if where == "box":
                top, left, height, width = left, top, width, height
            return self.read(folder, number, where == "shape")[top : top + height, left : left + width]

        assert f"a crop of photo 0 {told}" in said((self.saved, crop), course.packed_pixels)

    def test_what_only_variables_know(self, said):
        shapes = []

        def pack(photos, folder):
            nonlocal shapes
            shapes = []
            self.saved((photo for photo in photos if shapes.append(photo.shape) is None), folder)

        def crop(folder, number, top, left, height, width):
            start = sum(map(np.prod, shapes[:number]))
            memory = np.memmap(f"{folder}/photos.bin", np.uint8, "r")
            photo = memory[start : start + np.prod(shapes[number])].reshape(shapes[number])
            return photo[top : top + height, left : left + width]

        told = "in a folder that was moved raised IndexError: list index out of range; all that crop needs"
        assert told in said((pack, crop), course.packed_pixels)

    def test_a_crop_that_reads_everything(self, said):
        def crop(folder, number, top, left, height, width):
            with np.load(f"{folder}/index.npz") as index:
                start, shape = index["starts"][number], index["shapes"][number]
            photo = np.fromfile(f"{folder}/photos.bin", np.uint8)[start : start + np.prod(shape)].reshape(shape)
            return photo[top : top + height, left : left + width]

        assert "crop read more than one photo's bytes" in said((self.saved, crop), course.packed_pixels)

    def test_what_is_not_written_prints_nothing(self, said):
        assert said((lambda photos, folder: ..., lambda *box: ...), course.packed_pixels) == ""


class TestRestartMarkers:
    @staticmethod
    def scan(data):
        """The codes of the scan, to which the segments lead."""
        at = 2
        while data[at + 1] != 0xDA:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        return data[at:]

    @staticmethod
    def after_exif(data):
        """What begins with the first FF DA after the first segment."""
        return data[data.index(b"\xff\xda", 4 + int.from_bytes(data[4:6], "big")) :]

    @pytest.mark.parametrize(
        ("pattern", "part", "told"),
        [
            (rb"\xff[\x00\xd0-\xd7]", scan, "191 is right; FF 00 is a byte FF of the codes"),
            (rb"\xff[\xd0-\xd7]", bytes, "counts markers of the thumbnail inside EXIF"),
            (rb"\xff[\xd0-\xd7\xd9]", scan, "192 is wrong, 191 is right"),
            (rb"\xff\xd0", scan, "24 is wrong, 191 is right"),
            (rb"\xff[\xd0-\xd7]", after_exif, "FF DA in a comment gave 62, and 59 is right; a search finds"),
        ],
    )
    def test_each_mistake_has_its_name(self, said, pattern, part, told):
        wrong = lambda data: len(re.findall(pattern, getattr(part, "__func__", part)(data)))  # noqa: E731
        assert told in said(wrong, course.restart_markers)
