"""collect_sizes: every image with its own size, from the cheapest witness that can be believed; nothing lost."""

import os
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from labkit import FolderStore, collect_sizes
from labkit.course.oracles import exif_of
from labkit.data import sizes
from tests.paths import run_script

# Name -> size. A name that ends in .jpg, .png or so is written in that format.
IMAGES = {
    "top.jpg": (30, 20),
    "cat/a.jpeg": (31, 20),
    "cat/B.JPG": (32, 20),
    "cat/deeper/still/c.png": (33, 20),
    "dog/d.WebP": (34, 20),
    "dog/e.bmp": (35, 20),
    "dog/f.avif": (36, 20) if ".avif" in Image.registered_extensions() else None,
    "dog/two words.jpg": (37, 20),
    "dog/[1] *?.jpg": (38, 20),
    "dog/line\nbreak.jpg": (39, 20),
    "dog/..jpg": None,  # hidden
    "[x]/y.jpg": (40, 20),
    "Größe/日本.jpg": (41, 20),
    "cat.jpg/inside.jpg": (42, 20),
    "cat/.hidden.jpg": None,
    ".cache/g.jpg": None,
    "dog/h.gif": (43, 20),
    "dog/i.tif": (44, 20),
    "dog/@eaDir/h.jpg": None,
    "cat/jpg": None,
}


def write_images(folder: Path, *names: str, size: tuple[int, int] = (9, 8), **options) -> None:
    """Pictures of one size, in the formats of their suffixes."""
    touch(folder, *names)
    for path in (folder / name for name in names):
        image_format = Image.registered_extensions().get(path.suffix.lower(), "JPEG")
        Image.new("RGB", size).save(path, image_format, **options)


def touch(folder: Path, *names: str) -> None:
    """Empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def sizes_of(frame: pd.DataFrame) -> dict[str, tuple]:
    """Path -> (width, height, source)."""
    return {row.path: (row.width, row.height, row.source) for row in frame.itertuples()}


FROM_HEADER = (9, 8, "header")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, size in IMAGES.items():
        if size or not name.endswith(".avif"):  # Pillow before 11.3 writes none
            write_images(root, name, size=size or (99, 99))
    touch(root, "notes.txt", "cat/a.txt")
    (root / "empty").mkdir()
    return root


def test_every_image_is_there_with_pillows_size(tree):
    frame = collect_sizes(tree)
    found = sizes_of(frame)
    assert found == {name: (*Image.open(tree / name).size, "header") for name, size in IMAGES.items() if size}
    assert list(frame["path"]) == sorted(frame["path"])
    others = (".avif", ".bmp", ".gif", ".tif")
    assert FolderStore(tree, ignore=others).keys() == list(collect_sizes(tree, ignore=others)["path"])
    assert set(found) - set(collect_sizes(tree, ignore=others)["path"]) == {p for p in found if p.endswith(others)}
    assert set(frame["exif_orientation"]) == {1}
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "path": "object", "width": "Int64", "height": "Int64", "source": "object", "exif_orientation": "Int64",
        "error": "object",
    }  # fmt: skip
    pd.testing.assert_frame_equal(collect_sizes(str(tree) + "/"), frame)


def test_not_recursive_means_one_folder(tree):
    assert list(collect_sizes(tree, recursive=False)["path"]) == ["top.jpg"]
    assert list(collect_sizes(tree / "cat", recursive=False)["path"]) == ["B.JPG", "a.jpeg"]


def test_each_folder_is_listed_once_and_cached_images_are_not_opened(tmp_path, monkeypatch):
    listed, plain = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(os.fspath(path)) or plain(path))
    monkeypatch.setattr(sizes, "read_headers", lambda paths, **_: [] if not paths else pytest.fail(f"opened {paths}"))
    names = [f"{folder}{number}" for folder in ("", "a/", "a/b/") for number in range(40)]
    for number, name in enumerate(names, 1):
        touch(tmp_path, f"{name}.jpg", f"{name}_{number:04}x0768_sdxl.npz", f"{name}_sdxl_te.npz")
    frame = collect_sizes(tmp_path)
    assert sorted(listed) == [str(tmp_path / folder) for folder in ("", "a", "a/b")]
    assert sizes_of(frame) == {f"{name}.jpg": (number, 768, "cache") for number, name in enumerate(names, 1)}
    assert frame["exif_orientation"].isna().all()


SD = "_0512x0512_sd.npz"


def test_what_no_cache_settles_is_read_from_the_image(tmp_path):
    write_images(tmp_path, "agree.png", "disagree.png", "twin.png", "twin.jpg", "none.png", "sub/agree.png")
    touch(tmp_path, "agree" + SD, "disagree" + SD, "disagree_0009x0008_flux.npz", "twin" + SD)
    # A name is believed, and a cache above is no cache here.
    assert sizes_of(collect_sizes(tmp_path)) == {
        "agree.png": (512, 512, "cache"), "disagree.png": FROM_HEADER, "twin.png": FROM_HEADER,
        "twin.jpg": FROM_HEADER, "none.png": FROM_HEADER, "sub/agree.png": FROM_HEADER,
    }  # fmt: skip
    assert set(collect_sizes(tmp_path, caches=False)["source"]) == {"header"}


def test_exif_is_a_column_and_sizes_are_as_stored(tmp_path):
    write_images(tmp_path, "a.jpg", "b.png", size=(40, 30), exif=exif_of(6))
    write_images(tmp_path, "c.jpg", size=(40, 30))
    frame = collect_sizes(tmp_path)
    assert frame["exif_orientation"].tolist() == [6, 6, 1]
    assert {(row.width, row.height) for row in frame.itertuples()} == {(40, 30)}


def test_the_unreadable_are_listed_with_the_reason(tmp_path):
    write_images(tmp_path, "good.jpg")
    touch(tmp_path, "empty.jpg")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jpg")
    frame = collect_sizes(tmp_path).set_index("path")
    assert frame["error"].to_dict() == {
        "dangling.jpg": "not a file, or a broken link", "empty.jpg": "the file is empty", "good.jpg": "",
        "pipe.jpg": "not a file, or a broken link", "text.png": "no image format that this Pillow reads",
    }  # fmt: skip
    assert frame.pop("source").tolist() == ["unreadable"] * 2 + ["header"] + ["unreadable"] * 2
    assert frame.drop("good.jpg")[["width", "height", "exif_orientation"]].isna().all(axis=None)


def test_a_folder_that_cannot_be_listed_has_a_row(tmp_path, monkeypatch):
    write_images(tmp_path, "a.jpg")
    (tmp_path / "locked").mkdir()
    plain = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    frame = collect_sizes(tmp_path)
    assert frame[["path", "source", "error"]].to_numpy().tolist() == [
        ["a.jpg", "header", ""], ["locked/", "unreadable", "the folder cannot be listed: Permission denied"],
    ]  # fmt: skip
    with pytest.raises(PermissionError):
        collect_sizes(tmp_path / "locked")


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    write_images(tmp_path, "set/a.jpg", "elsewhere/b.jpg")
    links = {"set/more": "elsewhere", "set/itself": "set", "elsewhere/back": "set", "set/c.jpg": "elsewhere/b.jpg"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    assert collect_sizes(tmp_path / "set")["path"].tolist() == ["a.jpg", "c.jpg", "more/b.jpg"]


def test_names_that_are_not_utf8_survive(tmp_path):
    name = os.fsdecode(b"caf\xe9.jpg")
    write_images(tmp_path, name, size=(7, 5))
    assert sizes_of(collect_sizes(tmp_path)) == {name: (7, 5, "header")}
    assert run_script("collect_sizes", tmp_path, tmp_path / "sizes.csv").exit_code == 0
    assert b"\ncaf\xe9.jpg,7,5," in (tmp_path / "sizes.csv").read_bytes()


@pytest.mark.parametrize(
    "suffix", [".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".jxl", ".gif", ".tiff", ".heic"]
)
def test_every_suffix_counts_in_any_case(tmp_path, suffix):
    touch(tmp_path, "a" + suffix, "b" + suffix.upper(), "a" + SD, "b" + SD)
    assert collect_sizes(tmp_path)["width"].tolist() == [512, 512]


def test_bad_arguments_are_named(tmp_path):
    touch(tmp_path, "notes.txt", "b/a" + SD)
    with pytest.raises(FileNotFoundError, match="holds no image"):
        collect_sizes(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        collect_sizes(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="num_workers must be an integer >= 1, got 0"):
        collect_sizes(tmp_path, num_workers=0)


def test_the_script_writes_the_frame(tree, tmp_path):
    result = run_script("collect_sizes", tree, tmp_path / "new" / "sizes.csv", "--num-workers", 1)
    assert result.exit_code == 0, result.output
    frame = collect_sizes(tree)
    assert result.stdout.endswith(f"{len(frame)} header\n")
    options = {"dtype": frame.dtypes.to_dict(), "keep_default_na": False, "na_values": {"width": [""]}}
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "new" / "sizes.csv", **options), frame)
