"""Every script of data_scripts/: its help, what it refuses, and real runs from a shell."""

import json
import subprocess
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

import labkit as lk
from labkit.app.cli import app
from tests.paths import SCRIPTS, contents, run_script
from tests.tars import make_tar, member

# What each script refuses: arguments, and words from its one line. `{set}` is a folder of photos.
WRONG = {
    "collect_sizes": [(["{out}/missing", "{out}/sizes.csv"], "missing")],
    "download": [(["{out}", "--size", "64px"], "full, 320px, 160px")],
    "extract_tars": [
        (["{out}", "{out}/missing.tar"], "is not a file"),
        (["{out}", "{set}/manifest.json"], "gives no name for a folder"),
        (["{out}", "{bad}", "--num-workers", "0"], "'../up.jpg' has `..` in its name"),
    ],
    "make_depth": [(["{out}", "0"], "count must be")],
    "make_pixels": [
        (["{out}/missing", "{out}/pixels"], "missing"),
        (["{set}", "{set}/manifest.json"], "is not a pixel store"),
        (["{broken}", "{out}/pixels"], "1 of 2 items failed, the others are done: b/1.png: DecodeError"),
    ],
    "make_photos": [
        (["{out}", "0"], "count must be"),
        (["{out}", "1", "--engine", "dask"], "local, threads, ray"),
        (["{out}", "1", "--address", "10.0.0.1:6379"], "engine='ray'"),
    ],
    "make_shards": [
        (["{out}/missing", "{out}/shards"], "missing"),
        (["{set}", "{out}", "--max-count", "0"], "max_count must be an integer >= 1, got 0"),
    ],
}  # fmt: skip


# Scripts run as from a shell, one after the other: a process for each would load torch each time.
ONE_BY_ONE = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def succeed(*commands):
    """What scripts print that are started from a shell: each is its name and its arguments."""
    words = [[str(SCRIPTS / f"{name}.py"), *map(str, arguments)] for name, *arguments in commands]
    program = words[0] if len(words) == 1 else ["-c", ONE_BY_ONE, json.dumps(words)]
    result = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A set made by the script, with processes."""
    root = tmp_path_factory.mktemp("scripts") / "photos"
    assert succeed(["make_photos", root, 6, "--engine", "local", "--num-threads", 2]) == f"{root}: 6 photos\n"
    return root


@pytest.fixture(scope="module")
def places(photos, tmp_path_factory):
    """What `WRONG` names: a set of photos, an unsafe tar, and a folder of two images, one of them broken."""
    images = tmp_path_factory.mktemp("images")
    for name in ("a", "b"):
        (images / name).mkdir()
    Image.new("RGB", (30, 20)).save(images / "a" / "0.png")
    (images / "b" / "1.png").write_bytes(b"broken")
    return {"set": photos, "bad": make_tar(images / "bad.tar", [member("../up.jpg")]), "broken": images}


@pytest.mark.parametrize("script", WRONG)
def test_help_tells_the_arguments(script):
    result = run_script(script, "--help")
    assert result.exit_code == 0
    assert {"root", "source"} & set(result.stdout.lower().split())


@pytest.mark.parametrize(
    ("script", "arguments", "said"), [(script, *case) for script, cases in WRONG.items() for case in cases]
)
def test_wrong_input_is_refused_in_one_line(places, tmp_path, script, arguments, said):
    result = run_script(script, *(argument.format(out=tmp_path / "out", **places) for argument in arguments))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith(f"{script}: ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.jpg"))
    assert not (tmp_path / "out" / "pixels").exists()


def test_no_script_is_left_out():
    assert set(WRONG) == {path.stem for path in SCRIPTS.glob("*.py")}


# Arguments with the place of something else of the user's, a file `{own}` or the only one of a folder `{folder}`.
WRITERS = {
    "collect_sizes": ["{set}", "{own}"], "download": ["{own}"], "extract_tars": ["{own}", "{tar}"],
    "extract_tars beside": ["{folder}", "{tar}"], "make_depth": ["{own}", "1"], "make_depth in": ["{folder}", "1"],
    "make_pixels": ["{set}", "{own}"], "make_photos": ["{own}", "1"], "make_photos in": ["{folder}", "1"],
    "make_shards": ["{set}", "{own}"], "make_shards in": ["{set}", "{folder}"],
    "labkit convert": ["convert", "{tar}", "{own}"],
    "labkit convert to tiles": ["convert", "--to", "tiles", "--short-side", "8", "{set}", "{folder}"],
    "labkit watch json": ["watch", "--json", "{own}", "none.py"],
    "labkit watch html": ["watch", "--html", "{own}", "none.py"],
}  # fmt: skip


@pytest.mark.parametrize("contents", ["file,label\n1.jpg,cat\n", '{"lr": 0.1}', "<!doctype html><title>mine</title>"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_over_a_file_of_the_users(places, tmp_path, writer, contents):
    folder, name = tmp_path / "folder", writer.split()[0]
    folder.mkdir()
    own = folder / "photos"  # the name that extract_tars gives a folder, too
    own.write_text(contents)
    tar = make_tar(tmp_path / "photos.tar.gz", {"a.jpg": b"1"}, "w:gz")
    words = [word.format(own=own, folder=folder, tar=tar, **places) for word in WRITERS[writer]]
    result = CliRunner().invoke(app, words) if name == "labkit" else run_script(name, *words)
    assert result.exit_code in (1, 2)
    assert str(folder) in result.stderr
    assert own.read_text() == contents
    assert [path.name for path in folder.iterdir() if path.name != ".extract"] == ["photos"]


def test_a_table_of_an_earlier_run_is_replaced(photos, tmp_path):
    table = tmp_path / "sizes.csv"
    table.touch()
    first = run_script("collect_sizes", photos, table)
    tables = [table.read_text()]
    assert run_script("collect_sizes", photos, table).exit_code == first.exit_code == 0
    assert table.read_text() == tables[0]
    table.write_text(tables[0].replace("path,", "image,", 1))  # a user's own columns
    result = run_script("collect_sizes", photos, table)
    assert (result.exit_code, "is no table of sizes: choose another name" in result.stderr) == (2, True)


@pytest.mark.exhaustive
def test_from_photos_to_shards_and_back_with_their_sizes(photos, tmp_path):
    shards = [tmp_path / "shards" / f"shard-00000{number}.tar" for number in range(2)]
    succeed(
        ["make_shards", photos, tmp_path / "shards", "--max-count", 4, "--engine", "threads"],
        ["extract_tars", tmp_path / "out", *shards],
        ["make_depth", tmp_path / "depth", 1, "--tar", "--num-workers", 1],
        ["collect_sizes", photos, tmp_path / "sizes" / "sizes.csv"],
    )
    assert sorted((tmp_path / "shards").glob("*.tar")) == shards
    assert len(contents(tmp_path / "depth" / "train")) == 2
    extracted = sorted(path.read_bytes() for path in (tmp_path / "out").glob("*/**/*.jpg"))
    assert extracted == sorted(path.read_bytes() for path in photos.rglob("*.jpg"))
    assert [path.name for path in sorted((tmp_path / "out").glob("[!.]*"))] == [path.stem for path in shards]
    assert [data.count(b"\n") for data in contents(tmp_path / "sizes").values()] == [1 + 6]


@pytest.mark.exhaustive
def test_pixels_of_a_set(photos, tmp_path):
    path = tmp_path / "out" / "pixels"
    for _ in range(2):  # a rerun says the same
        said = succeed(["make_pixels", photos, path, "--short-side", 10, "--engine", "threads"])
        assert said == f"{path}: 6 images, {path.stat().st_size} bytes\n"
    assert set(lk.PixelStore(path).shapes.min(axis=1).tolist()) == {10}
