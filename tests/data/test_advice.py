"""Whoever does what a message of labkit's advises gets what it promises: each is followed to its end."""

import gzip
import http.server
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import labkit as lk
from labkit.app.cli import main
from tests.image_files import write_pictures
from tests.paths import SCRIPTS, contents, invoke, run_script
from tests.serving import Quiet, serving
from tests.tars import make_tar

KEYS = ["cat/1.jpg", "cat/2.png", "dog/3.jpg"]


def refused(call) -> str:
    """The message of a call that fails."""
    with pytest.raises(lk.LabkitError) as caught:
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
    [made] = tmp_path.glob("photos.tar.*")
    packed = made.rename(tmp_path / f"it's {made.name}")
    said = refused(lambda: list(lk.open_store(packed).keys()))
    command = said.partition("onvert it: ")[2]
    if command.startswith("python -m labkit "):
        assert invoke(main, shlex.split(command)[3:]).exit_code == 0
    else:
        subprocess.run(shlex.split(command), check=True, capture_output=True)
    assert labels(f"{packed}.tar") == labels(photos)
    if program in ("zstd", "lz4", "lzip"):
        assert command in refused(lambda: list(lk.read_shards([packed])))


def test_a_zip_is_unpacked_by_the_command_that_is_named(photos, tmp_path):
    packed = Path(shutil.make_archive(str(tmp_path / "set"), "zip", photos))
    said = refused(lambda: lk.open_store(packed).keys())
    program, source, option, folder = shlex.split(re.search(r"unzip .*", said)[0])
    assert (program, source, option) == ("unzip", str(packed), "-d")
    shutil.unpack_archive(source, folder)
    assert labels(folder) == labels(photos)


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


def test_a_server_that_compresses_images_is_named(photos, monkeypatch):
    monkeypatch.chdir(photos)
    with serving(Compressing) as port:
        store = lk.HttpStore(f"http://127.0.0.1:{port}")
        assert list(store.keys()) == KEYS
        said = refused(lambda: lk.ImageDataset(store)[0])
        assert "it is a gzip file, as a server sends that compresses images: have it send them as they are" in said
        monkeypatch.setattr(Compressing, "listings_alone", True)  # as the message says
        assert labels(store) == labels(photos)


@pytest.mark.parametrize("form", ["folder", "tar"])
def test_a_chained_url_is_opened_as_fsspec_does(photos, tar, own_home, tmp_path, monkeypatch, form):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where simplecache keeps its files
    place = photos if form == "folder" else tar
    assert labels(f"simplecache::file://{place}") == labels(photos)
    assert "fsspec knows no scheme 'nothing::file'" in refused(lambda: lk.open_store(f"nothing::file://{place}"))
