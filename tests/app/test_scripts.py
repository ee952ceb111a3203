"""Every script of data_scripts/: its help, what it refuses, and real runs from a shell."""

import importlib
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from PIL import Image

import labkit as lk
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
def test_help_tells_the_arguments_and_what_may_not_be_read_is_refused_by_the_script_itself(script):
    """In one line, not by the argument parser in a box with the usage. (As root every file is readable.)"""
    result = run_script(script, "--help")
    assert result.exit_code == 0
    assert {"root", "source"} & set(result.stdout.lower().split())
    [main] = importlib.import_module(f"data_scripts.{script}").main.registered_commands
    hints = map(typing.get_args, typing.get_type_hints(main.callback, include_extras=True).values())
    assert {about[1].readable for about in hints if about and about[0] in (Path, list[Path])} == {False}


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
