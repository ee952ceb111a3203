"""peers --own: which of a reader's photos are read, and what is said of them."""

import re
from pathlib import Path
from zlib import crc32

import pytest
from PIL import Image

from labkit import FolderStore
from labkit.app.cli import main
from labkit.course import PEERS
from labkit.measure.frames import load_frame
from labkit.peers import registry
from labkit.peers.adapters.own import BASELINE, BEST_DATALOADER
from labkit.peers.photos import sample_photos
from tests.paths import invoke
from tests.peers.test_compare_peers import AnsweringHost
from tests.timing import leave_memory_out


def save(path: Path, mode="RGB", size=(90, 60), **options) -> bytes:
    """A photo whose color its name gives, so that each has bytes of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = tuple(crc32(path.name.encode()).to_bytes(4))[:3]
    Image.new("RGB", size, color).convert(mode).save(path, **options)
    return path.read_bytes()


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Nested and flat, JPEGs of all kinds, other images, and what is none."""
    root = tmp_path / "Holiday & más"
    for number in range(30):
        save(root / f"IMG_{number}.JPG", size=(120, 80) if number < 20 else (60, 40), progressive=number < 4)
    for number in range(10):
        save(root / "deep" / "er" / f"{number}.jpeg", "L")
        save(root / "deep" / f"{number}.png")
    save(root / "print.jpg", "CMYK")
    save(root / "renamed.jpg", format="PNG")
    (root / "cut.jpg").write_bytes(save(root / "whole.jpg")[:400])
    (root / "empty.jpe").touch()
    (root / "notes.txt").write_text("private")
    return root


def test_a_sample_is_of_the_jpegs_that_all_read_and_says_what_is_left_out(mixed, tmp_path):
    own = sample_photos(mixed, tmp_path / "all", 1e9)
    assert own.files == {".jpg": 34, ".jpeg": 10, ".png": 10, ".jpe": 1, "other": 1}
    assert own.left_out == {"CMYK": 1, "PNG inside": 1, "damaged": 2}
    assert own.kinds == {"gray": 10, "progressive": 4}
    copies = FolderStore(tmp_path / "all")
    originals = {path.read_bytes() for path in mixed.rglob("*") if path.is_file()}
    assert len(copies.keys()) == own.n_names == 200 * 41
    assert {copies.read(key) for key in copies.keys()} < originals  # noqa: SIM118
    assert all(re.fullmatch(r"\d/\d{5}\.jpg", key) for key in copies.keys())  # noqa: SIM118


def test_a_disk_without_links_and_a_link_to_the_folder(mixed, tmp_path, monkeypatch):
    """What would fill the disk is not repeated."""
    (tmp_path / "mine").symlink_to(mixed)
    monkeypatch.setattr(Path, "hardlink_to", lambda self, target: (_ for _ in ()).throw(PermissionError(self)))
    monkeypatch.setattr("labkit.peers.photos._MAX_BYTES", 3 * 41 * 1500)
    own = sample_photos(tmp_path / "mine", tmp_path / "all", 1e9)
    assert own.n_names == len(FolderStore(tmp_path / "all").keys())
    assert 41 < own.n_names * sum(own.n_bytes) / 41 <= 3 * 41 * 1500


def test_the_time_of_a_run_sets_how_many_photos_are_drawn(mixed, tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.peers.photos.usable_cores", lambda: 2)
    taken = []
    for number, run_s in enumerate([0.0, 0.0, 0.03]):  # 16 are the fewest
        own = sample_photos(mixed, tmp_path / str(number), run_s)
        store = FolderStore(tmp_path / str(number))
        taken.append([store.read(key) for key in sorted(store.keys(), key=lambda key: key[2:])])
        assert own.n_names == len(own.sizes) == len(taken[-1])
    assert taken[0] == taken[1] == taken[2][:16]
    assert [len(photos) for photos in taken] == [16, 16, 32]
    large = tmp_path / "camera"
    save(large / "one.jpg", size=(3000, 2000))
    assert sample_photos(large, tmp_path / "4", 1.0).n_names == 16  # 27 would take a second
    assert sample_photos(large, tmp_path / "5", 1.3).n_names == 32


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", r"--own takes a folder of photos, and nowhere does not exist \(looked for in "),
        ("file.jpg", r"--own takes a folder of photos, and file\.jpg is a file$"),
        ("empty", r"empty holds no JPEG, .* \(it holds no file\): name another folder"),
        ("pngs", r"pngs holds no JPEG, .* \(it holds 2 \.png, 1 other\): .* or write some of its images as JPEGs"),
        ("broken", r"none of the 2 JPEGs in broken can be used: 1 damaged, 1 CMYK$"),
        ("s3://bucket", r"--own must be a path of this machine"),
    ],
)
def test_a_folder_without_a_photo_to_read_is_one_line(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("file.jpg"))
    for folder in ("empty", "broken"):
        Path(folder).mkdir()
    save(Path("pngs/deep/1.png"))
    save(Path("pngs/2.png"))
    Path("pngs/notes").touch()
    save(Path("broken/1.jpg"), "CMYK")
    Path("broken/0.jpg").write_bytes(b"\xff\xd8 no photo")
    done = invoke(main, ["peers", "--own", name, "--only", "timm"])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert re.search(said, done.output.strip())


@pytest.fixture
def answering(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "my home"))
    monkeypatch.setattr(registry, "Host", AnsweringHost)
    monkeypatch.setattr(registry, "make_pictures", lambda work: work.root)
    leave_memory_out(monkeypatch)


@pytest.mark.usefixtures("answering")
def test_of_photos_that_take_long_there_are_fewer_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_SCALE", "laptop")
    monkeypatch.setattr(registry, "usable_cores", lambda: 1)
    monkeypatch.setattr("labkit.peers.photos.usable_cores", lambda: 1)
    for side, n_rounds in ((100, 4), (6000, 2)):  # sixteen photos of 36 megapixels take a core 7 s
        save(tmp_path / f"photos/{side}/1.jpg", size=(side, side))
        frame = registry.compare_own(tmp_path / f"photos/{side}", only=["timm"])
        assert frame["round"].max() == n_rounds


@pytest.mark.usefixtures("answering")
def test_the_command_ranks_and_prints_what_the_photos_are(mixed, tmp_path, monkeypatch):
    missing = registry.Peer("absent", "JPEG files", True, "pip install absent", ("no_such_module",), list)
    monkeypatch.setitem(PEERS, missing.name, missing)
    done = invoke(main, ["peers", "--own", str(mixed), "--only", "timm,absent", "--rounds", "2"])
    assert done.exit_code == 0, done.output
    assert "photos: 32 of 45 JPEGs, drawn at random with seed 0\n" in done.output
    assert "no JPEGs, left out: 10 .png, 1 other\n" in done.output
    assert "absent missing: pip install absent\n" in done.output
    assert re.search(r"^  timm .* 1\.00 \[1\.00, 1\.00\]", done.output, re.MULTILINE)
    (written,) = tmp_path.glob("results/*/peers-own.csv")
    assert Image.open(written.with_suffix(".png")).width > 800
    variants = set(load_frame(written)["variant"])
    assert {"timm", BEST_DATALOADER} < variants
    assert BASELINE not in variants
    assert list((tmp_path / "my home" / "photos").iterdir()) == []  # no copy is left
