"""Unusual names in all that reads or writes files: the ones that did harm somewhere, and those that Hypothesis finds.

`os`, `tarfile` and Pillow say what is right.
"""

import math
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from PIL import Image

import labkit as lk
from labkit import course
from labkit.app import cli
from labkit.data.extract import extract_tars
from labkit.data.shards_write import store_key
from labkit.errors import ItemErrors
from labkit.measure.frames import load_frame, save_frame
from tests.hardening.inputs import files_of, image_bytes
from tests.hardening.searches import fewer
from tests.image_files import encoded
from tests.memory_store import MemoryStore
from tests.paths import contents, invoke, run_script
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
STEMS, FOLDERS = [*UNUSUAL, *LONGEST_STEMS], [*UNUSUAL, "x" * 255, "\xe9" * 127]
PNG = image_bytes((1, 1))
KEYS = [f"{stem}.png" for stem in STEMS] + [f"{folder}/x.png" for folder in FOLDERS]
TREE = {key: PNG + os.fsencode(key) for key in KEYS}  # another image under each key
QUIET = {"num_workers": 0, "progress": False}

# What a file's name may hold on Linux: all bytes but two, bytes that are no UTF-8 as Python spells them.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
not_utf8 = st.binary(min_size=1, max_size=12).map(lambda data: os.fsdecode(data.translate(None, b"/\0") + b"\xff"))
stems = (st.text(characters, min_size=1, max_size=12) | not_utf8).filter(lambda name: not name.startswith("."))
keys = st.builds("{}/{}{}".format, stems, stems, st.sampled_from([".jpg", ".png", ".PNG", ".webp"]))


def write_tree(root: Path, tree: dict[str, bytes]) -> Path:
    for key, data in tree.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return root


# Stores.


def test_folders_servers_and_sizes_have_every_key(tmp_path):
    folder = write_tree(tmp_path, TREE)
    with course.serve_folder(folder) as url:
        stores = [lk.FolderStore(folder), lk.HttpStore(url), lk.ObjectStore(f"file://{folder}")]
        for store in (*stores, pickle.loads(pickle.dumps(lk.open_store(str(folder))))):
            assert files_of(store) == TREE
    frame = lk.collect_sizes(folder, progress=False)
    assert set(frame["path"]) == set(TREE)
    assert frame["width"].eq(1).all()


@fewer
@given(st.dictionaries(keys, st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5))
@example(dict.fromkeys(KEYS, (1, 2)))
def test_pixels_keep_the_keys_images_and_labels_of_their_store(tmp_path, sizes):
    (tmp_path / "x.pixels").unlink(missing_ok=True)
    images = {key: Image.new("RGB", size, (*size, 7)) for key, size in sizes.items()}
    store = MemoryStore({key: encoded(image, "PNG") for key, image in images.items()})
    folders = {key: key.rpartition("/")[0] for key in sizes}
    options = {"decoder": "pil", "classes": sorted(set(folders.values()))}
    lk.PixelStore.build(store, tmp_path / "x.pixels", short_side=64, **options, **QUIET)
    built, dataset = lk.PixelStore(tmp_path / "x.pixels"), lk.ImageDataset(store, **options)
    assert list(built.keys) == list(dataset.keys) == sorted(sizes)
    for index, key in enumerate(built.keys):
        np.testing.assert_array_equal(built.pixels(index), np.asarray(images[key]))
        np.testing.assert_array_equal(dataset[index][0].permute(1, 2, 0), np.asarray(images[key]))
        assert built.classes[built.labels[index]] == dataset.classes[dataset.labels[index]] == folders[key]


# Tars and shards.


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_are_extracted_and_read_under_the_same_names(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    tree = TREE | {"..\\evil/..\\evil.png": PNG}
    path = make_tar(tmp_path / "x.tar", tree, format=form)
    [extracted] = extract_tars(path, tmp_path / "out", engine="threads", progress=False)
    assert contents(extracted) == tree
    assert set(os.listdir()) == {"out", "x.tar"}
    assert files_of(lk.TarStore(make_tar(tmp_path / "y.tar", TREE, format=form))) == TREE


@fewer
@given(st.sets(keys, min_size=1, max_size=8), st.integers(1, 3), st.none() | st.integers(0, 9))
@example(set(KEYS), 50, None)
@example({"__x__/a.jpg", "a/B.JPG", "a/b%2E.jpg", "a/b.jpg", "a/b.jpg.jpg", "a/b.png"}, 50, None)
def test_shards_hold_each_image_under_a_name_that_gives_its_key_back(tmp_path, found, max_count, seed):
    shutil.rmtree(tmp_path / "shards", ignore_errors=True)
    store = MemoryStore({key: PNG + os.fsencode(key) for key in found})
    options = {"max_count": max_count, "seed": seed, "engine": "threads", "classes": [], **QUIET}
    dataset = lk.read_shards(lk.write_shards(store, tmp_path / "shards", **options), decoder="pil")
    samples = list(dataset.samples())
    assert len({sample["__key__"] for sample in samples}) == len(found), "WebDataset would take two images for one"
    parts = {(sample["__key__"], name): data for sample in samples for name, data in sample.items()}
    images = {place: data for place, data in parts.items() if not place[1].startswith("__") and place[1] != "cls"}
    assert {store_key(".".join(place)): data for place, data in images.items()} == store.files
    assert len(list(dataset)) == len(found)
    assert len(dataset.urls) == math.ceil(len(found) / max_count)


# All that is written, in a folder of a name and in files of it.

WORST = "-dash ;$(touch owned) '{a,b}*?\n\U0001f600%41"
PLACES = [(WORST, "x"), ("\udcff", WORST), pytest.param("~", "\xe9" * 125 + "x", marks=pytest.mark.exhaustive)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # one that names such a path ends the workers of xdist
@pytest.mark.parametrize(("folder", "stem"), PLACES)
def test_all_that_labkit_writes_lies_where_it_was_told_and_is_read_again(
    tmp_path, tmp_path_factory, monkeypatch, frame_of, folder, stem
):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path_factory.mktemp("home")))  # for indexes of tars whose names are long
    monkeypatch.chdir(tmp_path)
    root = tmp_path / folder
    photos, sizes, packed, plain = root / "photos", root / "sizes", root / f"{stem}.tgz", root / f"{stem}.tar"

    def run(script: str, *arguments: object) -> None:
        result = run_script(script, "--", *arguments)
        assert result.exit_code == 0, result.output

    run("make_photos", photos, 1)
    tree = contents(photos)
    del tree["manifest.json"]
    with course.serve_folder(photos) as url:
        assert url.startswith("http://127.0.0.1:")
        assert files_of(lk.HttpStore(url)) == files_of(lk.open_store(str(photos))) == tree
    run("make_pixels", photos, root / f"{stem}.pix")
    assert list(lk.PixelStore(root / f"{stem}.pix").keys) == list(tree)
    run("collect_sizes", photos, sizes / f"{stem}.csv")
    make_tar(packed, tree, "w:gz")
    relative = [os.path.join("./~" if folder == "~" else folder, path.name) for path in (packed, plain)]
    result = invoke(cli.main, ["convert", "--", *relative])
    assert result.exit_code == 0, result.output
    assert files_of(lk.open_store(str(plain))) == tree
    run("make_shards", plain, shards := root / "shards")
    for place in (str(shards), shards, f"{shards}/shard-000000.tar", [shards / "shard-000000.tar"]):
        assert len(list(lk.read_shards(place, decoder="pil"))) == 1
    run("extract_tars", root / "out", plain)
    assert contents(root / "out" / stem) == tree
    frame = frame_of({"a": [1.0]}, baseline="a")
    assert len(load_frame(save_frame(frame, root / f"{stem}.csv"))) == 1
    files = {f"{stem}.{suffix}" for suffix in ("pix", "csv", "tgz", "tar")}
    assert set(os.listdir(root)) - {f"{stem}.tar.labkit-index.npz"} == {*files, "photos", "sizes", "shards", "out"}
    assert not Path("owned").exists()


def test_an_error_names_the_file_and_the_cause_in_one_line(tmp_path):
    (tmp_path / "a\nb.tar").write_bytes(b"no tar at all")
    with pytest.raises(ItemErrors) as caught:
        extract_tars(tmp_path / "a\nb.tar", tmp_path / "out", engine="threads", **QUIET)
    [text] = caught.value.failures.values()
    assert "\n" not in text
    assert r"a\nb.tar" in text
    assert text.endswith("Copy or download it again")
