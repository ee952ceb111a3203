"""Unusual file names in everything that reads or writes files; `os` and `tarfile` say what is right."""

import os
import pickle
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit import course
from labkit.app import cli
from labkit.data.depth import PRESETS, read_list
from labkit.data.shards_write import store_key
from labkit.errors import ItemErrors
from labkit.measure.frames import save_frame
from tests.hardening.test_hostile import PNG
from tests.paths import contents, run_script
from tests.tars import make_tar

# What a shell would run, an option parser take for an option, a path or URL parser split, or an encoding lose.
UNUSUAL = (
    "plain", "a b", " lead", "-dash", "-rf", "--help", "a\nb", "a\tb", "a\r", "[a]{b}", "{a,b}", "{0..3}", "*?[!x]",
    "100%", "%2E", "%2e%2e", "%41%2f", "#frag", "q?x=1&y", "q\"'`", "a' 'b", '"', ";$(id)|&", "a; touch owned",
    "$(touch owned)", "`touch owned`", "&& touch owned", "|touch owned", "\\back\\n", "C:\\evil", "\\\\host\\share",
    "NUL", "ends in a dot.", "\xe9 nfc", "e\u0301 nfd", "\U0001f600", "\u202eright", "\u05e9\u05dc\u05d5\u05dd",
    "\udcff\udc80", "~", "a=b", "A", "a", "__x__", "a.b.c", "v1.0", "None", "a:b", "\x01\x7f", "\u2028", "\xa0",
)  # fmt: skip
LONGEST_STEMS = ("x" * 251, "\xe9" * 125 + "x", "\U0001f600" * 62 + "xyz")  # 255 bytes with the suffix
FOLDERS = [*UNUSUAL, "x" * 255, "\xe9" * 127]
KEYS = [f"{name}.png" for name in (*UNUSUAL, *LONGEST_STEMS)] + [f"{name}/x.png" for name in FOLDERS]
TREE = {key: PNG + os.fsencode(key) for key in KEYS}  # a different image under each key
QUIET = {"num_workers": 0, "progress": False}


def write_tree(root: Path, tree: dict[str, bytes]) -> Path:
    for key, data in tree.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return root


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_tree(tmp_path / "names", TREE)


def read_all(store) -> dict[str, bytes]:
    return {key: store.read(key) for key in list(store.keys())}


def test_folders_and_servers(folder):
    assert contents(folder) == TREE
    with course.serve_folder(folder) as url:
        stores = [lk.FolderStore(folder), lk.HttpStore(url), lk.ObjectStore(f"file://{folder}")]
        for store in (*stores, pickle.loads(pickle.dumps(lk.open_store(str(folder))))):
            assert read_all(store) == TREE
    dataset = lk.ImageDataset(stores[0], decoder="pil", classes=sorted({"", *FOLDERS}))
    shapes = {key: dataset[index][0].shape for index, key in enumerate(dataset.keys)}
    assert shapes == dict.fromkeys(TREE, (3, 1, 1))
    assert {dataset.classes[label] for label in dataset.labels} == {"", *FOLDERS}


def test_s3(tmp_path):
    pytest.importorskip("moto.server", reason='moto is not installed: python -m pip install -e ".[test]"')
    tree = {key: data for key, data in TREE.items() if key.isprintable()}  # UTF-8, and no newline, which moto refuses
    with course.serve_s3({"photos": write_tree(tmp_path, tree)}) as options:
        assert read_all(lk.ObjectStore("s3://photos", **options)) == tree


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    path = make_tar(tmp_path / "x.tar", TREE | {"..\\evil/..\\evil.png": PNG}, format=form)
    [extracted] = lk.extract_tars(path, tmp_path / "out", engine="threads", progress=False)
    assert contents(extracted) == TREE | {"..\\evil/..\\evil.png": PNG}
    assert set(os.listdir()) == {"out", "x.tar"}
    assert read_all(lk.TarStore(make_tar(tmp_path / "y.tar", TREE, format=form))) == TREE


def test_shards(folder, tmp_path):
    root = lk.write_shards(lk.FolderStore(folder), tmp_path / "shards", classes=[], engine="threads", progress=False)
    [shard] = root.glob("*.tar")
    with tarfile.open(shard) as tar:
        assert sorted(store_key(name) for name in tar.getnames() if not name.endswith(".cls")) == sorted(TREE)
    samples = lk.read_shards(root).samples()
    assert {store_key(f"{sample['__key__']}.png"): sample["png"] for sample in samples} == TREE
    assert len(list(lk.read_shards(root, decoder="pil"))) == len(TREE)


def test_pixels_and_sizes(folder, tmp_path):
    store = lk.PixelStore.build(folder, tmp_path / "x.pixels", classes=[], **QUIET)
    frame = lk.collect_sizes(folder, progress=False)
    assert frame["width"].eq(1).all()
    for keys in (store.keys, lk.PixelStore(store.path).keys, frame["path"]):
        assert set(keys) == set(TREE)


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name.split() == [name]])
def test_lists_of_pairs(tmp_path, name):
    (tmp_path / f"{name}.txt").write_bytes(os.fsencode(f"{name}.png {name}-depth.png\n"))
    found = read_list(tmp_path / f"{name}.txt", PRESETS["hypersim"])
    assert [list(names) for names in found.names.values()] == [[f"{name}.png"], [f"{name}-depth.png"]]


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name.split() != [name]])
def test_names_with_blanks_in_a_list_are_refused(tmp_path, name):
    (tmp_path / "list.txt").write_bytes(os.fsencode(f"rgb.png depth.png\n{name}.png x{name}x.png {name}.png z\n"))
    with pytest.raises(ValueError, match=r"line 2 of .*list\.txt has \d+ columns.*names without blanks"):
        read_list(tmp_path / "list.txt", PRESETS["hypersim"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folder", "stem"), [*((name, "x") for name in FOLDERS), *((".", stem) for stem in (*UNUSUAL, *LONGEST_STEMS))]
)
def test_everything_that_labkit_writes(tmp_path, monkeypatch, frame_of, folder, stem):
    """In a folder of an unusual name, and in files of such names."""
    monkeypatch.chdir(tmp_path)
    tree, root = {"a/x.png": PNG}, tmp_path / folder
    photos = write_tree(root / "photos", tree)
    store = lk.open_store(str(photos))
    shards = lk.write_shards(store, root / "shards", engine="threads", **QUIET)
    for place in (str(shards), shards, f"{shards}/shard-000000.tar", [shards / "shard-000000.tar"]):
        assert len(list(lk.read_shards(place, decoder="pil"))) == 1
    lk.PixelStore.build(store, root / f"{stem}.pix", **QUIET)
    assert list(lk.PixelStore(root / f"{stem}.pix").keys) == list(tree)
    frame = frame_of({"a": [1.0]}, baseline="a")
    assert len(lk.load_frame(save_frame(frame, root / f"{stem}.csv"))) == 1
    packed, plain = make_tar(root / f"{stem}.tgz", tree, "w:gz"), root / f"{stem}.tar"
    relative = [os.path.join(folder, path.name) for path in (packed, plain)]
    result = CliRunner().invoke(cli.app, ["convert", "--", *relative], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert read_all(lk.open_store(str(plain))) == tree
    [extracted] = lk.extract_tars(plain, root / "out", engine="threads", **QUIET)
    assert contents(extracted) == tree
    assert extracted.name == stem
    assert list(lk.collect_sizes(photos, progress=False)["path"]) == list(tree)
    assert len(lk.FolderStore(lk.make_photos(root / "made", 1, progress=False))) == 1
    files = {f"{stem}.{suffix}" for suffix in ("pix", "csv", "tgz", "tar")}
    assert set(os.listdir(root)) - {f"{stem}.tar.labkit-index.npz"} == {*files, "photos", "shards", "out", "made"}
    assert not Path("owned").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # one that names such a path ends the workers of xdist
@pytest.mark.parametrize("name", ["-dash ;$(touch owned) '{a,b}*?\n\U0001f600%41", "\udcff"])
def test_scripts_and_servers(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / name
    photos, archive = root / "photos", root / "x.tar"

    def run(script: str, *arguments) -> None:
        result = run_script(script, "--", *arguments)
        assert result.exit_code == 0, result.output

    run("make_photos", photos, 1)
    with course.serve_folder(photos) as url:
        assert url.startswith("http://127.0.0.1:")
        assert read_all(lk.HttpStore(url)) == read_all(lk.FolderStore(photos))
    run("make_depth", root / "depth", 1)
    run("make_pixels", photos, root / "x.pixels")
    run("collect_sizes", photos, root / "sizes.csv")
    make_tar(archive, {f"{name}.png": PNG})
    run("make_shards", archive, root / "shards")
    run("extract_tars", root / "out", archive)
    assert set(contents(root / "out" / "x")) == {f"{name}.png"}
    assert len(list((root / "shards").glob("*.tar"))) == 1
    assert os.listdir() == [name]


def test_an_error_names_the_file_and_the_cause_in_one_line(tmp_path):
    (tmp_path / "a\nb.tar").write_bytes(b"no tar at all")
    with pytest.raises(ItemErrors) as caught:
        lk.extract_tars(tmp_path / "a\nb.tar", tmp_path / "out", engine="threads", **QUIET)
    [text] = caught.value.failures.values()
    assert "\n" not in text
    assert r"a\nb.tar" in text
    assert text.endswith("Copy or download it again")
