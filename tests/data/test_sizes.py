"""collect_sizes: every image with its own size, from the cheapest witness that can be believed; nothing lost."""

import os
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings, strategies as st
from PIL import Image

from labkit import collect_sizes
from labkit.data.headers import read_header
from labkit.data.sizes import Readers, choose_readers, parse_cache_name, read_headers, sizes_from_caches
from labkit.util.machine import disk_under
from tests.image_files import encoded, write_pictures
from tests.paths import run_script

OTHERS = ["dog/e.bmp", "dog/h.gif", "dog/i.tif"] + ["dog/f.avif"] * (".avif" in Image.registered_extensions())
IMAGES = [
    "top.jpg", "cat/a.jpeg", "cat/B.JPG", "cat/deeper/still/c.png", "dog/d.WebP", "dog/two words.jpg", "dog/[1] *?.jpg",
    "dog/line\nbreak.jpg", "[x]/y.jpg", "Größe/日本.jpg", "cat.jpg/inside.jpg", os.fsdecode(b"caf\xe9.jpg"),
    *OTHERS,
]  # fmt: skip
HIDDEN = ("dog/..jpg", "cat/.hidden.jpg", ".cache/g.jpg", "dog/@eaDir/h.jpg", "cat/jpg", "notes.txt", "cat/a.txt")
SD = "_0512x0512_sd.npz"
FROM_HEADER = (9, 8, "header")


def touch(folder: Path, *names: str) -> None:
    """Empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def sizes_of(frame: pd.DataFrame) -> dict[str, tuple]:
    return {row.path: (row.width, row.height, row.source) for row in frame.itertuples()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for number, name in enumerate(IMAGES):
        write_pictures(root, name, size=(30 + number, 20))
    write_pictures(root, *HIDDEN, size=(99, 99))
    (root / "empty").mkdir()
    return root


def test_every_image_is_there_with_pillows_size(tree):
    frame = collect_sizes(tree)
    assert sizes_of(frame) == {name: (*Image.open(tree / name).size, "header") for name in IMAGES}
    assert list(frame["path"]) == sorted(IMAGES)
    assert set(frame["exif_orientation"]) == {1}
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "path": "object", "width": "Int64", "height": "Int64", "source": "object", "exif_orientation": "Int64",
        "error": "object",
    }  # fmt: skip
    pd.testing.assert_frame_equal(collect_sizes(str(tree) + "/"), frame)


def test_not_recursive_means_one_folder(tree):
    assert list(collect_sizes(tree / "cat", recursive=False)["path"]) == ["B.JPG", "a.jpeg"]


def test_each_folder_is_listed_once_and_images_with_a_cache_are_not_opened(tmp_path, monkeypatch):
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(os.fspath(path)) or scandir(path))
    monkeypatch.setattr("labkit.data.sizes.read_header", None)
    names = [f"{folder}{number}" for folder in ("", "a/", "a/b/") for number in range(9)]
    for number, name in enumerate(names, 1):
        touch(tmp_path, f"{name}.jpg", f"{name}_{number:04}x0768_sdxl.npz", f"{name}_sdxl_te.npz")
    frame = collect_sizes(tmp_path)
    assert sorted(listed) == [str(tmp_path / folder) for folder in ("", "a", "a/b")]
    assert sizes_of(frame) == {f"{name}.jpg": (number, 768, "cache") for number, name in enumerate(names, 1)}
    assert frame["exif_orientation"].isna().all()


def test_what_no_cache_settles_is_read_from_the_image(tmp_path):
    write_pictures(
        tmp_path, "agree.png", "disagree.png", "twin.png", "twin.jpg", "none.png", "sub/agree.png", size=(9, 8)
    )
    touch(tmp_path, "agree" + SD, "disagree" + SD, "disagree_0009x0008_flux.npz", "twin" + SD)
    # A name is believed, and a cache above is no cache here.
    assert sizes_of(collect_sizes(tmp_path)) == {
        "agree.png": (512, 512, "cache"), "disagree.png": FROM_HEADER, "twin.png": FROM_HEADER,
        "twin.jpg": FROM_HEADER, "none.png": FROM_HEADER, "sub/agree.png": FROM_HEADER,
    }  # fmt: skip
    assert set(collect_sizes(tmp_path, caches=False)["source"]) == {"header"}


def test_the_unreadable_are_listed_with_the_reason(tmp_path):
    write_pictures(tmp_path, "good.jpg", size=(9, 8))
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
    write_pictures(tmp_path, "a.jpg", "locked/b.jpg", size=(9, 8))
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may list any folder
    assert collect_sizes(tmp_path)[["path", "source", "error"]].to_numpy().tolist() == [
        ["a.jpg", "header", ""], ["locked/", "unreadable", "the folder cannot be listed: Permission denied"],
    ]  # fmt: skip
    with pytest.raises(PermissionError):
        collect_sizes(tmp_path / "locked")


def test_every_suffix_counts_in_any_case(tmp_path):
    suffixes = ("jpg", "jpeg", "png", "webp", "avif", "bmp", "jxl", "gif", "tiff", "heic")
    names = {f"{suffix}.{suffix}" for suffix in suffixes} | {f"big {suffix}.{suffix.upper()}" for suffix in suffixes}
    touch(tmp_path, *names, *(name.rpartition(".")[0] + SD for name in names))
    assert sizes_of(collect_sizes(tmp_path)) == dict.fromkeys(names, (512, 512, "cache"))


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
    types = {"dtype": frame.dtypes.to_dict(), "keep_default_na": False, "na_values": {"width": [""]}}
    stored = pd.read_csv(tmp_path / "new" / "sizes.csv", encoding_errors="surrogateescape", **types)
    pd.testing.assert_frame_equal(stored, frame)


# Names of latent caches: the sizes that they state, and the images that these belong to.

SIZELESS = (
    "a.npz", "a_te_outputs.npz", "a_sd3_te.npz", "a_0512x0768_flux_te.npz", "a_0512x0768_te_outputs.npz",
    "a_0512x0768.npz", "a_0512x0768_sd", "a_0512x0768_sd.npz.tmp", "a_0512x0768_SD.npz", "a_0512x0768_sd.NPZ",
    "a_512x768_sd.npz", "a_00512x0768_sd.npz", "a_0512X0768_sd.npz", "a_0512x0768_sd15.npz", "_0512x0768_sd.npz",
    "a_-512x0768_sd.npz", "a_\u0660512x0768_sd.npz", "a_0000x0000_sd.npz", "a-0512x0768_sd.npz",
    "a_0512x0768_sd.npz\n", "a_0512x1000000000_sd.npz",
)  # fmt: skip
SIDES = st.integers(1, 999_999_999)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1), SIDES, SIDES, st.sampled_from(["sd", "sdxl", "sd3", "flux", "hi", "lumina", "anima"]))
@example("a_0100x0100", 512, 768, "sd")
@example("_", 512, 768, "sdxl")
@example("line\nbreak [1]*", 10_000, 7, "sd3")
def test_a_cache_name_states_its_size(stem, width, height, model):
    assert parse_cache_name(f"{stem}_{width:04d}x{height:04d}_{model}.npz") == (stem, width, height)


def test_other_names_state_no_size():
    assert list(filter(parse_cache_name, SIZELESS)) == []


@pytest.mark.parametrize(
    ("images", "caches", "expected"),
    [
        # sd-scripts' issue 1770: `-` sorts before `_`, and the merge gave the first image the second one's size.
        (
            ["beach_towel.png", "beach_towel-crop.png"],
            ["beach_towel_0640x0480_sd.npz", "beach_towel-crop_0320x0200_sd.npz"],
            {"beach_towel.png": (640, 480), "beach_towel-crop.png": (320, 200)},
        ),
        (["a.png", "ab.png"], ["ab" + SD], {"ab.png": (512, 512)}),  # a.png must not adopt it
        (["a_b.png", "a.png"], ["a_b" + SD], {"a_b.png": (512, 512)}),
        (["[x]*.png"], ["[x]*" + SD], {"[x]*.png": (512, 512)}),
        (["a.b.png", "a.png"], ["a.b" + SD], {"a.b.png": (512, 512)}),
        (["a.jpg", "a.png"], ["a" + SD], {}),  # either may have written it
        (["a.jpg", "a.JPG"], ["a" + SD], {}),
        (["a.png", "a_0512x0512_sd.png"], ["a" + SD], {}),  # it may be the oldest kind, of the second
        (["a.png"], ["a" + SD, "a_0512x0512_sdxl.npz", "a_0512x0512_flux.npz"], {"a.png": (512, 512)}),
        (["a.png"], ["a" + SD, "a_0512x0513_sdxl.npz", "a" + SD], {"a.png": None}),
        (["a.png"], ["a_0000x0000_sdxl.npz", "a" + SD], {"a.png": (512, 512)}),
        (["A.png"], ["a" + SD], {}),
        (["a.png"], ["b" + SD], {}),
        ([], ["a" + SD], {}),
    ],
)
def test_a_cache_belongs_to_the_image_of_its_stem(images, caches, expected):
    assert sizes_from_caches(images, caches) == expected
    assert sizes_from_caches(images[::-1], caches[::-1]) == expected


# The choice of readers for many headers; any choice gives the same headers.

US, MS, MANY = 1e-6, 1e-3, 10**6


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "n_files", "options", "expected"),
    [
        (7 * US, 7 * US, 1000, {}, ("local", 1)),
        (7 * US, 7 * US, MANY, {}, ("local", 4)),
        (7 * US, 7 * US, MANY, {"cores": 1}, ("local", 1)),
        (7 * US, 7 * US, 1000, {"num_workers": 3}, ("local", 3)),
        (90 * US, 40 * US, 1000, {"rotating": True}, ("threads", 6)),  # too fast for a head that travels
        (5 * MS, 40 * US, 1000, {}, ("threads", 32)),
        (9 * MS, 40 * US, 1000, {"rotating": True}, ("threads", 1)),
    ],
)
def test_readers_are_chosen_by_what_a_file_took(wall_s, cpu_s, n_files, options, expected):
    assert choose_readers(wall_s, cpu_s, n_files, **{"rotating": False, "cores": 4, **options}) == expected


@pytest.mark.parametrize("engine", ["threads", pytest.param("local", marks=pytest.mark.exhaustive)])
def test_any_readers_give_the_same_headers_in_order(tmp_path, monkeypatch, engine):
    paths = [tmp_path / f"{number:03}.png" for number in range(300)]
    for number, path in enumerate(paths):
        path.write_bytes(encoded(Image.new("RGB", (number + 1, 2)), "PNG") if number % 10 else b"broken")
    paths = list(map(str, paths))
    expected = [read_header(path) for path in paths]
    assert [header.width for header in expected[:12]] == [None, *range(2, 11), None, 12]
    monkeypatch.setattr("labkit.data.sizes.choose_readers", lambda *_, **__: Readers(engine, 2))  # no disk is so slow
    assert read_headers(paths, progress=False) == expected
    assert read_headers(paths[:3]) == expected[:3]
    assert read_headers([]) == []


@pytest.mark.parametrize(("flag", "expected"), [("1\n", ("sda", True)), ("0\n", ("sda", False)), (None, ("", False))])
@pytest.mark.parametrize("layout", ["disk", "partition"])
def test_the_kernels_word_on_rotation(tmp_path, flag, expected, layout):
    disk = tmp_path / "block" / "sda"
    block = disk if layout == "disk" else disk / "sda1"
    block.mkdir(parents=True)
    if flag:
        (disk / "queue").mkdir()
        (disk / "queue" / "rotational").write_text(flag)
    device = os.stat(tmp_path).st_dev
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(block)
    assert disk_under(tmp_path, devices=tmp_path) == expected
