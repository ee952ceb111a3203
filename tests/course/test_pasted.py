"""What readers paste: the code under "Do this" of each notebook runs as it stands, and does what its sentence says.

The block of the stored notebook's first cell stands in a script between what its sentence takes for granted, such as
`names` and `load`, and a reader's use of it. Only numbers such as those of epochs are replaced.
"""

import json
import os
import random
import re
import shutil
import tarfile
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional

import labkit as lk
from labkit import course
from labkit.course.oracles import broken_files, oracle_files, reference
from labkit.util.pictures import encode_image
from tests.forked import run_python
from tests.paths import REPO
from tests.tars import listed, make_tar, member

NOTEBOOKS = REPO / "notebooks"
START_METHODS = ("fork", "forkserver", "spawn")
NAMES = ["é.jpg", "写真 1.jpg", " b.jpg", "c.jpg ", os.fsdecode(b"\xff\xfe.jpg"), "-d.jpg", "e'\".jpg", "long" * 50]

# The first lines of each script: how its workers start.
STARTING = """
if __name__ == "__main__":
    import multiprocessing, sys
    multiprocessing.set_start_method(sys.argv[1])
"""


@cache
def do_this(stem: str, block: int = 0) -> str:
    """The code that a notebook tells its readers to paste: the block of this number."""
    told = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4).cells[0].source
    told = told.partition("**Do this.**")[2].partition("**Not if.**")[0]
    return re.findall(r"^```python\n(.*?)^```$", told, re.DOTALL | re.MULTILINE)[block]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, f"{text.count(old)} times in the block: {old}"
        text = text.replace(old, new)
    return text


def pasted(stem: str, *, block: int = 0, **given) -> dict:
    """The names that the block defines, run here."""
    names = dict(given)
    exec(compile(do_this(stem, block), stem, "exec"), names)  # noqa: S102
    return names


def run_script(folder: Path, *parts: str, start_method: str = "fork", environment: dict[str, str] | None = None):
    """What a script of these parts prints in its last line, as JSON; it runs in `folder`."""
    (folder / "train.py").write_text("\n".join([STARTING, *parts]))
    with tempfile.TemporaryDirectory() as sockets:  # workers leave theirs behind
        given = {**os.environ, "TMPDIR": sockets, **(environment or {})}
        done = run_python("train.py", start_method, cwd=folder, env=given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory) -> Path:
    """A folder with `photos`, files whose names are not ASCII, each of which holds its number."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "photos").mkdir()
    for number, name in enumerate(NAMES):
        (folder / "photos" / name).write_text(str(number))
    return folder


@pytest.fixture(scope="module")
def photos(first_photos, tmp_path_factory) -> Path:
    """A folder with `photos`, of photographs in folders of their classes, and `train`, of all kinds of odd files."""
    folder = tmp_path_factory.mktemp("album")
    (folder / "photos").symlink_to(first_photos(8))
    (folder / "train" / "class").mkdir(parents=True)
    for name, data in oracle_files().items():
        (folder / "train" / "class" / f"é {name}").write_bytes(data)
    return folder


def upright(path: Path) -> np.ndarray:
    """The pixels of a file as Pillow sees them, upright and RGB."""
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


# Pillow clips 16 bits, and only Pillow knows of an orientation in text.
IN_PILLOW_ALONE = ("16-bit", "as text")


def resized(image: np.ndarray, side: int) -> np.ndarray:
    with Image.fromarray(image) as whole:
        return np.asarray(whole.resize((side, side), Image.Resampling.BILINEAR)).astype(int)


def odd_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted((folder / "train" / "class").iterdir())
        if not any(map(path.name.count, IN_PILLOW_ALONE))
    ]


def test_the_code_of_every_notebook_is_checked():
    tests = Path(__file__).read_text()
    assert [path.stem for path in NOTEBOOKS.glob("*.ipynb") if f'"{path.stem}"' not in tests] == []


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def loader(self, first_s: float, batch_s: float, n_batches: int):
        """Batches of 8 images, of which the first 20 take `first_s` and all others `batch_s`."""
        for number in range(n_batches):
            self.now_s += first_s if number < 20 else batch_s
            yield torch.zeros(8, 1), torch.zeros(8)


class Loader:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


class TestStopwatches:
    """00, 01, 12 and 14: what they report is what the clock says."""

    @pytest.mark.parametrize("n_batches", [3, 20])
    def test_an_epoch_of_kept_batches_is_as_long_and_loads_nothing(self, n_batches):
        loader = DataLoader(torch.arange(2 * n_batches), batch_size=2)
        free = pasted("00_measure", loader=loader)["loader"]
        assert len(free) == n_batches
        assert [batch.tolist() for batch in free[:3]] == [[0, 1], [2, 3], [4, 5]]
        assert len({id(batch) for batch in free}) == min(n_batches, 8)

    def test_the_rate_leaves_out_the_start(self, monkeypatch, capsys):
        clock = Clock(monkeypatch)
        old, new = (
            Loader(lambda first_s=first_s, s=s: clock.loader(first_s, s, 120)) for first_s, s in ((9, 1), (77, 0.25))
        )
        names = pasted("00_measure", block=1, old=old, new=new)
        assert capsys.readouterr().out == f"{[4.0] * 8}\n"
        assert names["rate"](new) == 32

    def test_a_comparison_warms_up_and_each_loader_is_first_in_every_second_pair(self, monkeypatch, capsys):
        clock, order = Clock(monkeypatch), []

        def batches(name):
            order.append(name)
            is_first_pass, is_second_of_pair = order.count(name) == 1, len(order) % 2 == 0
            return clock.loader(1, 50 if is_first_pass else 2 if is_second_of_pair else 1, 120)

        pasted("00_measure", block=1, **{name: Loader(partial(batches, name)) for name in ("old", "new")})
        assert order[2:] == ["old", "new", "new", "old"] * 4
        assert capsys.readouterr().out == f"{[0.5] * 4 + [2.0] * 4}\n"

    def test_a_short_epoch_gives_no_rate(self, monkeypatch):
        clock = Clock(monkeypatch)
        short = Loader(lambda: clock.loader(1, 1, 119))
        with pytest.raises(ValueError, match=r"short epoch: load ConcatDataset\(\[dataset\] \* 10\)"):
            pasted("00_measure", block=1, old=short, new=short)

    def test_the_wait_leaves_out_the_start(self, monkeypatch, capsys):
        clock, trained = Clock(monkeypatch), []

        def train_step(batch):
            trained.append(batch)
            clock.now_s += 1

        pasted("12_find_the_stall", loader=Loader(lambda: clock.loader(99, 3, 120)), train_step=train_step)
        assert capsys.readouterr().out == "waiting for data: 75%\n"
        assert len(trained) == 120

    def test_each_stage_and_the_rest_are_told_and_the_first_pass_is_not(self, photos, monkeypatch, capsys):
        """A photo takes 1 s to read, 5 to convert, 3 to change and 1 to look up; the first pass, 100 s more."""
        clock, n_threads = Clock(monkeypatch), torch.get_num_threads()
        monkeypatch.chdir(photos)
        n_photos = len(ImageFolder("photos"))
        looked_up = []

        def taking(duration_s, function):
            def call(*args, **kwargs):
                clock.now_s += duration_s
                return function(*args, **kwargs)

            return call

        def look_up(dataset, index, own=ImageFolder.__getitem__):
            looked_up.append(index)
            clock.now_s += 1 if len(looked_up) > n_photos else 101
            return own(dataset, index)

        monkeypatch.setattr(Path, "read_bytes", taking(1, Path.read_bytes))
        monkeypatch.setattr(Image.Image, "convert", taking(5, Image.Image.convert))
        monkeypatch.setattr(torch.utils.data, "default_collate", taking(n_photos * 10, default_collate))
        monkeypatch.setattr(ImageFolder, "__getitem__", look_up)
        try:
            names = pasted("01_naive_pil", transform=taking(3, lambda image: torch.zeros(1)))
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(n_threads)
        assert len(looked_up) == 2 * n_photos
        told = {"read": "5%", "decode": "25%", "transform": "15%", "collate": "50%", "rest": "5%"}
        assert capsys.readouterr().out == f"{told}\n"
        assert names["seconds"]["decode"] == 5 * n_photos


class TestDecoding:
    """02, 02b, 04, 10, 11 and 13: odd files, too, upright and in RGB."""

    def test_an_image_folder_gives_upright_rgb(self, photos, monkeypatch):
        monkeypatch.chdir(photos)
        dataset = pasted("02_read_image", transform=None)["dataset"]
        found = {Path(path): image for (path, _), (image, _) in zip(dataset.samples, dataset, strict=True)}
        for path in odd_files(photos):
            image = found[path.relative_to(photos)]
            assert image.dtype == torch.uint8
            assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - upright(path)).mean() < 1, path.name

    @pytest.mark.parametrize("tag", [1, 6])
    def test_a_photo_to_be_shrunk_is_decoded_as_small_as_does_and_upright(self, tmp_path, tag):
        whole = Image.fromarray(reference(oracle_files()["rgb.png"])).resize((640, 480), Image.Resampling.LANCZOS)
        exif = Image.Exif()
        exif[0x0112] = tag
        whole.save(tmp_path / "photo.jpg", quality=95, exif=exif)
        load = pasted("02_read_image", block=1)["load_shrunk"]
        turned = upright(tmp_path / "photo.jpg")
        for side, eighths in ((50, 1), (60, 1), (61, 2), (120, 2), (256, 8), (2000, 8)):
            found = load(tmp_path / "photo.jpg", side)
            expected = [length * eighths // 8 for length in turned.shape[1::-1]]
            assert (found.mode, list(found.size)) == ("RGB", expected)
            right = np.asarray(Image.fromarray(turned).resize(found.size, Image.Resampling.BOX)).astype(int)
            assert np.abs(np.asarray(found) - right).mean() < 3

    def test_any_file_of_pillow_may_be_shrunk(self, photos):
        load = pasted("02_read_image", block=1)["load_shrunk"]
        for path in odd_files(photos):
            found = load(path)  # smaller than 256 pixels, so as it is
            assert np.abs(np.asarray(found).astype(int) - upright(path)).mean() < 1, path.name

    def test_a_folder_of_any_files_gives_upright_rgb(self, photos, monkeypatch, tmp_path):
        """Those, too, that Pillow alone reads, and of 16 bits the high byte."""
        folder = tmp_path / "train" / "class"
        shutil.copytree(photos / "train" / "class", folder)
        whole = Image.fromarray(reference(oracle_files()["rgb.png"]))
        for kind in ("bmp", "tiff", "ppm"):
            whole.save(folder / f"é.{kind}")
        gray = np.asarray(whole.convert("L"))
        Image.fromarray(gray.astype(np.uint16) * 257).save(folder / "gray 16-bit.tiff")
        (folder / "gray 16-bit.pgm").write_bytes(b"P5 95 63 65535\n" + (gray.astype(">u2") * 257).tobytes())
        whole.save(folder / "named wrongly.png", "GIF", save_all=True, append_images=[whole.rotate(180)])
        monkeypatch.chdir(tmp_path)
        dataset = pasted("02b_any_file", transform=None)["dataset"]
        assert len(dataset) == len(oracle_files()) + 6
        for (path, _), (image, _) in zip(dataset.samples, dataset, strict=True):
            assert (image.mode, image.size) == ("RGB", whole.size), path
            expected = reference(Path(path).read_bytes()) if path.count("é ") else np.asarray(whole)
            expected = np.stack([gray] * 3, axis=-1) if path.count("class/gray 16-bit") else expected
            difference = np.abs(np.asarray(image).astype(int) - expected).mean()
            assert difference < (20 if path.endswith("wrongly.png") else 1), path  # GIF has 256 colors

    @pytest.mark.parametrize("name", [*broken_files(), "32-bit.tiff", "floats.tiff"])
    def test_a_file_that_cannot_be_read_is_named(self, tmp_path, monkeypatch, name):
        folder = tmp_path / "train" / "class"
        folder.mkdir(parents=True)
        if name.endswith(".tiff"):
            pixels = np.full((8, 8), 1e6, np.float32 if name == "floats.tiff" else np.int32)
            Image.fromarray(pixels).save(folder / name)
        else:
            (folder / name).write_bytes(broken_files()[name])
        monkeypatch.chdir(tmp_path)
        dataset = pasted("02b_any_file", transform=None)["dataset"]
        with pytest.raises(ValueError, match=f"^{re.escape(f'train/class/{name}')}: .+"):
            dataset[0]

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_workers_read_any_files(self, tmp_path, photos, start_method):
        before = "from torchvision.transforms import v2\ntransform = v2.Compose([v2.PILToTensor(), v2.Resize((8, 8))])"
        after = """
if __name__ == "__main__":
    import json, torch
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, shuffle=True, persistent_workers=True)
    print(json.dumps([sum(len(images) for images, _ in loader) for _ in range(2)]))
"""
        (tmp_path / "train").symlink_to(photos / "train")
        seen = run_script(tmp_path, before, do_this("02b_any_file"), after, start_method=start_method)
        assert seen == [len(oracle_files())] * 2

    def test_the_crop_is_resized_as_bytes_and_floats_come_last(self, photos):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        for path in odd_files(photos):
            image = pasted("04_tensor_transforms", path=str(path))["image"]
            assert (image.dtype, image.shape) == (torch.float32, (3, 224, 224)), path.name
            as_bytes = (image * std + mean) * 255
            torch.testing.assert_close(as_bytes, as_bytes.round(), atol=1e-3, rtol=0)
            assert 0 <= as_bytes.round().min() <= as_bytes.round().max() <= 255

    def test_sizes_are_those_of_the_upright_photo(self, photos, monkeypatch, tmp_path):
        (tmp_path / "photos").symlink_to(photos / "train")
        monkeypatch.chdir(tmp_path)
        sizes = pasted("10_image_sizes")["sizes"]
        expected = {p: upright(p).shape[1::-1] for p in odd_files(photos) if p.suffix != ".webp"}
        for path, size in expected.items():
            assert sizes[Path("photos", "class", path.name)] == size, path.name

    def test_a_file_without_a_size_is_named(self, photos, monkeypatch, tmp_path, capsys):
        (tmp_path / "photos").mkdir()
        shutil.copy(next((photos / "photos").rglob("*.jpg")), tmp_path / "photos" / "whole.jpg")
        data = (tmp_path / "photos" / "whole.jpg").read_bytes()
        broken = {"cut.jpg": data[:20], "empty.jpeg": b"", os.fsdecode(b"\xff.png"): b"no picture"}
        for name, content in broken.items():
            (tmp_path / "photos" / name).write_bytes(content)
        monkeypatch.chdir(tmp_path)
        assert list(pasted("10_image_sizes")["sizes"]) == [Path("photos", "whole.jpg")]
        told = capsys.readouterr().out.splitlines()
        assert len(told) == len(broken)
        for name in broken:
            assert any(ascii(str(Path("photos", name))) in line for line in told), name

    def test_saved_sizes_are_read_again_and_only_new_photos_opened(self, photos, monkeypatch, tmp_path):
        (tmp_path / "photos").mkdir()
        names = ["whole.jpg", "é.jpg", os.fsdecode(b"\xff\xfe.jpg"), "gone.jpg"]
        for width, name in enumerate(names, 10):
            Image.new("RGB", (width, 20)).save(tmp_path / "photos" / name)
        monkeypatch.chdir(tmp_path)
        first = pasted("10_image_sizes")["sizes"]
        assert first == {Path("photos", name): (width, 20) for width, name in enumerate(names, 10)}
        assert sorted(os.listdir()) == ["photos", "sizes.json"]
        Path("photos", "gone.jpg").unlink()
        Image.new("RGB", (30, 20)).save("photos/new.jpg")
        opened, own = [], Image.open
        monkeypatch.setattr(Image, "open", lambda path: opened.append(path) or own(path))
        again = pasted("10_image_sizes")["sizes"]
        del first[Path("photos", "gone.jpg")]
        assert again == {**first, Path("photos", "new.jpg"): (30, 20)}
        assert opened == [Path("photos", "new.jpg")]
        Image.new("RGB", (50, 40)).save("photos/new.jpg")
        assert pasted("10_image_sizes")["sizes"] == {**again, Path("photos", "new.jpg"): (50, 40)}
        Path("photos", "new.jpg").write_bytes(b"broken")
        assert pasted("10_image_sizes")["sizes"] == {key: size for key, size in again.items() if key.name != "new.jpg"}

    def test_a_small_jpeg_is_the_photo_upright(self, photos, tmp_path):
        prepare = pasted("11_prepare_once")["prepare"]
        for path in odd_files(photos):
            prepare(path, tmp_path / path.name, short_side=32)  # whatever the suffix of its name
            with Image.open(tmp_path / path.name) as small:
                assert (small.format, small.mode, min(small.size)) == ("JPEG", "RGB", 32)
                assert ImageOps.exif_transpose(small).size == small.size
                pixels = np.asarray(small).astype(int)
            with Image.fromarray(upright(path)) as whole:
                expected = np.asarray(whole.resize(pixels.shape[1::-1], Image.Resampling.BILINEAR))
            assert np.abs(pixels - expected).mean() < 8, path.name

    @pytest.mark.parametrize("name", ["gray 16-bit.png", "nothing.jpeg"])
    def test_what_cannot_be_prepared_leaves_no_file(self, photos, tmp_path, name):
        (tmp_path / "nothing.jpeg").write_bytes(b"")
        source = tmp_path / name if name == "nothing.jpeg" else photos / "train" / "class" / f"é {name}"
        with pytest.raises((AssertionError, OSError)):
            pasted("11_prepare_once")["prepare"](source, tmp_path / "small.jpg")
        assert not (tmp_path / "small.jpg").exists()

    def test_a_folder_is_prepared_once(self, tmp_path):
        names = [f"{class_name}/{name}" for class_name in ("a", "deep/é") for name in ("b.jpg", " c.png")]
        for number, name in enumerate(names):
            (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((400, 300 + number, 3), 50 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name)
        prepare_folder = pasted("11_prepare_once")["prepare_folder"]
        prepare_folder(tmp_path / "photos", tmp_path / "small")
        made = {name: tmp_path / "small" / name for name in names}
        assert {path for path in (tmp_path / "small").rglob("*") if path.is_file()} == set(made.values())
        for number, path in enumerate(made.values()):
            pixels = np.asarray(Image.open(path)).astype(int)
            assert min(pixels.shape[:2]) == 256
            assert np.abs(pixels - 50 * number).max() < 3
        gone, *kept = made.values()
        gone.unlink()  # as after an interrupt
        times = [path.stat().st_mtime_ns for path in kept]
        prepare_folder(str(tmp_path / "photos"), str(tmp_path / "small"))
        assert gone.is_file()
        assert [path.stat().st_mtime_ns for path in kept] == times

    def test_what_cannot_be_prepared_is_named_and_the_others_go_on(self, photos, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "photos").mkdir()
        whole = {f"{number:02}.jpg" for number in range(40)}
        for name in whole:
            Image.new("RGB", (40, 30)).save(tmp_path / "photos" / name)
        data = next((photos / "photos").rglob("*.jpg")).read_bytes()
        broken = {"05a.jpg": data[: len(data) // 2], "00 empty.PNG": b"", os.fsdecode(b"\xff.jpeg"): b"no picture"}
        broken["deep 16-bit.png"] = (photos / "train" / "class" / "é gray 16-bit.png").read_bytes()
        for name, content in {**broken, ".DS_Store": b"\0", "labels.csv": b"a,b"}.items():
            (tmp_path / "photos" / name).write_bytes(content)
        for _ in range(2):
            pasted("11_prepare_once")["prepare_folder"]("photos", "small")
            *told, last = capsys.readouterr().out.splitlines()
            assert last == f"{len(whole)} photos prepared, {len(broken)} left out; other files: 2"
            assert {path.name for path in Path("small").iterdir()} == whole
            assert len(told) == len(broken)
            for name in broken:
                assert any(ascii(str(Path("photos", name))) in line for line in told), name

    @pytest.mark.parametrize("box", [None, (0.1, 0.3, 0.45, 0.5)], ids=["the whole photo", "a part"])
    def test_a_scaled_crop_is_that_of_the_decoded_photo(self, photos, monkeypatch, tmp_path, box):
        """13: of a file of any kind, and of a large photo, which is decoded smaller."""
        Image.open(next((photos / "photos").rglob("*.jpg"))).resize((2000, 1500)).save(tmp_path / "large.jpg")
        (tmp_path / "photos").symlink_to(photos / "train")
        monkeypatch.chdir(tmp_path)
        names = pasted("13_peers")
        for path in [*odd_files(photos), tmp_path / "large.jpg"]:
            with Image.open(path) as stored:  # a box is of the pixels as they are stored
                (w, h), shares = stored.size, box or (0, 0, 1, 1)
                x, y, width, height = (round(share * side) for share, side in zip(shares, (w, h, w, h), strict=True))
                part = stored.convert("RGB").crop((x, y, x + width, y + height))
                small = part.resize((64, 64), Image.Resampling.BILINEAR)
                small.info = stored.info
                expected = np.asarray(ImageOps.exif_transpose(small)).astype(int)
            draw = lambda photo, scale, ratio, drawn=(y, x, height, width): drawn  # noqa: E731
            monkeypatch.setattr(names["RandomResizedCrop"], "get_params", staticmethod(draw))
            photo = Image.open(path)
            found = np.asarray(names["scaled_crop"](photo, 64)).astype(int)
            assert np.abs(found - expected).mean() < 4, path.name
            assert box is not None or np.abs(found - resized(upright(path), 64)).mean() < 4, path.name
        assert photo.width <= 1000  # of the large one's 2000 pixels

    @pytest.mark.skipif(not shutil.which("jpegtran"), reason="jpegtran is not installed")
    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0", "gray", "progressive"])
    @pytest.mark.parametrize("width", [512, 333, 31])
    def test_restart_markers_change_no_pixel_and_crops_can_be_cut_out(self, monkeypatch, tmp_path, subsampling, width):
        monkeypatch.chdir(tmp_path)
        pixels = np.random.default_rng(0).integers(0, 256, (200, width, 3), np.uint8)
        options = {"gray": {}, "progressive": {"progressive": True}}.get(subsampling, {"subsampling": subsampling})
        mode = "L" if subsampling == "gray" else "RGB"
        Image.fromarray(pixels).convert(mode).save("photo.jpg", quality=90, **options)
        pasted("11b_crop_by_bytes")
        assert np.array_equal(upright("tiled.jpg"), upright("photo.jpg"))
        data = Path("tiled.jpg").read_bytes()
        assert all(bytes([0xFF, 0xD0 + number]) in data for number in range(8))
        assert len(lk.cut_jpeg(data, (100, 10, 20, 10))[0]) < len(data) / 2


class TestColorsOnTheGPU:
    """06: each image has draws of its own, and the host never waits."""

    def test_it_mixes_normalized_images_and_reads_nothing_back(self, cuda):
        torch.manual_seed(0)
        image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
        batch = image.expand(8, -1, -1, -1).contiguous(), torch.arange(8)
        paste = partial(pasted, "06_kornia_gpu")
        (_, once), (names, thrice) = (course.count_readbacks(lambda n=n: paste(loader=[batch] * n)) for n in (1, 3))
        images, labels = names["images"].cpu(), names["labels"].cpu()
        assert thrice == once  # what is made before the loop may wait
        assert (images.shape, images.dtype, labels.shape) == ((8, 3, 16, 16), torch.float32, (8, 1000))
        torch.testing.assert_close(labels.sum(1), torch.ones(8))
        assert len(images.flatten(1).unique(dim=0)) == 8
        assert -2.2 < images.min() < images.max() < 2.7


class TestColorsOnTheCPU:
    """05: the recipe and the blur are those that were measured."""

    def test_the_recipe_is_that_of_labkit(self, monkeypatch):
        monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
        compose, ours = pasted("05_albumentations")["compose"], lk.make_augment("heavy", "albumentations")
        for seed in range(40):
            pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            for each in (compose, ours.compose):
                each.set_random_state(np.random.default_rng(seed), random.Random(seed))
            image = compose(image=pixels)["image"]
            assert (image.shape, image.dtype) == ((3, 224, 224), torch.float32)
            assert torch.equal(image, ours(torch.from_numpy(pixels).permute(2, 0, 1)))

    @pytest.mark.parametrize("sigma", [0.1, 1.5, 2.0])
    def test_a_blur_in_two_passes_is_the_blur(self, sigma):
        told = nbformat.read(NOTEBOOKS / "05_albumentations.ipynb", as_version=4).cells[0].source.partition("Not if")[2]
        [code] = re.findall(r"`(F\.gaussian_blur.*?)`", told)
        image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
        blurred = eval(code, {"F": functional, "image": image, "sigma": sigma})  # noqa: S307
        assert (blurred.int() - functional.gaussian_blur(image, 23, sigma).int()).abs().max() <= 1


class TestWorkersDraws:
    """05: no two results are the same, whatever starts the workers."""

    BEFORE = """
import json, albumentations as A, numpy as np, torch
class Photos:
    def __init__(self):
        self.compose = A.Compose([A.RandomBrightnessContrast(p=1)])
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return self.compose(image=np.full((1, 1, 3), 0.5, np.float32))["image"]
dataset = Photos()
"""
    AFTER = """
if __name__ == "__main__":
    print(json.dumps([image.tobytes().hex() for _ in range(2) for batch in loader for image in batch.numpy()]))
"""

    @pytest.mark.parametrize(
        ("start_method", "kept", "wrapped"),
        [
            ("fork", False, ""),
            ("forkserver", True, "dataset = torch.utils.data.Subset(Photos(), range(32))"),
            ("spawn", True, ""),
        ],
    )
    def test_no_worker_repeats_a_draw(self, tmp_path, start_method, kept, wrapped):
        workers = f"num_workers=2, persistent_workers={kept}"
        block = replaced(
            do_this("05_albumentations", 1), ("batch_size=64", "batch_size=4"), ("num_workers=8", workers),
        )  # fmt: skip
        offline = {"NO_ALBUMENTATIONS_UPDATE": "1"}
        parts = self.BEFORE, wrapped, block, self.AFTER
        seen = run_script(tmp_path, *parts, start_method=start_method, environment=offline)
        assert len(seen) == len(set(seen)) == 64


class TestShardOrder:
    """08, 08b and 15: every sample once in each epoch, and shards in a new order."""

    BEFORE = """
import json, pathlib
urls, n_samples = sorted(map(str, pathlib.Path("shards").iterdir())), 36
def transform(image):
    return image[:, :1, :1]
"""
    AFTER = """
if __name__ == "__main__":
    print(json.dumps([[number for _, numbers in loader for number in numbers.tolist()] for _ in range(2)]))
"""
    N_SHARDS = 12

    def check(self, folder, block: str, start_method: str, name="é {:02}.tar", **environment: str):
        """`block` does not shuffle within shards, which stay together."""
        (folder / "shards").mkdir()
        photo = encode_image(Image.new("RGB", (8, 8)), "JPEG")
        for shard in range(self.N_SHARDS):
            own = {
                f"{n}.{kind}": data
                for n in range(shard * 3, shard * 3 + 3)
                for kind, data in (("jpg", photo), ("cls", b"%d" % n))
            }
            make_tar(folder / "shards" / name.format(shard), own)
        parts = self.BEFORE, block, self.AFTER
        epochs = run_script(folder, *parts, start_method=start_method, environment=environment)
        assert [sorted(epoch) for epoch in epochs] == [list(range(36))] * 2
        orders = [list(dict.fromkeys(number // 3 for number in epoch)) for epoch in epochs]
        assert orders[0] != orders[1]
        assert list(range(self.N_SHARDS)) not in orders

    @pytest.mark.parametrize(("start_method", "num_workers"), [("fork", 0), ("fork", 2), ("spawn", 2)])
    def test_shards_come_in_a_new_order(self, tmp_path, num_workers, start_method):
        block = replaced(do_this("08b_shard_order"), ("in_worker, behind = 1000, 1000", "in_worker, behind = 1, 1"))
        self.check(tmp_path, replaced(block, ("num_workers=8", f"num_workers={num_workers}")), start_method)

    BATCHES = """
if __name__ == "__main__":
    print(json.dumps([[numbers.tolist() for _, numbers in loader] for _ in range(2)]))
"""

    def test_ranks_with_unequal_shards_make_as_many_batches(self, tmp_path):
        """Two ranks of two workers: one has 4 shards of 6 samples, the other 3 shards of 4."""
        (tmp_path / "shards").mkdir()
        photo, owned = encode_image(Image.new("RGB", (8, 8)), "JPEG"), ([], [])
        for shard, rank in enumerate([0, 1, 0, 1, 0, 1, 0]):
            numbers = [shard * 10 + n for n in range((6, 4)[rank])]
            owned[rank].extend(numbers)
            files = {f"{n}.{kind}": data for n in numbers for kind, data in (("jpg", photo), ("cls", b"%d" % n))}
            make_tar(tmp_path / "shards" / f"{shard}.tar", files)
        block = replaced(
            do_this("08b_shard_order"), ("batch_size = 64", "batch_size = 3"), ("num_workers=8", "num_workers=2")
        )
        for rank in (0, 1):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2"}
            parts = self.BEFORE, block, self.BATCHES
            epochs = run_script(tmp_path, *parts, environment=environment)
            assert list(map(len, epochs)) == [6, 6]
            assert {number for batches in epochs for batch in batches for number in batch} <= set(owned[rank])
            for batches in epochs if rank == 0 else ():
                assert len({number for batch in batches for number in batch}) == sum(map(len, batches))  # no repeats
            assert epochs[0] != epochs[1]

    HELD = """
def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()

if __name__ == "__main__":
    stages = list(loader.pipeline)
    shuffled = next(n for n, stage in enumerate(stages) if n and getattr(stage, "f", stage).__name__ == "_shuffle")
    samples = list(wds.DataPipeline(*stages[:shuffled]))
    print(json.dumps([[int(label) for _, label in samples],
                      [[bytes_of(part), part.nbytes] for sample in samples for part in sample]]))
"""

    def test_samples_are_shuffled_when_they_are_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for n in range(36):
            (tmp_path / f"{n}.jpg").write_bytes(b"photo %d" % n)
        block = replaced(do_this("08_shard_formats", 0), ("maxsize=150e6", "maxsize=100"))
        exec(compile(block, "08", "exec"), {"samples": [(f"{n}.jpg", n) for n in range(36)]})  # noqa: S102
        shards = sorted(tmp_path.glob("shard-*.tar"))
        assert [path.name for path in shards] == [f"shard-{n:06}.tar" for n in range(len(shards))]
        assert len(shards) > 1
        found = []
        for path in shards:
            with tarfile.open(path) as tar:
                files = {info.name: tar.extractfile(info).read() for info in tar}
            keys = sorted({name.partition(".")[0] for name in files})
            found += [(files[f"{key}.jpg"], int(files[f"{key}.cls"])) for key in keys]
        assert sorted(label for _, label in found) == list(range(36)) != [label for _, label in found]
        assert {data for data, label in found if data != b"photo %d" % label} == set()

    def test_a_sample_behind_the_workers_does_not_keep_its_batch(self, tmp_path):
        (tmp_path / "shards").mkdir()
        photo = encode_image(Image.new("RGB", (8, 8)), "JPEG")
        files = {f"{n}.{kind}": data for n in range(36) for kind, data in (("jpg", photo), ("cls", b"%d" % n))}
        make_tar(tmp_path / "shards" / "a.tar", files)
        block = replaced(do_this("08b_shard_order"), ("num_workers=8", "num_workers=1"))
        labels, sizes = run_script(tmp_path, self.BEFORE, block, self.HELD)
        assert sorted(labels) == list(range(36))
        assert {in_memory - own for in_memory, own in sizes} == {0}

    def test_so_do_those_of_object_storage(self, tmp_path):
        """Whose command is one that reads a file, here."""
        block = replaced(
            do_this("08_shard_formats", 1),
            ("aws s3 cp s3://bucket/shard-{i:06d}.tar -", "cat shards/shard-{i:06d}.tar"),
            ("range(980)", f"range({self.N_SHARDS})"), ("shuffle(1000)", "shuffle(1)"),
            ("num_workers=8", "num_workers=2"), ("batch_size=64", "batch_size=3"),
        )  # fmt: skip
        self.check(tmp_path, block, "fork", "shard-{:06}.tar")

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_so_do_those_of_a_rank_at_scale(self, tmp_path, start_method):
        block = replaced(
            do_this("14_at_scale").replace("shuffle(1000)", "shuffle(1)"), ("/local_nvme/", ""),
            ("000979", f"{self.N_SHARDS - 1:06}"), ("num_workers=max(1, cores)", "num_workers=2"),
            ("batch_size = 256", "batch_size = 3"), ("1_281_167", "36"), ("torch.cuda.set_device", "print"),
        )  # fmt: skip
        self.check(tmp_path, block, start_method, "shard-{:06}.tar", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

    OBJECTS = """
import time

def load(key, data):
    return key, int(data)

def seen(keys, *, shuffle=True, **options):
    loader = torch.utils.data.DataLoader(Objects(keys, load), shuffle=shuffle, **options)
    return [[key, number] for names, numbers in loader for key, number in zip(names, numbers.tolist())]

if __name__ == "__main__":
    keys = [f"bucket/é {n}.txt" for n in range(40)]
    start = time.perf_counter()
    together = seen(keys, shuffle=False, batch_size=40)
    took_s = time.perf_counter() - start
    epochs = [seen(keys, batch_size=20, num_workers=n) for n in (2, 0)]
    print(json.dumps([took_s, together, *epochs]))
"""

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_single_objects_are_asked_for_together_in_each_worker(self, tmp_path, start_method):
        pytest.importorskip("s3fs")
        (tmp_path / "bucket").mkdir()
        for n in range(40):
            (tmp_path / "bucket" / f"é {n}.txt").write_text(str(n))
        parts = self.BEFORE.replace('"shards"', '"."'), do_this("08_shard_formats", 1), self.OBJECTS
        with course.serve_s3({"bucket": tmp_path / "bucket"}, latency_ms=500) as options:
            client = {f"FSSPEC_S3_{name.upper()}": value for name, value in options.items()}
            found = run_script(tmp_path, *parts, start_method=start_method, environment=client)
        took_s, together, *epochs = found
        expected = [[f"bucket/é {n}.txt", n] for n in range(40)]
        assert together == expected
        assert [sorted(epoch) for epoch in epochs] == [sorted(expected)] * 2
        assert epochs[0] != epochs[1]  # shuffled
        assert took_s < 40 * 0.5, "one after the other, they take at least this long"


class TestPrefetch:
    """07: batches that are copied ahead are whole, in order, and no other's."""

    def test_no_copy_races_with_a_step(self):
        batches = [[torch.full((1 << 16,), float(n)), torch.tensor([n])] for n in range(6)]
        with lk.simulated_cuda() as device:
            batches = [[tensor.pin_memory() for tensor in batch] for batch in batches]
            names, found = pasted("07_cuda_prefetch", loader=batches), []
            for images, labels in names["prefetched"](batches):
                torch.cuda._sleep(9000)
                found.append((images * 2, labels + 0))
            torch.cuda.synchronize()
            assert device.races == []
            found = [(images.cpu(), int(labels)) for images, labels in found]
        assert [(images.unique().tolist(), label) for images, label in found] == [([2.0 * n], n) for n in range(6)]


class TestSeeds:
    """03b: the same draws for any number of workers, others in each epoch, and the training keeps its generators."""

    STEM, N_EPOCHS = "03b_seeds", 2
    BEFORE = """
import json, multiprocessing, pathlib, random
def only_in_the_training(state, setstate=random.setstate):
    assert multiprocessing.parent_process() is None, "a worker's generators are its own"
    setstate(state)
random.setstate = only_in_the_training
class Photos:  # draws from all three generators
    paths = sorted(map(str, pathlib.Path("photos").iterdir()))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index]) as file:
            return int(file.read()), random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()
dataset = Photos()
seen, own = [[], []], []
def step(epoch, batch):
    numbers, *draws = (part.tolist() for part in batch)
    seen[epoch] += zip(numbers, zip(*draws))
    own.append((random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()))
if __name__ == "__main__":
    import random, numpy as np, torch
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
"""
    AFTER = """
if __name__ == "__main__":
    print(json.dumps({"seen": seen, "own": own}))
"""

    def train(
        self, folder, num_workers, kept, start_method="fork", loop="for batch in loader: step(epoch, batch)", seed=7
    ):
        block = replaced(
            do_this(self.STEM),
            ("num_workers=8, persistent_workers=True", f"num_workers={num_workers}, persistent_workers={kept}"),
            ("batch_size=64", "batch_size=3"),
            ("seed=7", f"seed={seed}"),
            ("range(90)", f"range({self.N_EPOCHS})"),
            ("for batch in loader: ...", loop),
        )
        return run_script(folder, self.BEFORE, block, self.AFTER, start_method=start_method)

    @pytest.fixture(scope="class")
    @classmethod
    def in_one_process(cls, odd_names):
        return cls().train(odd_names, 0, False)

    def test_each_epoch_has_every_photo_in_an_order_and_with_draws_of_its_own(self, in_one_process):
        first, second = in_one_process["seen"]
        orders = [[number for number, _ in epoch] for epoch in (first, second)]
        assert [sorted(order) for order in orders] == [list(range(len(NAMES)))] * 2
        assert len({tuple(order) for order in [*orders, range(len(NAMES))]}) == 3
        draws = [draw for _, drawn in [*first, *second] for draw in drawn]
        assert len(set(draws)) == len(draws)

    def test_no_epoch_is_one_of_a_run_with_another_seed(self, in_one_process, odd_names):
        other = self.train(odd_names, 0, False, seed=8)["seen"]
        draws = [{tuple(draw) for _, draw in epoch} for epoch in (*in_one_process["seen"], *other)]
        assert len(set.union(*draws)) == sum(map(len, draws))
        orders = [[number for number, _ in epoch] for epoch in (*in_one_process["seen"], *other)]
        assert len(set(map(tuple, orders))) == len(orders)

    @pytest.mark.parametrize(
        ("start_method", "num_workers", "kept"),
        [("fork", 1, True), ("fork", 3, False), ("forkserver", 3, True), ("spawn", 2, True)],
    )
    def test_any_number_of_workers_gives_the_same(self, in_one_process, odd_names, start_method, num_workers, kept):
        assert self.train(odd_names, num_workers, kept, start_method) == in_one_process

    def test_the_training_keeps_its_generators(self, in_one_process):
        python, numpy, of_torch = random.Random(1), np.random.RandomState(2), torch.Generator().manual_seed(3)
        expected = [
            [python.random(), numpy.rand(), torch.rand((), dtype=torch.float64, generator=of_torch).item()]
            for _ in in_one_process["own"]
        ]
        assert in_one_process["own"] == expected

    def test_an_epoch_that_is_left_early_changes_nothing_in_the_next(self, in_one_process, odd_names):
        leave = "for batch in [next(iter(loader))] if epoch == 0 else loader: step(epoch, batch)"
        assert self.train(odd_names, 2, True, loop=leave)["seen"][1] == in_one_process["seen"][1]


class TestWorkerMemory:
    """03c: every name comes back, and no worker copies the names, nor what existed before it was forked."""

    STEM = "03c_worker_memory"
    READING = """
import json, pathlib
def load(path):
    with open(path) as file:
        return int(file.read())
names = sorted(map(str, pathlib.Path("photos").iterdir()))
seen = [[], []]
"""
    READ = """
if __name__ == "__main__":
    print(json.dumps(seen))
"""
    MANY = """
import json
def load(path):
    if path.endswith("_0.JPEG"):
        gc.collect()
    return len(path)
names = [f"train/n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG" for number in range(N_NAMES)]
if __name__ == "__main__":
    import gc
    gc.disable()
"""
    MEMORY = """
if __name__ == "__main__":
    from labkit.measure.usage import tree_memory
    memory = tree_memory().set_index("pid").private_mb
    print(json.dumps([float(memory[worker.pid]) for worker in loader._iterator._workers]))
"""

    def train(self, folder, start_method, before, after, *changes):
        block = replaced(do_this(self.STEM), ("num_workers=8", "num_workers=2"), ("range(90)", "range(2)"), *changes)
        return run_script(folder, before, block, after, start_method=start_method)

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_every_photo_comes_in_each_epoch(self, odd_names, start_method):
        keep = ("for batch in loader: ...", "for batch in loader: seen[epoch] += batch.tolist()")
        first, second = self.train(
            odd_names, start_method, self.READING, self.READ, keep, ("batch_size=64", "batch_size=2")
        )
        assert sorted(first) == sorted(second) == list(range(len(NAMES)))

    def private_mb(self, folder, start_method, *changes):
        before = self.MANY.replace("N_NAMES", "200_000")
        return self.train(folder, start_method, before, self.MEMORY, ("batch_size=64", "batch_size=2000"), *changes)

    @pytest.fixture(scope="class")
    @classmethod
    def packed(cls, tmp_path_factory):
        """The private memory of workers of the block as it stands, by how they start."""
        return cache(lambda start_method: cls().private_mb(tmp_path_factory.mktemp("packed"), start_method))

    @pytest.mark.parametrize("start_method", ["fork", "spawn"])
    def test_no_worker_has_a_copy_of_the_names(self, tmp_path, packed, start_method):
        in_list = self.private_mb(tmp_path, start_method, ("self.names = PackedNames(names)", "self.names = names"))
        assert max(packed(start_method)) + 10 < min(in_list)

    def test_a_collection_copies_nothing_that_was_frozen(self, tmp_path, packed):
        frozen = packed("fork")
        thawed = self.private_mb(tmp_path, "fork", ("gc.collect(); gc.freeze()", "gc.collect()"))
        assert min(frozen) + 10 < max(thawed)  # the worker that has collected


class TestIndexedTar:
    """09: every file of a tar by its name, and no other bytes."""

    STEM = "09_marigold_storage"
    MEMBERS = (
        *listed("plain:one folder/ twice:old link>plain hard=plain empty: twice:new gone:stays gone>plain"),
        member("é/写真.png", b"not ASCII"),
        member("long/" * 80 + "name.png", b"long"),
        member("big", bytes(range(256)) * 99),
    )

    @pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
    def test_it_reads_what_tarfile_reads_and_knows_no_links(self, tmp_path, format):
        path = make_tar(tmp_path / "a.tar", self.MEMBERS, format=format)
        files = pasted(self.STEM)["IndexedTar"](path, tmp_path / "index.json")
        with tarfile.open(path) as tar:  # `getmember` finds the last of a name
            last = [tar.getmember(name) for name in tar.getnames()]
            expected = {info.name: tar.extractfile(info).read() for info in last if info.isreg()}
        assert {name: files.read(name) for name in files.index} == expected
        assert files.read("twice") == b"new"
        for name in ("link", "hard", "folder", "gone"):
            with pytest.raises(KeyError):
                files.read(name)

    def test_a_compressed_tar_is_refused(self, tmp_path):
        path = make_tar(tmp_path / "a.tar", self.MEMBERS, "w:gz")  # whatever its name says
        with pytest.raises(tarfile.ReadError):
            pasted(self.STEM)["IndexedTar"](path, tmp_path / "index.json")
        assert os.listdir(tmp_path) == ["a.tar"]

    def test_a_saved_index_is_read_again_until_the_tar_changes(self, tmp_path, monkeypatch):
        odd = os.fsdecode(b"\xff.png")
        path, saved = make_tar(tmp_path / "a.tar", [member(odd, b"odd")]), tmp_path / "index.json"
        IndexedTar, scan, n_scans = pasted(self.STEM)["IndexedTar"], tarfile.open, []
        monkeypatch.setattr(tarfile, "open", lambda *given: n_scans.append(given) or scan(*given))
        assert [IndexedTar(path, saved).read(odd) for _ in range(3)] == [b"odd"] * 3
        assert len(n_scans) == 1
        path.write_bytes(make_tar(tmp_path / "b.tar", [member("more", b"other"), member(odd, b"new")]).read_bytes())
        assert IndexedTar(path, saved).read(odd) == b"new"
        assert sorted(os.listdir(tmp_path)) == ["a.tar", "b.tar", "index.json"]

    @pytest.mark.parametrize("cut", [100, 600, 5000])
    def test_a_tar_that_is_cut_off_is_refused(self, tmp_path, cut):
        path = make_tar(tmp_path / "a.tar", [member(f"{n}.png", bytes(5000)) for n in range(2)])
        os.truncate(path, cut)
        with pytest.raises(tarfile.ReadError):
            pasted(self.STEM)["IndexedTar"](path, tmp_path / "index.json")
        assert os.listdir(tmp_path) == ["a.tar"]

    BEFORE = """
import json
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional
"""
    AFTER = """
class Files:
    def __init__(self):
        self.files, self.names = IndexedTar("train.tar", "index.json"), [*map(str, range(20)), "é.png"]
    def __len__(self):
        return len(self.names)
    def __getitem__(self, number):
        return self.names[number], self.files.read(self.names[number]).decode()

if __name__ == "__main__":
    files, epochs = Files(), []
    files[3]  # a look, before workers start
    for num_workers in (0, 2):
        loader = DataLoader(files, 4, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0)
        for epoch in range(2):
            epochs.append(sorted([name, text] for batch in loader for name, text in zip(*batch)))
    print(json.dumps(epochs))
"""

    @pytest.mark.parametrize("start_method", START_METHODS)
    def test_workers_read_it_even_after_a_look(self, tmp_path, start_method):
        make_tar(tmp_path / "train.tar", {**{str(n): bytes([65 + n]) * n for n in range(20)}, "é.png": b"not ASCII"})
        expected = sorted([*([str(n), chr(65 + n) * n] for n in range(20)), ["é.png", "not ASCII"]])
        epochs = run_script(tmp_path, self.BEFORE, do_this(self.STEM), self.AFTER, start_method=start_method)
        assert epochs == [expected] * 4


EPOCHS = """
if __name__ == "__main__":
    import json
    shapes = [[list(images.shape), str(images.dtype), len(labels)] for _ in range(2) for images, labels in loader]
    print(json.dumps([shapes, len(photos)]))
"""


@pytest.mark.parametrize(("start_method", "num_workers"), [("fork", 2), ("forkserver", 2), ("spawn", 2)])
def test_a_loader_of_scaled_crops_reads_files_of_all_kinds(photos, tmp_path, start_method, num_workers):
    """13."""
    (tmp_path / "photos").symlink_to(photos / "train")
    block = replaced(
        do_this("13_peers"), ("num_workers=max(1, cores)", f"num_workers={num_workers}"), ("photos, 64,", "photos, 4,"),
        ("persistent_workers=True", f"persistent_workers={num_workers > 0}"),
    )  # fmt: skip
    shapes, n_photos = run_script(tmp_path, block, EPOCHS, start_method=start_method)
    assert sum(n for *_, n in shapes) == 2 * n_photos
    assert all(shape == [n, 3, 224, 224] and dtype == "torch.uint8" for shape, dtype, n in shapes)


def test_ranks_share_the_photos(tmp_path, monkeypatch):
    """13: under DDP, each photo is read by one rank; each is in a class of its own here."""
    for number in range(6):
        (tmp_path / "photos" / str(number)).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / str(number) / "photo.png")
    monkeypatch.chdir(tmp_path)
    block = replaced(
        do_this("13_peers"), ("num_workers=max(1, cores), persistent_workers=True", "num_workers=0"),
    )  # fmt: skip

    def labels_of(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        names = {"__name__": "train"}
        exec(block, names)  # noqa: S102
        return [label for images, labels in names["loader"] for label in labels.tolist()]

    found = [labels_of(rank, 3) for rank in range(3)]
    assert [len(labels) for labels in found] == [2, 2, 2]
    assert sorted(label for labels in found for label in labels) == sorted(labels_of(0, 1)) == list(range(6))


CORES = """
if __name__ == "__main__":
    import json, labkit as lk
    print(json.dumps([loader.num_workers, lk.make_loader(list(range(4))).num_workers]))
"""


@pytest.mark.parametrize(
    ("stem", "n_allowed", "n_ranks"),
    [
        ("03_persistent_workers", 2, None),
        ("13_peers", 2, "4"),
    ],
)
def test_a_rank_has_one_worker_for_each_of_its_cores_as_with_labkit(stem, n_allowed, n_ranks, photos):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < n_allowed:
        pytest.skip(f"needs {n_allowed} cores")
    environment = {"LOCAL_WORLD_SIZE": n_ranks} if n_ranks else {}
    bound = f"import os\nos.sched_setaffinity(0, {sorted(allowed)[:n_allowed]})\ndataset = range(4)"
    given, default = run_script(photos, bound, do_this(stem), CORES, environment=environment)
    assert given == default == max(1, n_allowed // int(n_ranks or 1))


@pytest.mark.parametrize(
    ("limit", "n_cores", "n_ranks", "workers"),
    [
        (None, 8, 1, 8),
        ("max 100000\n", 8, 1, 8),
        ("250000 100000\n", 8, 1, 2),
        ("50000 100000\n", 8, 1, 1),
        ("600000 100000\n", 8, 3, 2),
        (None, 2, 3, 1),
    ],
)
@pytest.mark.parametrize("stem", ["03_persistent_workers", "13_peers"])
def test_a_quota_limits_the_workers(tmp_path, photos, monkeypatch, stem, limit, n_cores, n_ranks, workers):
    monkeypatch.chdir(photos)
    (tmp_path / "cpu.max").write_text(limit or "")
    file = tmp_path / ("cpu.max" if limit else "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_ranks))
    found = {"dataset": range(4)}
    exec(replaced(do_this(stem), ("/sys/fs/cgroup/cpu.max", str(file))), found)  # noqa: S102
    assert found["loader"].num_workers == workers


BEFORE_KEPT = """
import os
class Numbered:
    def __len__(self):
        return 300
    def __getitem__(self, index):
        return index, os.getpid()
dataset = Numbered()
"""
AFTER_KEPT = """
if __name__ == "__main__":
    import json
    epochs = [[part for batch in loader for part in zip(*(column.tolist() for column in batch))] for _ in range(2)]
    print(json.dumps(epochs))
"""


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_are_kept_for_a_second_epoch_in_another_order(tmp_path, start_method):
    """03."""
    epochs = run_script(tmp_path, BEFORE_KEPT, do_this("03_persistent_workers"), AFTER_KEPT, start_method=start_method)
    orders = [[index for index, _ in epoch] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(300))] * 2
    assert orders[0] != orders[1]
    assert {pid for _, pid in epochs[0]} == {pid for _, pid in epochs[1]}
