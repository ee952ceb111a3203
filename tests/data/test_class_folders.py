"""A class folder without an image that labkit reads is an error at every door, as ImageFolder has it."""

import tarfile
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

import labkit as lk
from labkit.course import serve_folder
from labkit.data.labels import LabelWarning
from tests.image_files import write_pictures
from tests.labeled import every_way

IMAGES = ("cat/1.jpg", "cat/deep/2.png", "emu/3.jpg", "owl/4.jpg")
OTHERS = {
    "raw files": {"dog/1.dng": 2, "dog/deep/2.dng": 2, "dog/3": 2},
    "hidden files": {"dog/.DS_Store": 1},
    "nothing": {"dog/": 0},
}
RAW, NOTHING = r"'dog' \(2 \.dng, 1 without suffix\)", r"'dog' \(no file\)"
SAID = {"raw files": RAW}


def photos(root: Path, others: dict[str, int]) -> Path:
    write_pictures(root, *IMAGES)
    for name, n_bytes in others.items():
        if name.endswith("/"):
            (root / name).mkdir(parents=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(bytes(n_bytes))
    return root


def tar_of(folder: Path) -> Path:
    path = folder.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        tar.add(folder, ".")
    return path


def shards_of(folder: Path) -> Path:
    root = folder.with_name("tars")
    root.mkdir()
    return tar_of(folder).rename(root / "photos.tar").parent


def tiled(folder: Path) -> Path:
    return lk.tile_jpegs(folder, folder.with_name("tiled"), short_side=8, progress=False)


SOURCES = {
    "folder": Path, "tar": tar_of, "folder of tars": shards_of, "tiled": tiled,
    "fsspec": lambda folder: f"file://{folder}",
}  # fmt: skip


@pytest.mark.parametrize("others", OTHERS)
def test_it_is_one_where_image_folder_raises(tmp_path, others):
    root = photos(tmp_path / "photos", OTHERS[others])
    with pytest.raises(FileNotFoundError, match="dog"):
        ImageFolder(root)
    with pytest.raises(ValueError, match=rf"{SAID.get(others, NOTHING)}.* pass .* classes=\['cat', 'emu', 'owl'\]"):
        lk.ImageDataset(root)
    (root / "dog").rename(tmp_path / "away")
    assert lk.ImageDataset(root).classes == ImageFolder(root).classes == ["cat", "emu", "owl"]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_says_so(tmp_path, own_home, source):
    root = photos(tmp_path / "photos", OTHERS["raw files"])
    opened = SOURCES[source](root)
    # What is tiled has images alone, and of other classes their empty folders.
    with pytest.raises(ValueError, match=NOTHING if source == "tiled" else RAW):
        lk.ImageDataset(opened)


def test_a_server_and_a_tar_there_say_so(tmp_path, own_home):
    root = photos(tmp_path / "photos", OTHERS["raw files"] | {"gnu/": 0})
    tar_of(root)
    with serve_folder(tmp_path) as url:
        for place in ("photos", "photos.tar"):
            with pytest.raises(ValueError, match=rf"{RAW}, 'gnu' \(no file\)"):
                lk.ImageDataset(lk.open_store(f"{url}{place}"))


def test_the_index_of_a_tar_keeps_its_empty_folders(tmp_path):
    path = tar_of(photos(tmp_path / "photos", OTHERS["nothing"]))
    for _ in range(2):  # from the tar, and from the index next to it
        with pytest.raises(ValueError, match=NOTHING):
            lk.ImageDataset(path)


def test_what_is_ignored_is_no_image_either(tmp_path):
    root = photos(tmp_path / "photos", {"dog/1.gif": 1})
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.*")}
    for source in (root, tar_of(root), files):
        with pytest.raises(ValueError, match=r"'dog' \(1 \.gif\)"):
            lk.ImageDataset(lk.open_store(source, ignore=".gif"))


@every_way
def test_who_names_the_classes_or_the_labels_is_told_nothing(tmp_path, labeled):
    root = photos(tmp_path / "photos", OTHERS["raw files"])
    for number, options in enumerate(
        ({"classes": ["cat", "dog", "emu", "owl"]}, {"classes": []}, {"labels": dict.fromkeys(IMAGES, 1)})
    ):
        assert len(labeled(root, tmp_path / str(number), **options).images) == len(IMAGES)


def test_a_folder_beside_images_that_are_in_none_is_left_alone(tmp_path):
    write_pictures(tmp_path, "1.jpg", "2.jpg")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "1.txt").touch()
    with pytest.warns(LabelWarning, match="none lies in a class folder"):
        assert lk.ImageDataset(tmp_path).labels.tolist() == [0, 0]
