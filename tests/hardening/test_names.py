"""Names that people and programs give files, in every path that labkit takes; `os` and `tarfile` are the oracles."""

import gzip
import io
import json
import os
import pickle
import runpy
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.data.shards.layout import store_key
from labkit.data.sizes.sd_metadata import write_metadata_cache
from labkit.data.stores.local_servers import serve_folder
from labkit.data.tar.convert import convert_tar
from tests.hardening.test_hostile import PNG
from tests.paths import REPO

ODD = (
    "plain", "a b", " lead", "-dash", "--help", "a\nb", "a\tb", "a\r", "[a]{b}", "{a,b}", "{0..3}", "*?[!x]", "100%",
    "%2E", "%41%2f", "#frag", "q?x=1&y", "q\"'`", ";$(id)|&", "\\back\\n", "\xe9 nfc", "e\u0301 nfd", "\U0001f600",
    "\u202eright", "\u05e9\u05dc\u05d5\u05dd", "\udcff\udc80", "~", "a=b", "A", "a", "__x__", "a.b.c", "v1.0", "None",
    "a:b", "\x01\x7f", "\u2028", "\xa0",
)  # fmt: skip
LONGEST = ("x" * 251, "\xe9" * 125 + "x", "\U0001f600" * 62 + "xyz")  # 255 bytes with the suffix
ROOTS = [*ODD, "x" * 255, "\xe9" * 127]


def content(key: str) -> bytes:
    """An image of its own for each name."""
    return PNG + os.fsencode(key)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> dict[str, bytes]:
    """Key -> bytes: every odd name as that of an image, and as that of a folder."""
    keys = [f"{name}.png" for name in (*ODD, *LONGEST)] + [f"{name}/x.png" for name in ROOTS]
    return {key: content(key) for key in keys}


@pytest.fixture(scope="module")
def folder(tree, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("names")
    for key, data in tree.items():
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_bytes(data)
    return root


def packed(tree: dict[str, bytes], **options) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", encoding="utf-8", errors="surrogateescape", **options) as tar:
        for key, data in tree.items():
            info = tarfile.TarInfo(key)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def walked(root: Path) -> dict[str, bytes]:
    """What the operating system says lies there."""
    files = [os.path.join(at, name) for at, _, names in os.walk(root) for name in names]
    return {os.path.relpath(path, root): Path(path).read_bytes() for path in files}


def read_all(store) -> dict[str, bytes]:
    return {key: store.read(key) for key in list(store.keys())}


def test_a_folder(folder, tree):
    assert walked(folder) == tree
    assert read_all(lk.FolderStore(folder)) == tree
    assert read_all(pickle.loads(pickle.dumps(lk.open_store(str(folder))))) == tree
    dataset = lk.ImageDataset(lk.FolderStore(folder), decoder="pil")
    assert {dataset.keys[index]: dataset[index][0].shape for index in range(len(dataset))} == dict.fromkeys(
        tree, (3, 1, 1)
    )
    assert dataset.classes == sorted({"", *ROOTS})


@pytest.mark.parametrize("mode", ["index", "tarfile", "reopen"])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar(tree, tmp_path, mode, form):
    if mode == "reopen":  # which reads all headers for each
        tree = dict(list(tree.items())[:10])
    (tmp_path / "x.tar").write_bytes(packed(tree, format=form))
    with tarfile.open(tmp_path / "x.tar", encoding="utf-8", errors="surrogateescape") as tar:
        assert {info.name for info in tar} == set(tree)
    assert read_all(lk.TarStore(tmp_path / "x.tar", mode)) == tree


def test_a_server(folder, tree):
    with serve_folder(folder) as url:
        assert read_all(lk.HttpStore(url)) == tree


def test_an_object_store(folder, tree):
    from labkit.data.stores.objects import ObjectStore

    assert read_all(ObjectStore(f"file://{folder}")) == tree


def test_s3(tree, tmp_path):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    tree = {key: data for key, data in tree.items() if key.isprintable()}  # UTF-8, and no newline, which moto refuses
    for key, data in tree.items():
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(data)
    with lk.serve_s3({"photos": tmp_path}) as options:
        assert read_all(lk.ObjectStore("s3://photos", **options)) == tree


def test_shards(folder, tree, tmp_path):
    root = lk.write_shards(lk.FolderStore(folder), tmp_path / "shards", engine="threads", progress=False)
    samples = {}
    for shard in root.glob("*.tar"):
        with tarfile.open(shard) as tar:
            members = [info.name for info in tar if not info.name.endswith(".cls")]
        assert len(members) == len(tree)
        assert {store_key(member) for member in members} == set(tree)
    for sample in lk.read_shards(root).samples():
        samples[store_key(f"{sample['__key__']}.png")] = sample["png"]
    assert samples == tree
    assert len(list(lk.read_shards(root, decoder="pil"))) == len(tree)


def test_pixels(folder, tree, tmp_path):
    store = lk.PixelStore.build(folder, tmp_path / "x.pixels", num_workers=0, progress=False)
    assert set(store.keys) == set(tree)
    assert set(lk.PixelStore(tmp_path / "x.pixels").keys) == set(tree)


def test_sizes(folder, tree, tmp_path):
    frame = lk.collect_sizes(folder, progress=False)
    assert set(frame["path"]) == set(tree)
    assert frame["width"].eq(1).all()
    with pytest.warns(UserWarning, match="no caption"):
        path = write_metadata_cache(frame, folder)
    try:
        again = lk.collect_sizes(folder, progress=False)
        assert set(json.loads(path.read_bytes())) == {os.path.join(folder, key) for key in tree}
        assert set(again["path"]) == set(tree)
    finally:
        path.unlink()


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_extraction(tree, tmp_path, form):
    (tmp_path / "x.tar").write_bytes(packed(tree, format=form))
    [folder] = lk.extract_tars(tmp_path / "x.tar", tmp_path, engine="threads", verify=True, progress=False)
    assert walked(folder) == tree


@pytest.mark.parametrize("name", [name for name in ODD if name.split() == [name]])
def test_a_list_of_pairs(tmp_path, name):
    from labkit.data.depth.presets import PRESETS, read_list

    path = tmp_path / f"{name}.txt"
    path.write_bytes(os.fsencode(f"{name}.png {name}-depth.png\n"))
    found = read_list(path, PRESETS["hypersim"])
    assert [list(names) for names in found.names.values()] == [[f"{name}.png"], [f"{name}-depth.png"]]


@pytest.mark.parametrize("name", [name for name in ODD if name.split() != [name]])
def test_a_list_names_no_file_with_a_blank(tmp_path, name):
    from labkit.data.depth.presets import PRESETS, read_list

    path = tmp_path / "list.txt"
    path.write_bytes(os.fsencode(f"rgb.png depth.png\n{name}.png x{name}x.png {name}.png z\n"))
    with pytest.raises(ValueError, match=r"line 2 of .*list\.txt has \d columns.*names without blanks"):
        read_list(path, PRESETS["hypersim"])


@pytest.mark.parametrize("name", ROOTS)
def test_what_labkit_writes_itself(tmp_path, frame_of, name):
    """Each under a folder, and as a file, of this name."""
    tree = {"a/x.png": content("x")}
    root = tmp_path / name
    data = packed(tree)
    (root / "photos" / "a").mkdir(parents=True)
    (root / "photos" / "a" / "x.png").write_bytes(tree["a/x.png"])
    store = lk.open_store(str(root / "photos"))
    shards = lk.write_shards(store, root / "shards", engine="threads", num_workers=0, progress=False)
    for place in (str(shards), shards, f"{shards}/shard-000000.tar", [shards / "shard-000000.tar"]):
        assert len(list(lk.read_shards(place, decoder="pil"))) == 1
    lk.PixelStore.build(store, root / "x.pixels", num_workers=0, progress=False)
    assert list(lk.PixelStore(root / "x.pixels").keys) == list(tree)
    frame = frame_of({"a": [1.0]}, baseline="a")
    assert len(lk.load_frame(lk.save_frame(frame, root / "frame.csv"))) == 1
    (root / "x.tar").write_bytes(data)
    assert read_all(lk.open_store(str(root / "x.tar"))) == tree
    [extracted] = lk.extract_tars(root / "x.tar", root / "out", engine="threads", num_workers=0, progress=False)
    assert walked(extracted) == tree
    assert list(lk.collect_sizes(root / "photos", progress=False)["path"]) == list(tree)
    assert len(lk.FolderStore(lk.make_photos(root / "made", 1, progress=False))) == 1


@pytest.mark.parametrize("name", [*ODD, *LONGEST])
def test_files_of_this_name(tmp_path, frame_of, name):
    tree = {"a/x.png": content("x")}
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "x.png").write_bytes(tree["a/x.png"])
    store = lk.FolderStore(tmp_path / "photos")
    pixels = tmp_path / f"{name}.pix"
    lk.PixelStore.build(store, pixels, num_workers=0, progress=False)
    assert list(lk.PixelStore(pixels).keys) == list(tree)
    frame = frame_of({"a": [1.0]}, baseline="a")
    assert len(lk.load_frame(lk.save_frame(frame, tmp_path / f"{name}.csv"))) == 1
    archive = tmp_path / "tars" / f"{name}.tar"
    archive.parent.mkdir()
    archive.write_bytes(packed(tree))
    assert read_all(lk.open_store(str(archive))) == tree
    [extracted] = lk.extract_tars(archive, tmp_path / "out", engine="threads", num_workers=0, progress=False)
    assert walked(extracted) == tree
    assert extracted.name == name
    (tmp_path / f"{name}.tgz").write_bytes(gzip.compress(packed(tree)))
    plain = convert_tar(tmp_path / f"{name}.tgz", tmp_path / f"{name}.tar", progress=False)
    assert read_all(lk.TarStore(plain)) == tree
    files = {os.path.relpath(path, tmp_path) for path in tmp_path.glob("*") if path.is_file()}
    stored = f"{name}.tar.labkit-index.npz"
    expected = {f"{name}.{suffix}" for suffix in ("pix", "csv", "tgz", "tar")}
    assert files <= {*expected, stored}, "something is left"
    assert files >= expected


@pytest.mark.parametrize("name", ["-dash ;$(id) '{a,b}*?\n\U0001f600%41", "\udcff"])
def test_scripts(tmp_path, name):
    root = tmp_path / name
    scripts = REPO / "data_scripts"

    def run(script: str, *arguments) -> None:
        app = runpy.run_path(str(scripts / f"{script}.py"))["app"]
        result = CliRunner().invoke(app, ["--", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    run("make_photos", root / "photos", 1)
    run("make_depth", root / "depth", 1)
    run("make_pixels", root / "photos", root / "x.pixels")
    run("collect_sizes", root / "photos", root / "sizes.csv")
    (root / "x.tar").write_bytes(packed({f"{name}.png": PNG}))
    run("make_shards", root / "x.tar", root / "shards")
    run("extract_tars", root / "out", root / "x.tar")
    assert set(walked(root / "out" / "x")) == {f"{name}.png"}
    assert len(list((root / "shards").glob("*.tar"))) == 1


def test_an_error_of_many_names_the_file_and_the_cause(tmp_path):
    (tmp_path / "a\nb.tar").write_bytes(b"no tar at all")
    with pytest.raises(lk.ItemErrors) as caught:
        lk.extract_tars(tmp_path / "a\nb.tar", tmp_path / "out", engine="threads", num_workers=0, progress=False)
    [text] = caught.value.failures.values()
    assert "\n" not in text
    assert r"a\nb.tar" in text
    assert text.endswith("Copy or download it again")
