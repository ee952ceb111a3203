"""Whoever does what a message of labkit's advises gets what it promises: each is followed to its end."""

import ast
import gzip
import http.server
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import labkit as lk
from labkit.app.cli import main
from labkit.data import decode
from labkit.data.labels import LabelWarning
from labkit.data.samples import make_depth
from labkit.data.tar_stream import convert_tar
from tests.image_files import write_pictures
from tests.paths import SCRIPTS, contents, invoke, run_script
from tests.serving import Quiet, serving
from tests.tars import make_tar

KEYS = ["cat/1.jpg", "cat/2.png", "dog/3.jpg"]


def refused(call, *, error=lk.LabkitError) -> str:
    """The message of a call that fails."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def labels(source, **options) -> list[int]:
    dataset = lk.ImageDataset(source, **options)
    assert all(image.dtype == torch.uint8 for image, _ in dataset)
    return [int(label) for label in dataset.labels]


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_pictures(tmp_path / "photos", *KEYS)


@pytest.fixture
def tar(photos) -> Path:
    return make_tar(photos.with_suffix(".tar"), contents(photos))


# Tars in another form.


@pytest.mark.parametrize(
    ("program", "pack"),
    [
        ("gzip", "gzip -k {}"), ("bzip2", "bzip2 -k {}"), ("xz", "xz -k {}"), ("zstd", "zstd -q {}"),
        ("lz4", "lz4 -q {} {}.lz4"), ("lzip", "lzip -k {}"),
    ],
)  # fmt: skip
def test_a_compressed_tar_is_unpacked_by_the_command_that_is_named(photos, tar, tmp_path, program, pack):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    subprocess.run(shlex.split(pack.format(tar, tar)), check=True)
    [packed] = tmp_path.glob("photos.tar.*")
    said = refused(lambda: list(lk.open_store(packed).keys()))
    command = said.partition("onvert it: ")[2]
    if command.startswith("python -m labkit "):
        assert invoke(main, shlex.split(command)[3:]).exit_code == 0
    else:
        subprocess.run(shlex.split(command), check=True, capture_output=True)
    assert labels(f"{packed}.tar") == labels(photos)
    if program in ("zstd", "lz4", "lzip"):
        assert command in refused(lambda: lk.read_shards([packed]) and list(lk.read_shards([packed])))


def test_a_zip_is_unpacked_by_the_command_that_is_named(photos, tmp_path):
    packed = Path(shutil.make_archive(str(tmp_path / "set"), "zip", photos))
    said = refused(lambda: lk.open_store(packed).keys())
    program, source, option, folder = shlex.split(re.search(r"unzip .*", said)[0])
    assert (program, source, option) == ("unzip", str(packed), "-d")
    shutil.unpack_archive(source, folder)
    assert labels(folder) == labels(photos)


def test_a_plain_tar_is_used_as_it_is_and_what_is_none_is_not(photos, tar, tmp_path):
    assert "use it as it is" in refused(lambda: convert_tar(tar, tmp_path / "x.tar", progress=False))
    assert labels(tar) == labels(photos)
    (tmp_path / "y.tar").write_bytes(b"no tar" * 500)
    assert "is not a tar" in refused(lambda: convert_tar(tmp_path / "y.tar", tmp_path / "x.tar", progress=False))


def test_a_tar_of_tars_is_unpacked_twice(photos, tmp_path):
    """As ImageNet's is."""
    (tmp_path / "in").mkdir()
    for folder in ("cat", "dog"):
        make_tar(tmp_path / "in" / f"{folder}.tar", contents(photos / folder))
    outer = make_tar(tmp_path / "train.tar", contents(tmp_path / "in"))
    said = refused(lambda: lk.ImageDataset(outer))
    assert "holds 2 tars, such as 'cat.tar', and no image: unpack it by `tar -xf`" in said
    (tmp_path / "out").mkdir()
    with tarfile.open(outer) as file:
        file.extractall(tmp_path / "out", filter="data")
    script = re.search(r"data_scripts/(\w+)\.py FOLDER TAR", said)[1]
    assert (SCRIPTS / f"{script}.py").is_file()
    assert run_script(script, tmp_path / "train", *sorted((tmp_path / "out").glob("*.tar"))).exit_code == 0
    assert labels(tmp_path / "train") == labels(photos)


def test_a_folder_of_compressed_tars_names_one(photos, tar, tmp_path):
    (tmp_path / "set").mkdir()
    packed = tmp_path / "set" / "a.tar.gz"
    packed.write_bytes(gzip.compress(tar.read_bytes()))
    said = refused(lambda: lk.ImageDataset(packed.parent))
    assert "but 1 .gz: open one by its own path, whose error says how to unpack it" in said
    assert "python -m labkit convert" in refused(lambda: list(lk.open_store(packed).keys()))


# Tables.


def write_table(path: Path, photos: Path, keys: list[str]) -> None:
    rows = [{"bytes": (photos / key).read_bytes(), "path": None} for key in keys]
    numbers = [["cat", "dog"].index(key.partition("/")[0]) for key in keys]
    table = pa.table({"image": rows, "label": numbers})
    about = '{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), path)


def test_a_folder_of_parquet_parts_is_joined_or_opened_part_by_part(photos, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, part in enumerate((KEYS[:2], KEYS[2:])):
        write_table(folder / f"train-0000{number}.parquet", photos, part)
    said = refused(lambda: lk.ImageDataset(folder))
    assert "but 2 .parquet: one Parquet file is opened by its own path; join several before, as pyarrow." in said
    assert labels(folder / "train-00001.parquet") == [1]
    joined = tmp_path / "photos.parquet"
    assert "pyarrow.parquet.write_table(pyarrow.parquet.read_table(folder), 'photos.parquet')" in said
    pq.write_table(pq.read_table(folder), joined)
    assert labels(joined) == labels(photos)
    assert lk.ImageDataset(joined).classes == ["cat", "dog"]


@pytest.mark.parametrize("kind", ["a struct", "a text"])
def test_paths_in_a_table_lead_to_their_folder(photos, tmp_path, kind):
    rows = [{"bytes": None, "path": key} for key in KEYS] if kind == "a struct" else KEYS
    images = pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}) if kind == "a struct" else None)
    pq.write_table(pa.table({"image": images, "label": [0, 0, 1]}), tmp_path / "t.parquet")
    said = refused(lambda: labels(tmp_path / "t.parquet"))
    assert "as lk.FolderStore(folder), and pass labels=" in said
    assert labels(lk.FolderStore(photos), labels=dict(zip(KEYS, [0, 0, 1], strict=True))) == [0, 0, 1]


# Shards of other tools.


def test_shards_that_lack_a_text_are_read_without_labels(photos, tmp_path):
    """As img2dataset writes them of images without a caption."""
    files = {f"{number}.jpg": (photos / "cat/1.jpg").read_bytes() for number in range(3)} | {
        "0.txt": b"a",
        "2.txt": b"c",
    }
    (tmp_path / "shards").mkdir()
    shard = make_tar(tmp_path / "shards" / "00000.tar", dict(sorted(files.items())))
    said = refused(lambda: list(lk.read_shards([shard])))
    assert "a sample must have one image and a .txt with its label; it has jpg" in said
    assert "read the images alone, as lk.ImageDataset(folder_of_the_shards, classes=[])" in said
    for place in (shard.parent, shard):
        assert "or classes=[] if labels are not used" in refused(lambda place=place: lk.ImageDataset(place))
        assert labels(place, classes=[]) == [0, 0, 0]
        with warnings.catch_warnings(action="ignore", category=LabelWarning):
            assert len(lk.ImageDataset(place, labels=lambda key: int(key[0])).labels) == 3


# Far away.


class Compressing(Quiet, http.server.SimpleHTTPRequestHandler):
    """A server that compresses all that it sends, or its listings alone."""

    listings_alone = False

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.exists():
            self.send_error(404)
            return
        is_listing = path.is_dir()
        links = [f'<a href="{each.name}{"/" * each.is_dir()}">x</a>' for each in path.iterdir()] if is_listing else []
        data = "".join(links).encode() if is_listing else path.read_bytes()
        is_packed = is_listing or not self.listings_alone
        data = gzip.compress(data) if is_packed else data
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if is_listing else "image/jpeg")
        self.send_header("Content-Length", str(len(data)))
        if is_packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.parametrize("listings_alone", [False, True])
def test_a_server_that_compresses_images_is_named(photos, monkeypatch, listings_alone):
    monkeypatch.setattr(Compressing, "listings_alone", listings_alone)
    monkeypatch.chdir(photos)
    with serving(Compressing) as port:
        store = lk.HttpStore(f"http://127.0.0.1:{port}")
        assert list(store.keys()) == KEYS
        if not listings_alone:
            said = refused(lambda: lk.ImageDataset(store)[0])
            assert "it is a gzip file, as a server sends that compresses images: have it send them as they are" in said
        else:  # as the message says
            assert labels(store) == labels(photos)


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_a_chained_url_is_opened_as_fsspec_does(photos, tar, own_home, tmp_path, monkeypatch, form):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where simplecache keeps its files
    place = photos if form == "folder" else tar
    assert labels(f"simplecache::file://{place}") == labels(photos)
    assert "fsspec knows no scheme 'nothing::file'" in refused(lambda: lk.open_store(f"nothing::file://{place}"))


# Places and names.


def test_a_home_and_wildcards_are_expanded_as_the_message_says(photos, monkeypatch):
    monkeypatch.setenv("PHOTOS", str(photos))
    assert "os.path.expandvars(path)" in refused(lambda: lk.open_store("$PHOTOS"))
    assert labels(os.path.expandvars("$PHOTOS")) == labels(photos)
    assert "choose some of its images by keys=" in refused(lambda: lk.open_store(f"{photos}/cat/*.jpg"))
    assert labels(photos, keys=[key for key in KEYS if key.endswith(".jpg")]) == [0, 1]


def test_images_of_other_formats_are_left_out_by_the_call_that_is_named(photos):
    Image.new("RGB", (9, 9)).save(photos / "cat" / "9.gif")
    said = refused(lambda: lk.ImageDataset(photos))
    ignore = ast.literal_eval(re.search(r"lk\.open_store\(root, ignore=(\(.*?\))\)", said)[1])
    assert labels(lk.open_store(photos, ignore=ignore)) == [0, 0, 1]


@pytest.mark.parametrize("remedy", ["moved away", "classes=[]"])
def test_images_beside_class_folders(photos, remedy):
    shutil.copy(photos / "cat/1.jpg", photos / "0.jpg")
    said = refused(lambda: lk.ImageDataset(photos))
    assert "move them into one, or away" in said
    assert "or pass classes=[] if labels are not used" in said
    if remedy == "moved away":
        (photos / "0.jpg").unlink()
        assert labels(photos) == [0, 0, 1]
    else:
        assert labels(photos, classes=[]) == [0] * 4


def test_the_parts_of_a_set_are_opened_one_by_one(tmp_path):
    write_pictures(tmp_path / "set", "train/cat/1.jpg", "train/dog/2.jpg", "val/dog/3.jpg")
    said = refused(lambda: lk.ImageDataset(tmp_path / "set"))
    assert "open each by itself (root/train, root/val)" in said
    train = lk.ImageDataset(tmp_path / "set" / "train")
    assert labels(tmp_path / "set" / "val", classes=train.classes) == [1]
    call = re.search(r"classes=(\[.*?\])", said)[1]
    assert labels(tmp_path / "set", classes=ast.literal_eval(call)) == [0, 0, 1]


def test_keys_and_unfinished_shards_and_missing_manifests(photos, tmp_path):
    said = refused(lambda: lk.ImageDataset(photos, keys=["1.jpg"]))
    assert labels(photos, keys=[re.search(r"such as '(.*?)'$", said)[1]]) == [0]
    root = lk.write_shards(photos, tmp_path / "shards", engine="threads", progress=False)
    (root / "unfinished").mkdir()
    (root / "manifest.json").unlink()
    assert "run write_shards to its end" in refused(lambda: lk.read_shards(root))
    shutil.rmtree(root / "unfinished")
    assert "name a folder that write_shards filled, or .tar files" in refused(lambda: lk.read_shards(root))
    assert sorted(int(label) for _, label in lk.read_shards(sorted(root.glob("*.tar")))) == labels(photos)
    assert "name the folder, not its shards" in refused(lambda: lk.read_shards(sorted(root.glob("*.tar")), verify=True))


def test_a_pixel_file_that_is_of_others_is_made_elsewhere_or_again(photos, tmp_path):
    path = tmp_path / "x.pixels"
    lk.PixelStore.build(photos, path, short_side=8, progress=False)
    said = refused(lambda: lk.PixelStore.build(photos, path, short_side=10, progress=False))
    assert "choose another path, or move that file away" in said
    lk.PixelStore.build(photos, tmp_path / "other.pixels", short_side=10, progress=False)
    path.rename(tmp_path / "away")
    assert min(lk.PixelStore.build(photos, path, short_side=10, progress=False).shapes.ravel()) == 10
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data[:-64])
    said = refused(lambda: lk.PixelStore(path))
    assert "remove it and build it again with labkit.PixelStore.build(source, path)" in said
    path.unlink()
    assert list(lk.PixelStore.build(photos, path, short_side=10, progress=False).keys) == list(
        lk.FolderStore(photos).keys()
    )


def test_sixteen_bits_are_read_as_the_warning_says(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "_has_warned", False)
    depth = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    (tmp_path / "a").mkdir()
    Image.fromarray(depth).save(tmp_path / "a" / "1.png")
    store = lk.FolderStore(tmp_path)
    [key] = store.keys()
    with pytest.warns(decode.BitDepthWarning) as caught:
        lk.decode(store.read(key), key=key)
    assert "np.asarray(PIL.Image.open(io.BytesIO(store.read(key))))" in str(caught[0].message)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(store.read(key)))), depth)


# Folders that an earlier run filled.

MAKERS = {
    "make_photos": lambda source, root, number: lk.make_photos(root, 2, seed=number, progress=False),
    "make_depth": lambda source, root, number: make_depth(root, 1, seed=number, progress=False),
    "write_shards": lambda source, root, number: lk.write_shards(
        source, root, seed=number, engine="threads", progress=False
    ),
    "tile_jpegs": lambda source, root, number: lk.tile_jpegs(source, root, short_side=8 + number, progress=False),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_folder_of_another_job_is_left_or_emptied(photos, tmp_path, maker):
    make, root = MAKERS[maker], tmp_path / "out"
    make(photos, root, 0)
    before = contents(root)
    assert "choose another folder, or remove what labkit made there" in refused(lambda: make(photos, root, 1))
    assert contents(root) == before
    make(photos, tmp_path / "other", 1)
    shutil.rmtree(root)
    make(photos, root, 1)
    assert contents(root) == contents(tmp_path / "other")


@pytest.mark.parametrize("maker", MAKERS)
def test_a_folder_with_something_else_is_left_alone(photos, tmp_path, maker):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    said = refused(lambda: MAKERS[maker](photos, tmp_path / "mine", 0))
    assert "'thesis.tex': choose a new folder, or an empty one" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    MAKERS[maker](photos, tmp_path / "empty", 0)


def test_folders_that_are_missing_are_made_by_the_call_that_is_named(tmp_path):
    said = refused(lambda: lk.FolderStore(tmp_path / "none"))
    assert "lk.make_photos(root, count) makes photos to try things on" in said
    assert len(lk.FolderStore(lk.make_photos(tmp_path / "none", 2, progress=False))) == 2


def test_a_tar_of_a_place_that_takes_folders_and_the_reverse(photos, tar, server):
    assert "lk.FolderStore reads folders of images" in refused(lambda: lk.TarStore(photos).keys())
    assert list(lk.FolderStore(photos).keys()) == list(lk.TarStore(tar).keys()) == KEYS
    assert "is a tar: open it with TarStore" in refused(lambda: lk.HttpStore(f"{server.url}/photos.tar"))
    server.files["/photos.tar"] = tar.read_bytes()
    assert labels(lk.TarStore(f"{server.url}/photos.tar")) == labels(photos)
    said = refused(lambda: lk.HttpStore(f"{server.url}/photos").keys())
    assert "name the files, HttpStore(url, keys=[...])" in said
    server.files.update({f"/photos/{key}": data for key, data in contents(photos).items()})
    assert labels(lk.HttpStore(f"{server.url}/photos", keys=KEYS)) == labels(photos)
