"""PixelStore.build: the same bytes whoever makes them, whatever is killed on the way; nothing mixed, nothing lost."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import cloudpickle
import numpy as np
import psutil
import pytest
from PIL import Image

from labkit import FolderStore, PixelStore
from labkit.course import PixelError
from labkit.data import pixels as pixel_build
from labkit.errors import ItemErrors
from tests.memory_store import MemoryStore

# As if its classes stood in a notebook: workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

N_IMAGES = 70  # 24 parts: three images a part, and one in the last
SETTINGS = {"short_side": 12, "engine": "threads", "num_workers": 2, "progress": False}


def save(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = (20 - number % 7, 16 + number % 5, 3)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, size, np.uint8)).save(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number in range(N_IMAGES):
        save(root / "ab"[number % 2] / f"{number:02d}.png", number)
    return root


@pytest.fixture
def own_images(images, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(images, tmp_path / "images"))


def build(source, path: Path, **settings) -> PixelStore:
    return PixelStore.build(source, path, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def expected(images, tmp_path_factory) -> bytes:
    """An undisturbed build, in this thread."""
    return build(images, tmp_path_factory.mktemp("expected") / "p", num_workers=1).path.read_bytes()


class CountingStore(FolderStore):
    """Remembers what was read, and takes its time."""

    def __init__(self, root: Path, delay_s: float = 0):
        super().__init__(root)
        self.delay_s, self.was_read = delay_s, []

    def read(self, key: str) -> bytes:
        time.sleep(self.delay_s)
        self.was_read.append(key)
        return super().read(key)


def parts_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


@pytest.fixture
def stopped(own_images, tmp_path) -> Path:
    """A build that was interrupted when all parts were there."""
    interrupted = patch.object(pixel_build.os, "fsync", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        build(own_images, tmp_path / "out" / "p")
    assert len(os.listdir(parts_of(tmp_path / "out" / "p"))) == 25  # and the whole one, which has no name yet
    return tmp_path / "out" / "p"


LOCAL = pytest.param("local", 2, marks=pytest.mark.exhaustive)
RAY = pytest.param("ray", None, marks=pytest.mark.alone)  # Ray waits half a minute for its own start, and no longer


@pytest.mark.parametrize(("engine", "num_workers"), [("threads", 3), LOCAL, RAY])
def test_the_bytes_are_the_same_for_any_engine(images, expected, tmp_path, engine, num_workers):
    if engine == "ray":
        pytest.importorskip("ray", reason='Ray is not installed: python -m pip install -e ".[cluster]"')
    assert build(images, tmp_path / "p", engine=engine, num_workers=num_workers).path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["p"]


def test_many_images_give_parts_of_256(images, tmp_path):
    store = FolderStore(images)
    store._keys = [f"a/{number:05d}.png" for number in range(9000)]
    store.sizes = lambda: np.arange(9000)
    _, parts = pixel_build._plan_parts(store, 12, "pil")
    assert [len(part.keys) for part in parts] == [256] * 35 + [40]
    assert [key for part in parts for key in part.keys] == store.keys()


def test_a_rerun_takes_what_is_there(own_images, stopped, expected):
    for name in ("part-000003.pixels", "part-000011.pixels"):
        (parts_of(stopped) / name).unlink()
    store = CountingStore(own_images)
    assert build(store, stopped).path.read_bytes() == expected
    assert sorted(store.was_read) == sorted(store.keys()[9:12] + store.keys()[33:36])
    assert os.listdir(stopped.parent) == ["p"]


def test_damaged_parts_are_made_again(own_images, stopped, expected):
    parts = parts_of(stopped)
    whole = (parts / "part-000001.pixels").read_bytes()
    flipped = bytearray((parts / "part-000005.pixels").read_bytes())
    flipped[-500] ^= 1
    another = (parts / "part-000007.pixels").read_bytes()
    damaged = {1: whole[:-1], 2: b"", 4: whole[:-100] + b"?" + whole[-99:], 5: flipped, 6: another}
    for number, data in damaged.items():
        (parts / f"part-{number:06d}.pixels").write_bytes(data)
    store = CountingStore(own_images)
    assert build(store, stopped).path.read_bytes() == expected
    assert len(store.was_read) == 5 * 3


@pytest.mark.parametrize(
    ("settings", "changed", "remade"), [({"short_side": 9}, False, slice(None)), ({}, True, slice(3, 6))]
)
def test_parts_of_other_settings_or_images_are_not_mixed_in(own_images, stopped, tmp_path, settings, changed, remade):
    if changed:
        save(own_images / "a" / "06.png", 10)
    other = build(own_images, tmp_path / "q", **settings).path.read_bytes()
    store = CountingStore(own_images)
    assert build(store, stopped, **settings).path.read_bytes() == other
    assert sorted(store.was_read) == sorted(store.keys()[remade])


def test_a_folder_with_other_files_is_left_alone(own_images, stopped, expected):
    parts = parts_of(stopped)
    (parts / "thesis.txt").write_text("mine")
    assert build(own_images, stopped).path.read_bytes() == expected
    assert os.listdir(parts) == ["thesis.txt"]


def test_a_store_that_is_there_is_returned(images, tmp_path):
    before = os.stat(build(images, tmp_path / "p").path)
    parts_of(tmp_path / "p").mkdir()
    (parts_of(tmp_path / "p") / "part-000000.pixels").write_bytes(b"killed before it was removed")
    store = CountingStore(images)
    assert build(store, tmp_path / "p").keys == store.keys()
    assert store.was_read == []
    assert os.stat(tmp_path / "p").st_mtime_ns == before.st_mtime_ns
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"short_side": 9}, None),
        ({"decoder": "pil"}, None),
        ({}, partial(save, number=10)),
        ({}, Path.unlink),
    ],
)
def test_other_settings_and_another_source_are_refused(own_images, tmp_path, settings, change):
    path = build(own_images, tmp_path / "p").path
    if change:
        change(own_images / "a" / "00.png")
    said = r"p holds other pixels \(short_side 12, decoder 'turbojpeg'\), or is of other images: choose another path"
    assert_refused(own_images, path, said, **settings)


def test_a_foreign_file_is_not_overwritten(images, tmp_path):
    shutil.copy(images / "a" / "00.png", tmp_path / "p")
    assert_refused(images, tmp_path / "p", r"p is not a pixel store .*under another name")


def assert_refused(source, path: Path, said: str, **settings) -> None:
    before = path.read_bytes()
    with pytest.raises(PixelError, match=said):
        build(source, path, **settings)
    assert path.read_bytes() == before
    assert {name.name for name in path.parent.iterdir()} <= {path.name, "images"}


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        (None, {"short_side": 0}, "short_side must be an integer >= 1"),
        (None, {"decoder": "jpg"}, "decoder must be one of pil"),
        (None, {"engine": "dask"}, "local, threads, ray"),
        (None, {"address": "10.0.0.1:6379"}, "engine='ray'"),
        ("missing", {}, "'missing' is not a folder of images"),
        (MemoryStore({}), {}, "the source holds no image"),
    ],
)
def test_wrong_input_leaves_nothing(images, tmp_path, source, settings, said):
    with pytest.raises(ValueError, match=said):
        build(source or images, tmp_path / "new" / "p", **settings)
    assert os.listdir(tmp_path) == []


def test_images_that_cannot_be_read_are_named(own_images, tmp_path):
    store = CountingStore(own_images)
    sizes, good = store.sizes(), {key: store.read(key) for key in ("a/04.png", "a/06.png", "b/07.png")}
    store.sizes = lambda: sizes
    (own_images / "a" / "04.png").write_bytes(good["a/04.png"][:-20])
    (own_images / "a" / "06.png").unlink()
    (own_images / "b" / "07.png").write_bytes(b"not an image")
    with pytest.raises(ItemErrors, match="3 of 70 items failed") as failure:
        build(store, tmp_path / "p")
    failures = failure.value.failures
    assert list(failures) == list(good)
    assert "DecodeError: a/04.png: turbojpeg cannot decode" in failures["a/04.png"]
    assert "KeyError" in failures["a/06.png"]
    assert not (tmp_path / "p").exists()
    for key, data in good.items():
        (own_images / key).write_bytes(data)
    store.was_read.clear()
    assert len(build(store, tmp_path / "p")) == N_IMAGES
    assert len(store.was_read) == 3 * 3


def test_a_full_disk_leaves_no_file(images, tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build(images, tmp_path / "p")
    assert os.listdir(tmp_path) == ["p.parts"]


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.truncate"}


def build_until_killed(source: Path, path: Path, moment: int) -> None:
    """In a forked process: dies of SIGKILL at the given moment, counted in what it asks of the disk."""
    left = [moment]

    def count(*_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        return lambda *arguments: (function(*arguments), count())[0]

    sys.addaudithook(lambda event, _: count() if event in _EVENTS else None)
    pixel_build.zlib.crc32 = counted(zlib.crc32)  # between two images
    pixel_build.os.fsync = counted(os.fsync)
    build(source, path, num_workers=1)
    os._exit(0)


def started(function, *arguments) -> multiprocessing.Process:
    """A forked process: it has imported everything already."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


@pytest.mark.exhaustive
@forks
def test_killed_at_any_moment(tmp_path):
    for number in range(2):
        save(tmp_path / "images" / "a" / f"{number}.png", number)
    expected = build(tmp_path / "images", tmp_path / "expected", num_workers=1).path.read_bytes()
    path, was_there = tmp_path / "p", []
    while True:
        child = started(build_until_killed, tmp_path / "images", path, len(was_there))
        child.join(30)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        assert not path.exists() or path.read_bytes() == expected
        was_there.append(path.exists())
        assert build(tmp_path / "images", path, num_workers=1).path.read_bytes() == expected
        assert sorted(os.listdir(tmp_path)) == ["expected", "images", "p"]
        path.unlink()
    assert len(was_there) > 40
    assert was_there == sorted(was_there)  # first it is not there, then it is
    assert {False, True} == set(was_there)


@pytest.mark.exhaustive
@forks
def test_killed_while_processes_work(images, expected, tmp_path):
    path = tmp_path / "p"
    child = started(partial(build, CountingStore(images, 0.02), path, engine="local"))
    while len(list(parts_of(path).glob("part-*"))) < 3:
        assert child.is_alive()
        time.sleep(0.005)
    workers = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.join()
    assert not path.exists()
    store = CountingStore(images)
    assert build(store, path).path.read_bytes() == expected
    assert len(workers) >= 2
    assert len(store.was_read) <= N_IMAGES - 9
    assert psutil.wait_procs(workers, 10)[1] == []


@forks
def test_two_processes_that_build_the_same_file(images, expected, tmp_path):
    both = [started(partial(build, CountingStore(images, 0.02), tmp_path / "p")) for _ in range(2)]
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "p").read_bytes() == expected
    assert os.listdir(tmp_path) == ["p"]
