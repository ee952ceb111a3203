"""Every script of data_scripts/: its help, what it refuses, and what it does not write over."""

import runpy

import pytest
from PIL import Image

from labkit.app.cli import main
from tests.paths import SCRIPTS, invoke, run_script
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


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("scripts") / "photos"
    assert run_script("make_photos", root, 6).output == f"{root}: 6 photos\n"
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
def test_help_tells_the_arguments(script, monkeypatch, capsys):
    """Started as a shell does."""
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0
    assert {"root", "source"} & set(capsys.readouterr().out.lower().split())


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


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_over_a_file_of_the_users(places, tmp_path, writer):
    contents = "<!doctype html><title>mine</title>" if writer.endswith("html") else "file,label\n1.jpg,cat\n"
    folder, name = tmp_path / "folder", writer.split()[0]
    folder.mkdir()
    own = folder / "photos"  # the name that extract_tars gives a folder, too
    own.write_text(contents)
    tar = make_tar(tmp_path / "photos.tar.gz", {"a.jpg": b"1"}, "w:gz")
    words = [word.format(own=own, folder=folder, tar=tar, **places) for word in WRITERS[writer]]
    result = invoke(main, words) if name == "labkit" else run_script(name, *words)
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
